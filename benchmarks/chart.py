"""Bar charts as SVG, without a plotting package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLORS = ("#4878a8", "#d2872c", "#3f9b6c", "#b3485d", "#7d6bb0", "#8a7660", "#5fa8b5", "#777777", "#c77cab", "#9a9a3a")
BAR, GAP, LABEL, WIDTH, TOP = 16, 14, 170, 820, 64


def bar_chart(title: str, groups: Mapping[str, Mapping[str, float]], unit: str, mark: float | None = None) -> str:
    """Draw horizontal bars, one group of them for each key; a dashed line at ``mark``.

    Args:
        groups: group -> name of a bar -> its length.
        unit: below the title.
    """
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    most = max((value for bars in groups.values() for value in bars.values()), default=1.0)
    step = tick_step(max(most, mark or 0.0))
    limit = step * math.ceil(max(most, mark or 0.0) / step)
    scale = (WIDTH - LABEL - 60) / limit
    height = TOP + sum(len(bars) * BAR + GAP for bars in groups.values()) + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="10" y="38" fill="#555">{escape(unit)}</text>',
    ]
    bottom = height - 20
    for number in range(round(limit / step) + 1):
        x = LABEL + number * step * scale
        lines.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle">{number * step:g}</text>')
    lines += _bars(groups, names, scale)
    if mark is not None:
        x = LABEL + mark * scale
        lines.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#333" {_DASHED}/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


_DASHED = 'stroke-dasharray="4 3"'


def _bars(groups: Mapping[str, Mapping[str, float]], names: Sequence[str], scale: float) -> list[str]:
    lines, y = [], TOP
    for group, bars in groups.items():
        lines.append(f'<text x="10" y="{y + BAR - 4}" font-weight="bold">{escape(group)}</text>')
        for name, value in bars.items():
            color, width = COLORS[names.index(name) % len(COLORS)], max(value * scale, 0.5)
            lines += [
                f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{color}">'
                f"<title>{escape(f'{group}, {name}: {value:.3g}')}</title></rect>",
                f'<text x="{LABEL + width + 4:.1f}" y="{y + BAR - 5}">{escape(name)} {value:.3g}</text>',
            ]
            y += BAR
        y += GAP
    return lines


def tick_step(most: float) -> float:
    """Return 1, 2 or 5 times a power of ten, such that 4 to 10 of them reach ``most``."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most / 4))
    return next(factor * power for factor in (1, 2, 5, 10) if most / (factor * power) <= 10)

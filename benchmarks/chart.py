"""Charts as SVG, of bars and of lines, without a plotting package."""

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
    lines = _head(title, unit, height)
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


def line_chart(title: str, lines: Mapping[str, Sequence[float]], unit: str) -> str:
    """Draw lines over steps 1, 2, 3 ...; an earlier one is wider, so that it is seen below one that is equal.

    Args:
        lines: name -> its values.
        unit: below the title.
    """
    left, height = 50, 360
    bottom, right = height - 30, WIDTH - 20
    steps = max(len(values) for values in lines.values())
    most = max(max(values) for values in lines.values())
    tick, every = tick_step(most), tick_step(float(steps))
    limit = tick * math.ceil(most / tick)
    up, along = (bottom - TOP) / limit, (right - left) / max(steps, 1)
    drawn = _head(title, unit, height)
    for number in range(round(limit / tick) + 1):
        y = bottom - number * tick * up
        drawn.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{number * tick:g}</text>')
    for number in range(int(steps // every) + 1):
        x = left + number * every * along
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number * every:g}</text>')
    for place, (name, values) in enumerate(lines.items()):
        color, width = COLORS[place % len(COLORS)], 1 + 3 * (len(lines) - 1 - place)
        points = " ".join(f"{left + step * along:.1f},{bottom - v * up:.1f}" for step, v in enumerate(values, 1))
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        drawn.append(f'<rect x="{right - 120}" y="{TOP + 18 * place}" width="16" height="{width}" fill="{color}"/>')
        drawn.append(f'<text x="{right - 98}" y="{TOP + 18 * place + 5}">{escape(name)}</text>')
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _head(title: str, unit: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="10" y="38" fill="#555">{escape(unit)}</text>',
    ]

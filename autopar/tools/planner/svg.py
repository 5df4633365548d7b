"""A plan as a picture, plain SVG: the schedule as a Gantt chart with its bubbles, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from autopar.tools.planner.bubbles import Played
from autopar.tools.planner.candidate import Estimate

__all__ = ["draw"]

_WIDTH, _LEFT, _RIGHT = 1100, 70, 20
_KINDS = {
    "F": ("#4c8ed9", "forward"),
    "B": ("#3d9450", "backward"),
    "I": ("#5cb56e", "backward to the input"),
    "W": ("#b6dd8c", "backward to the weights"),
}
_PARTS = {
    "weights": "#34557f",
    "gradients": "#4c8ed9",
    "optimizer": "#9cc3ee",
    "activations": "#e08e45",
    "logits": "#f0c987",
    "work": "#c9483f",
    "buffers": "#8d7ab8",
    "reserve": "#b0b0b0",
}


def draw(estimate: Estimate, played: Played, limit: float, title: str) -> str:
    """Return an SVG document.

    Args:
        played: the schedule, of as many micro-batches as are to be seen.
        limit: bytes of a GPU.
    """
    ranks = len(played.ranks)
    row = max(6, min(26, 420 // ranks))
    chart = list(_gantt(played, 70, row))
    top = 70 + ranks * (row + 3) + 60
    bars = list(_memory(estimate, limit, top))
    height = top + 240
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 24, title, size=15),
        _text(_LEFT, 44, f"{estimate.candidate}: {estimate.time:.2f} s a step, bubble {estimate.bubble:.1%}"),
        *chart,
        *bars,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _gantt(played: Played, top: int, row: int) -> Iterator[str]:
    scale = (_WIDTH - _LEFT - _RIGHT) / played.time if played.time else 0.0
    seen: dict[str, None] = {}
    for rank, slots in enumerate(played.ranks):
        y = top + rank * (row + 3)
        yield _text(8, y + row * 0.75, f"pp rank {rank}", size=min(12, row + 2))
        yield f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{row}" fill="#eeeeee"/>'
        for slot in slots:
            kind, stage, microbatch = slot.action
            color, name = _KINDS[kind]
            seen[kind] = None
            width = (slot.end - slot.start) * scale
            if width <= 0:
                continue
            x = _LEFT + slot.start * scale
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{row}" fill="{color}" stroke="white" '
                f'stroke-width="0.5"><title>{name} of micro-batch {microbatch}, stage {stage}: '
                f"{slot.start:.4f} to {slot.end:.4f} s</title></rect>"
            )
            if width > 14 and row > 11:
                yield _text(x + width / 2, y + row * 0.7, str(microbatch), size=10, middle=True)
    entries = [(_KINDS[kind][1], _KINDS[kind][0]) for kind in seen] + [("waiting", "#eeeeee")]
    yield from _legend(entries, top + len(played.ranks) * (row + 3) + 8)


def _memory(estimate: Estimate, limit: float, top: int) -> Iterator[str]:
    yield _text(_LEFT, top, "memory of each rank, GB")
    base, height = top + 180, 150
    most = max(limit, *(memory.total for memory in estimate.memory))
    scale = height / most
    step = (_WIDTH - _LEFT - _RIGHT) / len(estimate.memory)
    for rank, memory in enumerate(estimate.memory):
        y, width = float(base), min(step * 0.8, 90)
        x = _LEFT + rank * step + (step - width) / 2
        for part, size in memory.parts().items():
            y -= size * scale
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{size * scale:.1f}" fill="{_PARTS[part]}">'
                f"<title>pp rank {rank}: {part} {size / 1e9:.2f} GB</title></rect>"
            )
        if step > 24:
            yield _text(x + width / 2, y - 4, f"{memory.total / 1e9:.0f}", size=10, middle=True)
            yield _text(x + width / 2, base + 14, str(rank), size=10, middle=True)
    line = base - limit * scale
    yield (
        f'<line x1="{_LEFT}" y1="{line:.1f}" x2="{_WIDTH - _RIGHT}" y2="{line:.1f}" stroke="#c00000" '
        'stroke-dasharray="5 4"/>'
    )
    yield _text(8, line + 4, f"{limit / 1e9:.0f} GB")
    yield from _legend(list(_PARTS.items()), base + 28)


def _legend(entries: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    x = float(_LEFT)
    for name, color in entries:
        yield f'<rect x="{x:.0f}" y="{y:.0f}" width="12" height="12" fill="{color}" stroke="#999999"/>'
        yield _text(x + 17, y + 10, name)
        x += 36 + 7 * len(name)


def _text(x: float, y: float, text: str, *, size: int = 12, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{anchor}>{escape(text)}</text>'

"""A plan as a picture, plain SVG: the schedule with its bubbles, where a step's time goes, the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10

from autopar.tools.planner.bubbles import Played
from autopar.tools.planner.candidate import Estimate

WIDTH, LEFT, _RIGHT = 1000, 80, 20
_INSIDE = WIDTH - LEFT - _RIGHT
_WAITING = "#eeeeee"
# kind of action -> its color in the first chunk, in later ones, its name
_KINDS = {
    "F": ("#2f6fb7", "#8fbbe8", "forward"),
    "B": ("#2b7a3d", "#86c795", "backward"),
    "I": ("#b8860b", "#e6c56e", "backward to the input"),
    "W": ("#8b5aa8", "#cbaadd", "backward to the weights"),
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
# part of a step's time -> its color and what it is
_TIMES = {
    "compute": ("#2f6fb7", "compute"),
    "tp": ("#e08e45", "collectives of tp"),
    "cp": ("#f0c987", "exchange of cp"),
    "ep": ("#8fae5a", "exchange of experts"),
    "bubble": ("#dddddd", "bubble"),
    "dp": ("#c9483f", "averaging over dp"),
    "optimizer": ("#9cc3ee", "optimizer"),
}


def draw(estimate: Estimate, played: Played, limit: float, title: str) -> str:
    """Return an SVG document of 1,000 pixels' width.

    Args:
        played: the schedule, of as many micro-batches as are to be seen.
        limit: bytes of a GPU.
    """
    ranks = len(played.ranks)
    row = max(6, min(26, 420 // ranks))
    time_top = 60 + ranks * (row + 3) + 100
    memory_top = time_top + 84
    height = memory_top + 250
    chosen = estimate.candidate
    split = f"{chosen.microbatches} micro-batches of {chosen.microbatch}"
    lines = [
        *opened(height),
        text(LEFT, 24, title, size=15),
        text(LEFT, 44, f"{chosen} ({split}): {estimate.time:.2f} s a step, bubble {estimate.bubble:.1%}"),
        *_gantt(played, 60, row),
        *_times(estimate, time_top),
        *_memory(estimate, limit, memory_top),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def opened(height: int) -> Iterator[str]:
    """Begin a document of :data:`WIDTH` x ``height`` pixels."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'


def _gantt(played: Played, top: int, row: int) -> Iterator[str]:
    scale = _INSIDE / played.time if played.time else 0.0
    seen: dict[tuple[str, bool], None] = {}
    for rank, slots in enumerate(played.ranks):
        y = top + rank * (row + 3)
        first = min((slot.action[1] for slot in slots), default=0)
        yield text(8, y + row * 0.75, f"pp rank {rank}", size=min(12, row + 2))
        yield box(LEFT, y, _INSIDE, row, _WAITING)
        for slot in slots:
            kind, stage, microbatch = slot.action
            width = (slot.end - slot.start) * scale
            if width <= 0:
                continue
            seen[kind, stage != first] = None
            x, color = LEFT + slot.start * scale, _KINDS[kind][stage != first]
            about = (
                f"{_KINDS[kind][2]} of micro-batch {microbatch}, stage {stage}: {slot.start:.4f} to {slot.end:.4f} s"
            )
            yield box(x, y, width, row, color, about)
            if width > 14 and row > 11:
                light = stage == first
                yield text(x + width / 2, y + row * 0.7, str(microbatch), size=10, middle=True, white=light)
    y = top + len(played.ranks) * (row + 3) + 2
    yield from axis(played.time, scale, y)
    entries = [(_KINDS[kind][2], _KINDS[kind][0]) for kind in _KINDS if {(kind, False), (kind, True)} & seen.keys()]
    if any(later for _, later in seen):
        entries.append(("paler: another stage of the rank", _KINDS["F"][1]))
    yield from legend([*entries, ("waiting", _WAITING)], y + 26)
    yield text(LEFT, y + 62, "The numbers in the boxes are micro-batches.", size=11)


def axis(time: float, scale: float, y: float) -> Iterator[str]:
    """Draw the seconds below the schedule, five to ten marks at round numbers."""
    if not time:
        return
    step = 10 ** floor(log10(time))
    step = next(step * part for part in (0.1, 0.2, 0.5, 1) if time / (step * part) <= 10)
    for mark in range(int(time / step) + 1):
        x = LEFT + mark * step * scale
        yield f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}" stroke="#666666"/>'
        yield text(x, y + 15, f"{mark * step:.3g} s", size=10, middle=True)


def _times(estimate: Estimate, top: int) -> Iterator[str]:
    yield text(LEFT, top, "where the time of a step goes, on the rank that works most")
    parts = {name: seconds for name, seconds in estimate.parts if seconds > 0}
    scale = _INSIDE / (sum(parts.values()) or 1.0)
    x = float(LEFT)
    for name, seconds in parts.items():
        color, words = _TIMES[name]
        yield box(x, top + 10, seconds * scale, 22, color, f"{words}: {seconds:.3f} s")
        x += seconds * scale
    entries = [(f"{_TIMES[name][1]} {seconds:.3g} s", _TIMES[name][0]) for name, seconds in parts.items()]
    yield from legend(entries, top + 40)


def _memory(estimate: Estimate, limit: float, top: int) -> Iterator[str]:
    yield text(LEFT, top, "memory of each rank of the pipeline, GB")
    base, height = top + 190, 150
    most = max(limit, *(memory.total for memory in estimate.memory))
    scale = height / most
    step = _INSIDE / len(estimate.memory)
    line = base - limit * scale
    for rank, memory in enumerate(estimate.memory):
        y, width = float(base), min(step * 0.8, 90)
        x = LEFT + rank * step + (step - width) / 2
        for part, size in memory.parts().items():
            y -= size * scale
            about = f"pp rank {rank}: {part} {size / 1e9:.2f} GB"
            yield box(x, y, width, size * scale, _PARTS[part], about)
        if step > 24:
            above = y - 4 if abs(y - 8 - line) > 9 else line - 6  # the number does not cross the line of the limit
            yield text(x + width / 2, above, f"{memory.total / 1e9:.0f}", size=10, middle=True)
            yield text(x + width / 2, base + 14, str(rank), size=10, middle=True)
    yield (
        f'<line x1="{LEFT}" y1="{line:.1f}" x2="{WIDTH - _RIGHT}" y2="{line:.1f}" stroke="#c00000" '
        'stroke-dasharray="5 4"/>'
    )
    yield text(8, line + 4, f"{limit / 1e9:.0f} GB")
    used = [part for part in _PARTS if any(memory.parts()[part] for memory in estimate.memory)]
    yield from legend([(part, _PARTS[part]) for part in used], base + 28)


def legend(entries: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    """Draw what colors mean, in as many lines as they need."""
    x = float(LEFT)
    for name, color in entries:
        width = 36 + 6.5 * len(name)
        if x > LEFT and x + width > WIDTH:
            x, y = float(LEFT), y + 18
        yield box(x, y, 12, 12, color)
        yield text(x + 17, y + 10, name)
        x += width


def box(x: float, y: float, width: float, height: float, color: str, about: str = "") -> str:
    """Return a filled rectangle; a browser shows ``about`` where the mouse is over it."""
    inside = f"<title>{escape(about)}</title>" if about else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{color}" stroke="white" '
        f'stroke-width="0.5">{inside}</rect>'
    )


def text(x: float, y: float, words: str, *, size: int = 12, middle: bool = False, white: bool = False) -> str:
    """Return words that begin at a place, or have their middle there."""
    anchor = ' text-anchor="middle"' if middle else ""
    color = ' fill="white"' if white else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{anchor}{color}>{escape(words)}</text>'

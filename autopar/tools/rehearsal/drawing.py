"""Draw a rehearsed step: a file for Perfetto and chrome://tracing, and a picture."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.tools.planner.svg import LEFT, WIDTH, axis, box, legend, opened, text
from autopar.tools.rehearsal.timeline import Slot, Timeline

_COLORS = {
    "forward": "#2f6fb7",
    "backward": "#2b7a3d",
    "backward to its input": "#b8860b",
    "backward to its weights": "#8b5aa8",
    "the optimizer's step": "#9cc3ee",
    "other work": "#b0b0b0",
    "communication": "#e08e45",
    "waiting": "#eeeeee",
}
_ACTION = re.compile(r"stage (\d+): (.+) of micro-batch (\d+)")
_INSIDE = WIDTH - LEFT - 20


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the events of https://ui.perfetto.dev and chrome://tracing: ranks as processes, lanes as threads."""
    events: list[dict[str, Any]] = []
    for rank, slots in timeline.slots.items():
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(slot.lane for slot in slots))}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        events += [
            {
                "ph": "X",
                "name": slot.name or "other work",
                "cat": slot.lane,
                "pid": rank,
                "tid": lanes[slot.lane],
                "ts": slot.start * 1e6,
                "dur": (slot.end - slot.start) * 1e6,
                "args": {"where": slot.where} if slot.where else {},
            }
            for slot in slots
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(timeline: Timeline, title: str) -> str:
    """Return an SVG document of 1,000 pixels' width: a line for each rank, what takes most of each pixel."""
    ranks = len(timeline.slots)
    row = max(6, min(26, 420 // max(ranks, 1)))
    bottom = 50 + ranks * (row + 3)
    seen: set[str] = set()
    lines = [*opened(bottom + 90), text(LEFT, 24, title, size=15)]
    for number, (rank, slots) in enumerate(timeline.slots.items()):
        y = 40 + number * (row + 3)
        lines.append(text(8, y + row * 0.75, f"rank {rank}", size=min(12, row + 2)))
        for start, end, kind, name in _runs(slots, timeline.time):
            seen.add(kind)
            lines.append(box(LEFT + start, y, end - start, row, _COLORS[kind], name))
    lines += axis(timeline.time, _INSIDE / timeline.time if timeline.time else 0.0, bottom)
    lines += legend([(kind, color) for kind, color in _COLORS.items() if kind in seen], bottom + 30)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _runs(slots: Sequence[Slot], time: float) -> Iterator[tuple[int, int, str, str]]:
    """Yield first and last pixel, kind and name of what follows upon each other."""
    pixels = [defaultdict[tuple[str, str], float](float) for _ in range(_INSIDE)]
    for slot in slots:
        at, end = slot.start / time * _INSIDE, slot.end / time * _INSIDE
        for place in range(int(at), min(int(end) + 1, _INSIDE)):
            pixels[place][_kind(slot)] += min(end, place + 1) - max(at, place)
    most = [max(pixel, key=lambda kind: pixel[kind]) if pixel else ("waiting", "") for pixel in pixels]
    start = 0
    for place in range(1, _INSIDE + 1):
        if place == _INSIDE or most[place] != most[start]:
            yield start, place, *most[start]
            start = place


def _kind(slot: Slot) -> tuple[str, str]:
    if slot.lane == "wait":
        return "waiting", ""
    if slot.lane != "compute":
        return "communication", f"over {slot.lane}"
    found = _ACTION.fullmatch(slot.name)
    kind = found[2] if found else slot.name or "other work"
    return (kind if kind in _COLORS else "other work"), slot.name

"""Draw the diagrams of the pages as SVG files next to this script.

python docs/figures/draw.py

They use the standard library only. Text and lines have the color of the page, so they fit a light and a dark style. A
figure is 400 units wide, which is readable on a phone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREEN, GRAY = "#3d85d6", "#dd8533", "#3fa06a", "#8b949e"
STYLE = (
    "<style>.autopar-figure { color: #1f2328 } "
    "@media (prefers-color-scheme: dark) { .autopar-figure { color: #e6edf3 } }</style>"
)
MARKER = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)


# What the packages are for, in the figure of the layers.
PACKAGES = {
    "tools": "planner, verification, rehearsal, derivation",
    "integrations": "Trainer, accelerate, DeepSpeed, TRL",
    "features": "experts, PEFT, generation, and so on",
    "cli": "the command line",
    "pretrained": "from_pretrained",
    "api": "initialize",
    "setup": "the steps of initialize",
    "data_parallel": "optimizer, ZeRO, clipping",
    "distributed": "mesh, collectives, failures",
    "stored": "quantized weights",
    "compat": "private names of torch and transformers",
    "registry": "the tables of features",
    "errors": "exceptions",
}


class Figure:
    """A drawing of ``WIDTH`` units; ``height`` grows with its content."""

    WIDTH = 400

    def __init__(self, title: str) -> None:
        self.title, self.parts, self.height = title, list[str](), 0.0

    def box(self, x: float, y: float, width: float, height: float, color: str = GRAY, *lines: str) -> None:
        """Draw a rectangle with lines of text in its center."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{color}" '
            f'fill-opacity="0.22" stroke="{color}"/>'
        )
        self._reach(y + height)
        first = y + height / 2 - (len(lines) - 1) * 8 + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + number * 16, line, bold=number == 0 and len(lines) > 1)

    def text(self, x: float, y: float, words: str, anchor: str = "middle", size: int = 13, bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(words)}</text>'
        )
        self._reach(y + 4)

    def arrow(self, x: float, y: float, to_x: float, to_y: float, both: bool = False) -> None:
        start = ' marker-start="url(#head)"' if both else ""
        self.parts.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="currentColor" marker-end="url(#head)"{start}/>'
        )
        self._reach(max(y, to_y))

    def band(self, top: tuple[float, float], y: float, bottom: tuple[float, float], to_y: float, color: str) -> None:
        """Fill the area between a range above and a range below."""
        points = f"{top[0]:g},{y:g} {top[1]:g},{y:g} {bottom[1]:g},{to_y:g} {bottom[0]:g},{to_y:g}"
        self.parts.append(f'<polygon points="{points}" fill="{color}" fill-opacity="0.15"/>')

    def _reach(self, y: float) -> None:
        self.height = max(self.height, y)

    def svg(self) -> str:
        height = round(self.height + 6)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="autopar-figure" viewBox="0 0 {self.WIDTH} {height}" '
            f'width="{self.WIDTH * 1.3:g}" height="{height * 1.3:g}" role="img" '
            'font-family="sans-serif" fill="currentColor">'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", STYLE, MARKER, *self.parts, "</svg>"]) + "\n"


def mesh() -> Figure:
    """Draw 8 ranks at tp 2 x pp 2 x dp 2. Ranks are numbered along tp first, then dp, then pp."""
    figure = Figure("8 ranks at tp 2 x pp 2 x dp 2: two replicas of two stages of two shards")
    for dp in range(2):
        x = 70 + 170 * dp
        figure.text(x + 75, 16, f"replica {dp} (dp {dp})", bold=True)
        for pp in range(2):
            y = 26 + 120 * pp
            figure.box(x, y, 150, 84)
            for tp in range(2):
                rank = tp + 2 * (dp + 2 * pp)
                figure.box(x + 8 + 71 * tp, y + 8, 63, 50, (BLUE, ORANGE)[tp], f"rank {rank}", f"shard {tp}")
            figure.arrow(x + 40, y + 69, x + 110, y + 69, both=True)
            figure.text(x + 75, y + 80, "tp", size=12)
        figure.arrow(x + 75, 112, x + 75, 144, both=True)
        figure.text(x + 88, 132, "pp", size=12, anchor="start")
    for pp in range(2):
        y = 68 + 120 * pp
        figure.text(4, y - 2, f"stage {pp}", anchor="start", bold=True)
        figure.text(4, y + 14, f"(pp {pp})", anchor="start")
        figure.arrow(222, y, 238, y, both=True)
        figure.text(230, y - 8, "dp", size=12)
    for number, line in enumerate(
        (
            "tp: sums of activations, in every block",
            "pp: activations forward, their gradients back",
            "dp: average of gradients, once per step",
        )
    ):
        figure.text(70, 250 + 18 * number, line, anchor="start")
    return figure


def block() -> Figure:
    """Draw a block of GPT-2 on two ranks: column-parallel layers, then row-parallel layers."""
    figure = Figure("One transformer block of GPT-2 on two ranks")
    y = 8.0

    def replicated(words: str) -> None:
        nonlocal y
        figure.box(20, y, 360, 26, GRAY, words)
        y += 26

    def sharded(name: str, shards: tuple[str, str]) -> None:
        nonlocal y
        for rank, words in enumerate(shards):
            figure.arrow(110 + 180 * rank, y, 110 + 180 * rank, y + 12)
            figure.box(20 + 184 * rank, y + 13, 176, 42, (BLUE, ORANGE)[rank], name, words)
        y += 55

    def summed() -> None:
        nonlocal y
        for rank in range(2):
            figure.arrow(110 + 180 * rank, y, 110 + 180 * rank, y + 12)
        figure.box(20, y + 13, 360, 26, GREEN, "all-reduce: sum over the ranks, add the residual")
        y += 39

    replicated("activations and layer norm: replicated")
    sharded("c_attn, column-parallel", ("[768, 1152 of 2304]", "[768, 1152 of 2304]"))
    sharded("attention", ("heads 0 to 5", "heads 6 to 11"))
    sharded("c_proj, row-parallel", ("[384 of 768, 768]", "[384 of 768, 768]"))
    summed()
    y += 8
    replicated("layer norm: replicated")
    sharded("c_fc, column-parallel", ("[768, 1536 of 3072]", "[768, 1536 of 3072]"))
    sharded("activation function", ("features 0 to 1535", "features 1536 to 3071"))
    sharded("c_proj, row-parallel", ("[1536 of 3072, 768]", "[1536 of 3072, 768]"))
    summed()
    figure.text(108, y + 18, "rank 0", bold=True)
    figure.text(292, y + 18, "rank 1", bold=True)
    return figure


def one_f_one_b(stages: int, microbatches: int) -> list[list[str]]:
    """Return the actions of each stage, F0, F1, B0 and so on: some forwards ahead, then one backward, one forward."""
    schedule = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        row = [f"F{number}" for number in range(ahead)]
        for number in range(microbatches):
            row.append(f"B{number}")
            row += [f"F{number + ahead}"] if number + ahead < microbatches else []
        schedule.append(row)
    return schedule


def times(schedule: list[list[str]]) -> Iterator[tuple[int, str, int]]:
    """Yield stage, action and start of each action; a forward takes 1, a backward 2."""
    ends: dict[tuple[int, str], int] = {}
    rows, clocks = [list(row) for row in schedule], [0] * len(schedule)
    while any(rows):
        for stage, row in enumerate(rows):
            needed = (stage - 1 if row and row[0][0] == "F" else stage + 1, row[0] if row else "")
            if not row or (0 <= needed[0] < len(rows) and needed not in ends):
                continue
            action = row.pop(0)
            start = max(clocks[stage], ends.get(needed, 0))
            clocks[stage] = ends[stage, action] = start + (1 if action[0] == "F" else 2)
            yield stage, action, start


def schedule() -> Figure:
    """Draw 1F1B over 2 stages with 4 micro-batches."""
    figure = Figure("The schedule 1F1B over 2 stages with 4 micro-batches")
    unit = 25.5
    for stage in range(2):
        figure.text(8, 16 + 62 * stage, f"stage {stage}", anchor="start", bold=True)
    for stage, action, start in times(one_f_one_b(2, 4)):
        forward = action[0] == "F"
        figure.box(8 + unit * start, 22 + 62 * stage, unit * (2 - forward), 30, BLUE if forward else ORANGE, action)
    figure.arrow(8, 130, 392, 130)
    figure.text(392, 146, "time", anchor="end")
    figure.box(8, 140, 14, 14, BLUE)
    figure.text(28, 152, "F: forward", anchor="start")
    figure.box(108, 140, 14, 14, ORANGE)
    figure.text(128, 152, "B: backward", anchor="start")
    figure.text(8, 174, "The numbers are micro-batches. Gaps are idle time: the bubble.", anchor="start", size=12)
    return figure


def checkpoint() -> Figure:
    """Draw a tensor of 12 heads that two ranks saved and three ranks load."""
    figure = Figure("A checkpoint that 2 ranks saved is loaded by 3 ranks")
    heads, colors = 12, (BLUE, ORANGE)

    def ranges(ranks: int, gap: float) -> list[tuple[float, float]]:
        """Return the left edge and the width of a head on each rank."""
        width = (384 - gap * (ranks - 1)) / heads
        return [(8 + rank * (width * heads / ranks + gap), width) for rank in range(ranks)]

    saved, loaded = ranges(2, 24), ranges(3, 24)
    figure.text(200, 16, "saved with tp 2", bold=True)
    for rank, (x, width) in enumerate(saved):
        figure.text(x + 3 * width, 36, f"model-tp{rank}-pp0.safetensors", size=12)
        for number in range(6):
            figure.box(x + number * width, 44, width, 28, colors[rank], str(6 * rank + number))
    for head in range(heads):
        (x, width), (to_x, to_width) = saved[head // 6], loaded[head // 4]
        left, to_left = x + head % 6 * width, to_x + head % 4 * to_width
        figure.band((left, left + width), 72, (to_left, to_left + to_width), 128, colors[head // 6])
        figure.box(to_left, 128, to_width, 28, colors[head // 6], str(head))
    for rank, (x, width) in enumerate(loaded):
        figure.text(x + 2 * width, 174, f"rank {rank}")
    figure.text(200, 196, "loaded with tp 3: each rank reads only its heads", bold=True)
    return figure


def layers() -> Figure:
    """Draw the packages of autopar: each imports only packages in rows below it (the contract in pyproject.toml)."""
    figure = Figure("The packages of autopar: each imports only packages in rows below it")
    contracts = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract.get("containers") == ["autopar"])
    core = rows.index("cli")
    for number, row in enumerate(rows):
        packages = row.split(" | ")
        y = 8 + 27 * number + (22 if number >= core else 0)
        width = (384 - 6 * (len(packages) - 1)) / len(packages)
        for place, name in enumerate(packages):
            words = f"{name}: {PACKAGES[name]}" if name in PACKAGES else name
            figure.box(8 + place * (width + 6), y, width, 22, ORANGE if number < core else BLUE, words)
    figure.text(8, 8 + 27 * core + 11, "The core, below, does not import these.", anchor="start", size=12)
    return figure


FIGURES = {each.__name__: each for each in (mesh, block, schedule, checkpoint, layers)}


def main() -> None:
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()

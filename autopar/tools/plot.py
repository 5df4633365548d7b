"""Draw the loss, the speed and the memory of a run from the CSV file of ``autopar.metrics(..., log="run.csv")``::

    python -m autopar.tools.plot run.csv                     # writes run.svg
    python -m autopar.tools.plot before.csv after.csv -o speed.png

It needs matplotlib: ``pip install 'autopar[plot]'``.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import ConfigError

PANELS = {"loss": "loss", "tokens_per_second": "tokens per second", "memory_gb": "memory of rank 0 (GB)"}
_FEW = 50  # a line of fewer points has markers, so that a single point is visible


def read(path: Path) -> dict[str, list[float]]:
    """Return the columns of a CSV file; an empty cell is NaN.

    Raises:
        ConfigError: If the file has no rows or a cell is not a number.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ConfigError(f"{path} has no rows. autopar.metrics(model, batch, seconds, log={str(path)!r}) writes them")
    try:
        return {name: [float(row[name] or "nan") for row in rows] for name in rows[0]}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} must contain numbers only: {error}") from error


def draw(runs: Sequence[Path], target: Path) -> list[str]:
    """Draw one panel per known column, one line per run; return the titles of the panels.

    Args:
        runs: CSV files, with a column ``step`` or one row per step.
        target: Picture to write; its suffix is the format (``.svg``, ``.png``, ``.pdf``).

    Raises:
        ConfigError: If matplotlib is missing or no run has a known column.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("autopar.tools.plot needs matplotlib: pip install 'autopar[plot]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    found = {path: read(path) for path in runs}
    lines = {name: {path: points for path in runs if (points := _points(found[path], name))} for name in PANELS}
    shown = [name for name in PANELS if lines[name]]
    if not shown:
        got = ", ".join(next(iter(found.values())))
        raise ConfigError(f"no column to draw: expected {', '.join(PANELS)}; got {got}")
    figure, panels = pyplot.subplots(len(shown), 1, figsize=(8, 2.5 * len(shown)), sharex=True, squeeze=False)
    for name, (panel,) in zip(shown, panels, strict=True):
        for path, points in lines[name].items():
            panel.plot(*zip(*points, strict=True), label=str(path), marker="." if len(points) < _FEW else "")
        panel.set_ylabel(PANELS[name])
        panel.grid(alpha=0.3)
        if len(runs) > 1:
            panel.legend()
    panels[-1][0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)
    return [PANELS[name] for name in shown]


def _points(columns: dict[str, list[float]], name: str) -> list[tuple[float, float]]:
    """Return the known values of a column, with their steps."""
    values = columns.get(name, [])
    return [
        pair for pair in zip(columns.get("step", range(len(values))), values, strict=False) if not math.isnan(sum(pair))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m autopar.tools.plot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.csv", help="CSV files of autopar.metrics")
    parser.add_argument("-o", "--output", type=Path, help="picture; default: the first file with the suffix .svg")
    given = parser.parse_args(arguments)
    target = given.output or given.runs[0].with_suffix(".svg")
    try:
        panels = draw(given.runs, target)
    except (ConfigError, OSError, ValueError) as error:  # savefig raises ValueError for an unknown suffix
        raise SystemExit(f"error: {error}") from None
    print(f"{target}: {', '.join(panels)}")


if __name__ == "__main__":
    main()

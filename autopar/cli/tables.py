"""Tables in one style for the command line, the report of ``verify`` and ``summary``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Column, Table

_WIDE = 10_000  # so that no line is folded


def table(*columns: Column | str) -> Table:
    """Make a table with a line under its head and no border. Long cells are folded, not truncated."""
    from rich import box
    from rich.table import Table

    made = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in made.columns:
        column.overflow = "fold"
    return made


def filled(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table of rows without columns that are empty in all rows."""
    from rich.markup import escape

    kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    made = table(*(heads[place] for place in kept))
    for row in rows:
        made.add_row(*(escape(row[place]) for place in kept))
    return made


def lines(shown: Any, width: int | None = None) -> list[str]:
    """Return the lines of a table or another rich object, without colors, trailing blanks and empty lines.

    Args:
        width: The number of columns; by default the terminal's, or unlimited if stdout is a file.
    """
    from rich.console import Console

    width = width or (None if sys.stdout.isatty() else _WIDE)
    hidden = Console(width=width, highlight=False, color_system=None)
    with hidden.capture() as captured:
        hidden.print(shown)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def shape(sizes: Iterable[int]) -> str:
    """Return the shape of a tensor as text."""
    return " x ".join(map(str, sizes)) or "scalar"


def digits(value: float) -> str:
    """Return a positive number with at least three digits; a large number has no exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def size(count: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{digits(count)} TB"

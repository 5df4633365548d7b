"""Tables in a terminal, one look for all: the command line, the report of ``verify``, ``summary``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

_WIDE = 10_000  # no line is folded


def table(*columns: Column | str) -> Table:
    """Make a table with a line under its head, and none around it."""
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def console(width: int = 160, **options: Any) -> Console:
    """Make a console on stdout: as wide as the terminal, and ``width`` columns where stdout is a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False, **options)


def lines(shown: Any, width: int = _WIDE) -> list[str]:
    """Return the lines of a table, or of what rich can show, without colours and blanks at their ends."""
    from rich.console import Console

    hidden = Console(width=width, highlight=False, color_system=None)
    with hidden.capture() as captured:
        hidden.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]


def fitting(heads: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table; where they are wider than ``width``, those of a list, which cuts no name or number.

    The first cell of a row is its name. Columns that are empty in all rows are left out.
    """
    from rich.markup import escape

    kept = [place for place in range(len(heads)) if any(row[place] for row in cells)]
    shown = table(*(heads[place] for place in kept))
    for row in cells:
        shown.add_row(*(escape(row[place]) for place in kept))
    found = [line for line in lines(shown) if line]
    if max(map(len, found)) <= width:
        return found
    found = []
    for row in cells:
        found.append(row[0])
        line = ""
        for fact in (f"{heads[place]} {row[place]}" for place in kept[1:] if row[place]):
            if line and len(line) + len(fact) + 6 > width:
                found.append(f"    {line};")
                line = ""
            line = f"{line}; {fact}" if line else fact
        found += textwrap.wrap(line, width, initial_indent=" " * 4, subsequent_indent=" " * 6, break_long_words=False)
    return found


def shape(sizes: Iterable[int]) -> str:
    """Return the sizes of a tensor in words."""
    return " x ".join(map(str, sizes)) or "scalar"


def digits(value: float) -> str:
    """Return a positive number with at least three digits, without an exponent where it is large."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def size(count: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{digits(count)} TB"

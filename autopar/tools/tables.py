"""Tables in a terminal, one look for all: the command line, the report of ``verify``, ``summary``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

__all__ = ["console", "lines", "size", "table"]

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


def size(count: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"

"""The typer application, and what all commands share: options, sizes in words, errors without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from autopar.errors import AutoparError

__all__ = ["Json", "app", "errors", "size"]

app = typer.Typer(
    name="autopar",
    help="Work with checkpoints that autopar has written, and with policies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, without a progress bar.")]


@contextmanager
def errors() -> Iterator[None]:
    """Print what the user can mend as one line on stderr, and end with exit code 1."""
    try:
        yield
    except (AutoparError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(1) from None


def size(count: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"

"""The typer application, and what all commands share: options, sizes in words, errors without a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from autopar import __version__
from autopar.errors import AutoparError

__all__ = ["Json", "Trust", "app", "errors"]

app = typer.Typer(
    name="autopar",
    help="Plan a run, prove it; work with checkpoints that autopar has written, and with policies.",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # click's plain help cuts no option in 80 columns
)

Json = Annotated[bool, typer.Option("--json", help="Print the result or the error as JSON, without a progress bar.")]

Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model's folder.")]


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"autopar {__version__}")
        raise typer.Exit


@contextmanager
def errors(as_json: bool = False) -> Iterator[None]:
    """Print what the user can mend as one line on stderr, or as JSON where the result would be; end with exit code 1.

    The JSON is ``{"error": {"type": ..., "message": ...}}``.
    """
    try:
        yield
    except (AutoparError, OSError) as error:
        if as_json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}, indent=1))
        else:
            print("error: " + " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(1) from None

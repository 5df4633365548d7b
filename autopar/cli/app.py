"""The typer application, shared options and output of its commands, and ``autopar features``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar import __version__, registry
from autopar.errors import AutoparError, ConfigError, in_one_line

app = typer.Typer(
    name="autopar",
    help="Plan and verify runs; work with autopar's checkpoints and policies.",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # click's plain help truncates no option in 80 columns
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder with config.json, a model of the hub, a model type of transformers, or my_model.py:CLASS.",
    ),
]
Policy = Annotated[Path | None, typer.Option("--policy", help="A custom policy.")]
TP = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size.")]
PP = Annotated[int, typer.Option("--pp", min=1, help="Pipeline-parallel size.")]
CP = Annotated[int, typer.Option("--cp", min=1, help="Context-parallel size.")]
EP = Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel size, of mixtures.")]
SP = Annotated[bool, typer.Option("--sp", help="Sequence parallelism.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result or the error as JSON, without a progress bar.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model's folder.")]


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"autopar {__version__}")
        raise typer.Exit


def sections_of(config: Path | None, tp: int, pp: int, cp: int, ep: int, sp: bool, **more: dict[str, Any]) -> Any:
    """Return the config file of ``initialize``, or the sections for the options. ``more``: further sections."""
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "context_parallel_size": cp}
    sizes |= {"expert_parallel_size": ep, "sequence_parallel": sp}
    given = {"model_parallelism": {name: size for name, size in sizes.items() if size > 1 or size is True}}
    given |= {name: {key: value for key, value in keys.items() if value is not None} for name, keys in more.items()}
    given = {name: keys for name, keys in given.items() if keys}
    if config is not None and given:
        raise ConfigError(
            f"--config {config} is not supported with --tp, --pp, --cp, --ep, --sp or options for its settings"
        )
    if sp and tp == 1:
        raise ConfigError("--sp shards sequences over tensor-parallel ranks and needs --tp 2 or more")
    return config if config is not None else given


def print_json(found: Any) -> None:
    """Print data as JSON."""
    print(json.dumps(found, indent=1))


@contextmanager
def errors(as_json: bool = False) -> Iterator[None]:
    """Print an error of autopar as one line on stderr and exit with code 1.

    With ``as_json``, print ``{"error": {"type": ..., "message": ...}}`` on stdout.
    """
    try:
        yield
    except (AutoparError, OSError) as error:
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        else:
            print(f"error: {in_one_line(error)}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command(short_help="List the features, and where they plug in.", epilog="Example: autopar features")
def features(as_json: Json = False) -> None:
    """List the installed features with their tables (autopar/registry.py)."""
    with errors(as_json):
        installed = registry.features()
        if as_json:
            print_json([asdict(feature) for feature in installed])
            return
        for feature in installed:
            print(f"{feature.name}: {feature.about}")
            for table in registry.TABLES:
                for name, value in getattr(feature, table).items():
                    print(f"  {table}.{name} = {value}")

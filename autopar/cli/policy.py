"""``autopar policy check | list``: a policy tried on a model, as tables or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.app import Json, app, errors, size
from autopar.errors import AutoparError, ConfigError
from autopar.plan.listing import ranges, rows

if TYPE_CHECKING:
    from rich.table import Table

    from autopar.cli.models import Head

__all__ = ["policy"]

policy = typer.Typer(help="Work with policies, which say how the weights of a model are sharded.", no_args_is_help=True)
app.add_typer(policy, name="policy")


@policy.command("list")
def list_types(as_json: Json = False) -> None:
    """Print every model type that has a policy, and the file of that policy."""
    with errors(as_json):
        from autopar.policy.load import own_policies, policy_folder

        listed = [(kind, Path(own.where.file).name) for own in own_policies().values() for kind in own.model_types]
        found = {kind: str(policy_folder() / file) for kind, file in sorted(listed)}
    print(json.dumps(found, indent=1) if as_json else "\n".join(f"{kind} {file}" for kind, file in found.items()))


@policy.command()
def check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MODEL", help="A policy (YAML); or a model as in --model: the policy found for it is checked."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with config.json, a model type of transformers (its default config), or my_model.py:CLASS. "
            "By default the first model type in the policy's match."
        ),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size.")] = 2,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline-parallel size.")] = 1,
    heads: Annotated[bool, typer.Option("--heads", help="Every class of the model's config, not only one.")] = False,
    by_expert: Annotated[bool, typer.Option("--by-expert", help="Shard mixtures by expert.")] = False,
    as_json: Json = False,
) -> None:
    """Try a policy on a model without weights: plan, shards of each rank, dry run, stages. Exit code 0 if all holds."""
    with errors(as_json):
        file, named = _policy_and_model(source, model)
        from autopar.cli.models import heads as find_heads

        found = find_heads(named, every=heads)
        reports = [_report(head, file, tp, pp, by_expert, skip=len(found) > 1) for head in found]
    if as_json:
        print(json.dumps(reports if heads else reports[0], indent=1))
    else:
        for report in reports:
            _show(report, brief=len(reports) > 1)
    if not all(report["holds"] is not False for report in reports) or not any(report["holds"] for report in reports):
        raise typer.Exit(1)


def _policy_and_model(source: str, model: str | None) -> tuple[Path | None, str]:
    """The policy file of the user, if that is what ``source`` is, and what names the model."""
    if Path(source).suffix not in (".yaml", ".yml"):
        if model is not None:
            raise ConfigError(
                f"'{source}' is no policy file (.yaml), and --model names a model besides; give one of both"
            )
        return None, source
    from autopar.policy.load import read_user_policy

    read = read_user_policy(Path(source))
    if model is None and not read.model_types:
        raise ConfigError(f"{source} has no 'match', so it names no model: add --model my_model.py:CLASS")
    return Path(source), model or read.model_types[0]


def _report(head: Head, file: Path | None, tp: int, pp: int, by_expert: bool, *, skip: bool) -> dict[str, Any]:
    """The verdict on one class; ``holds`` is None for one of several that cannot be built from this config."""
    from autopar.cli.policy_check import check_policy

    try:
        built = head.build()
    except AutoparError:
        raise
    except Exception as error:  # whatever a constructor stumbles over
        reason = f"{head.name} cannot be built: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not skip:
            raise ConfigError(reason) from error
        return {"model": head.name, "holds": None, "skipped": reason}
    return check_policy(built, file, tp=tp, pp=pp, by_expert=by_expert)


def _show(report: dict[str, Any], *, brief: bool) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
    if report["holds"] is None:
        console.print(f"[bold]{escape(report['model'])}[/]: not checked. {escape(report['skipped'])}")
        return
    used = report["policy"]
    console.print(
        f"[bold]{escape(report['model'])}[/]: {report['parameters']:,} parameters, "
        + (f"policy {escape(used['name'])} ({escape(used['where'])})" if used else "no policy")
    )
    if report["tensors"] and not brief:
        for table in _tables(report):
            with console.capture() as captured:
                console.print(table)
            print("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()))
    for line in _verdict(report):
        console.print(escape(line))
    console.print("[green]all holds[/]" if report["holds"] else "[red]does not hold[/]")
    for error in report["errors"]:
        print(f"error: {error}", file=sys.stderr)


def _verdict(report: dict[str, Any]) -> Iterator[str]:
    staged = report["pipeline_parallel_size"] > 1
    for rank in report["ranks"]:
        place = f"tp rank {rank['tp']}" + (f", pp rank {rank['pp']}" if staged else "")
        yield f"{place}: {rank['parameters']:,} parameters, {size(rank['bytes'])}"
    if not report["tensors"]:
        return
    whole = [tensor for tensor in report["tensors"] if tensor["rule"].startswith(("replicated", "once"))]
    count = sum(prod(tensor["shape"]) for tensor in whole)
    yield f"replicated: {count:,} parameters in {len(whole)} of {len(report['tensors'])} tensors"
    yield f"dry run: {report['dry_run']}"
    if report["stages"] == "fails":
        yield "stages: fails"
    elif staged:
        for stage in report["stages"]:
            yield f"stage {stage['stage']}: {', '.join(_runs(stage['modules']))} ({stage['parameters']:,} parameters)"


def _tables(report: dict[str, Any]) -> Iterator[Table]:
    from rich import box
    from rich.markup import escape
    from rich.table import Column, Table

    staged = report["pipeline_parallel_size"] > 1 and isinstance(report["stages"], list)
    columns: list[Column | str] = [Column("parameter", overflow="fold"), "shape", "rule", "on each tp rank"]
    table = Table(*columns, *(["pp rank"] if staged else []), box=box.SIMPLE_HEAD, pad_edge=False)
    for name, tensor in rows(report["tensors"]):
        local = _alike([_shape(shape) for shape in tensor["local_shapes"]])
        cells = [name, _shape(tensor["shape"]), tensor["rule"], local]
        table.add_row(*map(escape, [*cells, *([", ".join(map(str, tensor["ranks"]))] if staged else [])]))
    yield table
    if report["attributes"]:
        attribute = Column("attribute", overflow="fold")
        table = Table(attribute, "value", "on each tp rank", box=box.SIMPLE_HEAD, pad_edge=False)
        for name, entry in rows(report["attributes"]):
            table.add_row(escape(name), str(entry["whole"]), _alike([str(value) for value in entry["local"]]))
        yield table


def _alike(values: list[str]) -> str:
    """What all ranks have, or what each has."""
    return values[0] if len(set(values)) == 1 else " | ".join(values)


def _runs(paths: list[str]) -> list[str]:
    """Paths of blocks, one entry for each run of numbers."""
    split = [(path.rpartition(".")[0], path.rpartition(".")[2]) for path in paths]
    result: list[str] = []
    for parent, group in groupby(split, key=lambda pair: pair[0] if pair[1].isdigit() else ".".join(pair)):
        numbers = [int(last) for _, last in group if last.isdigit()]
        result += [f"{parent}.{run}" for run in ranges(numbers)] if numbers else [parent]
    return result


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"

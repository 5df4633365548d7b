"""Show the plan of a model as tables in a terminal: for ``autopar policy show`` and ``check``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from math import prod
from typing import Any

from autopar.plan.plan import ranges, rows
from autopar.tools.tables import console, fitting, shape, size


def print_report(report: dict[str, Any], *, brief: bool = False, places: bool = False) -> None:
    """Print a report of :mod:`autopar.tools.cli.policy_check`: tables, and the verdict where it has one.

    Args:
        brief: without tables.
        places: with the place of each rule.
    """
    from rich.markup import escape

    out = console(200 if places else 160, soft_wrap=True)
    if "skipped" in report:
        out.print(f"[bold]{escape(report['model'])}[/]: not checked. {escape(report['skipped'])}")
        return
    used = report["policy"]
    out.print(
        f"[bold]{escape(report['model'])}[/]: {report['parameters']:,} parameters, "
        + (f"policy {escape(used['name'])} ({escape(used['where'])})" if used else "no policy")
    )
    if report["notice"]:
        out.print(escape(report["notice"]))
    if report["tensors"] and not brief:
        for heads, cells in _tables(report, places):
            print("\n".join(fitting(heads, cells, out.width)))
    for line in _verdict(report):
        out.print(escape(line))
    if "holds" not in report:
        return
    out.print("[green]all holds[/]" if report["holds"] else "[red]does not hold[/]")
    for error in report["errors"]:
        print(f"error: {error}", file=sys.stderr)


def _verdict(report: dict[str, Any]) -> Iterator[str]:
    staged = report["pipeline_parallel_size"] > 1
    for rank in report["ranks"]:
        place = f"ep rank {rank['ep']}, " if "ep" in rank else ""
        place += f"tp rank {rank['tp']}" + (f", pp rank {rank['pp']}" if staged else "")
        yield f"{place}: {rank['parameters']:,} parameters, {size(rank['bytes'])}"
    if not report["tensors"]:
        return
    whole = [tensor for tensor in report["tensors"] if tensor["rule"].startswith(("replicated", "once"))]
    count = sum(prod(tensor["shape"]) for tensor in whole)
    yield f"replicated: {count:,} parameters in {len(whole)} of {len(report['tensors'])} tensors"
    if "dry_run" in report:
        yield f"dry run: {report['dry_run']}"
    if report["stages"] == "fails":
        yield "stages: fails"
    elif staged:
        for stage in report["stages"]:
            yield f"stage {stage['stage']}: {', '.join(_runs(stage['modules']))} ({stage['parameters']:,} parameters)"
    for name in ("sequence_parallel", "context_parallel"):
        if report.get(name):
            yield f"{name.replace('_', ' ')}: {' '.join(report[name].split())}"


def _tables(report: dict[str, Any], places: bool) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield heads and rows of each table."""
    staged = report["pipeline_parallel_size"] > 1 and isinstance(report["stages"], list)
    place = ["rule in"] if places else []
    tp, ep = report["tensor_parallel_size"], report["expert_parallel_size"]
    over = f"on each {'ep' if ep > tp else 'tp'} rank"
    cells = []
    for name, tensor in rows(report["tensors"]):
        local = _alike(list(map(shape, tensor["local_shapes"])), tp)
        ranks = [", ".join(map(str, tensor["ranks"]))] if staged else []
        where = [tensor["where"]] if places else []
        cells.append([name, shape(tensor["shape"]), tensor["rule"], *where, local, *ranks])
    yield ["parameter", "shape", "rule", *place, over, *(["pp rank"] if staged else [])], cells
    if report["attributes"]:
        cells = []
        for name, entry in rows(report["attributes"]):
            where = [entry["where"]] if places else []
            cells.append([name, str(entry["whole"]), *where, _alike([str(value) for value in entry["local"]], tp)])
        yield ["attribute", "value", *place, over], cells


def _alike(values: list[str], tp: int) -> str:
    """Return the one value of all ranks, those of tp ranks where all replicas have the same, or each rank's."""
    runs = (values[:length] for length in (1, tp) if values[:length] * (len(values) // length) == values)
    return " | ".join(next(runs, values))


def _runs(paths: list[str]) -> list[str]:
    """Paths of blocks, one entry for each run of numbers."""
    split = [(path.rpartition(".")[0], path.rpartition(".")[2]) for path in paths]
    result: list[str] = []
    for parent, group in groupby(split, key=lambda pair: pair[0] if pair[1].isdigit() else ".".join(pair)):
        numbers = [int(last) for _, last in group if last.isdigit()]
        result += [f"{parent}.{run}" for run in ranges(numbers)] if numbers else [parent]
    return result

"""``autopar rehearse`` and ``autopar trace``: whether the collectives of a job match, before it and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.tools.cli.app import Json, Trust, app, errors

if TYPE_CHECKING:
    from autopar.distributed.trace import Call
    from autopar.tools.rehearsal.run import Rehearsal

__all__ = ["rehearse", "trace"]

_SHOWN = 5  # problems, and ranks that wait


@app.command(
    short_help="Match the collectives of a job of many ranks, without GPUs.",
    epilog="Example: autopar rehearse llama --gpus 1024 --tp 8 --pp 16 --config config.yaml",
)
def rehearse(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with config.json, a model of the hub, a model type of transformers, or my_model.py:CLASS.",
        ),
    ],
    gpus: Annotated[int, typer.Option(min=2, help="GPUs in all.")],
    config: Annotated[Path | None, typer.Option(help="The config of initialize; sizes below go before it.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel size.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline-parallel size.")] = None,
    cp: Annotated[int | None, typer.Option("--cp", min=1, help="Context-parallel size.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Expert-parallel size, of mixtures.")] = None,
    sp: Annotated[bool, typer.Option("--sp", help="Sequence parallelism.")] = False,
    schedule: Annotated[str | None, typer.Option(help="Of the stages: 1f1b, gpipe, interleaved ...")] = None,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage.")] = None,
    batch: Annotated[int, typer.Option(min=0, help="Samples of a replica in a step; 0: one for each stage.")] = 0,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of each sample.")] = 128,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Run a training step and an evaluation of some ranks of a job on tensors without memory, and match what they send.

    Exit code 0 if every collective and message finds its like and all ranks come to an end, else 1.
    """
    with errors(as_json):
        from autopar.errors import AutoparError
        from autopar.tools.cli.models import heads
        from autopar.tools.rehearsal.run import rehearse as run

        sizes = {
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_parallel_size": ep,
            "sequence_parallel": sp or None,
        }
        sections = _sections(
            config, {"model_parallelism": sizes, "pipeline": {"schedule": schedule}, "zero": {"stage": zero}}
        )
        built: Any = heads(model, trust=trust)[0].build()
        try:
            found = run(built, sections, gpus, batch=batch, sequence=sequence, gpus_per_node=gpus_per_node)
        except RuntimeError as error:
            raise AutoparError(str(error)) from error
    print(json.dumps(_to_json(found), indent=1) if as_json else "\n".join(_in_words(found)))
    if found.problems:
        raise typer.Exit(1)


def _sections(config: Path | None, given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the sections of a config file, with what the command line says before it."""
    import yaml

    sections: dict[str, Any] = yaml.safe_load(config.read_text()) if config is not None else {}
    for name, keys in given.items():
        said = {key: value for key, value in keys.items() if value is not None}
        if said:
            sections[name] = {**sections.get(name, {}), **said}
    return sections


def _in_words(found: Rehearsal) -> list[str]:
    from autopar.tools.tables import lines, table

    shown = table("axis", "calls", "GB given", "between nodes")
    for name, traffic in found.traffic.items():
        shown.add_row(name, str(traffic.calls), f"{traffic.bytes / 1e9:.3g}", "yes" if traffic.between else "no")
    kinds = sum(call.kind == "new_group" for _, call in next(iter(found.traces.values())))
    head = [
        f"{found.mesh}, {found.world} ranks: {len(found.traces)} of them rehearsed in {found.seconds:.1f} s, "
        f"{found.mebibytes:.0f} MiB a process",
        f"{kinds} groups, {found.calls('step')} calls in the step, {found.calls('evaluation')} in the evaluation",
        "a training step of the rank that gives most:",
        *filter(None, lines(shown)),
    ]
    if not found.problems:
        return [*head, "every collective and message finds its like, and all ranks come to an end"]
    more = [f"... and {len(found.problems) - _SHOWN} more: --json lists all"] if len(found.problems) > _SHOWN else []
    return [*head, f"{len(found.problems)} problems:", *found.problems[:_SHOWN], *more]


def _to_json(found: Rehearsal) -> dict[str, Any]:
    return {
        "world": found.world,
        "mesh": found.mesh,
        "rehearsed": sorted(found.traces),
        "calls": {part: found.calls(part) for part in ("initialize", "step", "evaluation")},
        "traffic": {name: traffic._asdict() for name, traffic in found.traffic.items()},
        "problems": found.problems,
        "seconds": round(found.seconds, 2),
        "mebibytes": round(found.mebibytes),
    }


@app.command(
    short_help="Say where the ranks of a job part, from its traces.",
    epilog="Example: autopar trace traces",
)
def trace(
    folder: Annotated[Path, typer.Argument(help="Of AUTOPAR_TRACE.")],
    as_json: Json = False,
) -> None:
    """Match the collectives that the ranks of a job have noted with AUTOPAR_TRACE=FOLDER, and say where each rank is.

    Exit code 0 if they match and all ranks came to an end together, else 1.
    """
    with errors(as_json):
        from autopar.distributed.trace import read
        from autopar.errors import ConfigError
        from autopar.tools.rehearsal.matching import differences, stuck

        traces = read(folder)
        if not traces:
            raise ConfigError(f"{folder} has no traces (rank-0.jsonl ...): start the job with AUTOPAR_TRACE={folder}")
        problems = list(differences(traces, lambda rank: rank if rank in traces else min(traces)))
        waiting = stuck(traces)
        last = {rank: calls[-1] for rank, calls in traces.items() if calls}
    if as_json:
        print(json.dumps({"ranks": len(traces), "problems": problems, "waiting": waiting}, indent=1))
    else:
        print("\n".join(_told(traces, problems, waiting, last)))
    if problems or waiting:
        raise typer.Exit(1)


def _told(traces: Any, problems: list[str], waiting: list[str], last: dict[int, Call]) -> list[str]:
    calls = sorted({len(each) for each in traces.values()})
    counted = f"{calls[0]} calls each" if len(calls) == 1 else f"{calls[0]} to {calls[-1]} calls"
    head = [f"{len(traces)} ranks, {counted}"]
    if not problems and not waiting:
        return [*head, "every collective and message finds its like, and all ranks come to an end"]
    ends = [f"rank {rank} ends with {call}\n    {call.where}" for rank, call in last.items()]
    return [*head, *problems[:_SHOWN], *(waiting or ends)[: 2 * _SHOWN]]

"""``autopar rehearse`` and ``autopar trace``: match the collectives of a job before and after it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.app import CP, EP, PP, SP, TP, Json, Model, Policy, Trust, app, errors, print_json, sections_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autopar.tools.rehearsal.matching import Traces
    from autopar.tools.rehearsal.run import Rehearsal

_PARTS = ("step", "evaluation", "save", "load")
_SHOWN = 5  # problems, and ranks that wait


@app.command(
    short_help="Match the collectives of a job of many ranks, without GPUs.",
    epilog="Example: autopar rehearse llama --gpus 1024 --tp 8 --pp 16 --zero 1",
)
def rehearse(
    model: Model,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs in all.")],
    config: Annotated[Path | None, typer.Option(help="A config of initialize, instead of sizes.")] = None,
    tp: TP = 1,
    pp: PP = 1,
    dp: Annotated[int | None, typer.Option("--dp", min=1, help="Replicas; by default as many as fit.")] = None,
    cp: CP = 1,
    ep: EP = 1,
    sp: SP = False,
    schedule: Annotated[str | None, typer.Option(help="Of the stages: 1f1b, gpipe, interleaved ...")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Micro-batches of a replica's batch.")] = None,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage.")] = None,
    batch: Annotated[int, typer.Option(min=0, help="Samples of a replica in a step; 0: one for each stage.")] = 0,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of each sample.")] = 128,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a node; by default of --gpu.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="h100, dgx-a100, 2x4090 ...: count memory, and give the step times.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the step's timeline here, for Perfetto; --gpu h100 by default.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd, sgd-momentum, or muon of all matrices.")] = "adamw",
    policy: Policy = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Train a step, evaluate, save and load on some ranks of a job, without memory, and match their messages.

    Exit code 0 if all collectives and messages match and all ranks finish, else 1.
    """
    sizes: dict[str, Any] = {"batch": batch, "sequence": sequence, "gpus_per_node": gpus_per_node}
    card = gpu or ("h100" if trace is not None else None)
    with errors(as_json):
        from autopar.config import ParallelConfig
        from autopar.errors import AutoparError, ConfigError
        from autopar.tools.commands.models import heads
        from autopar.tools.rehearsal.run import rehearse as run

        if trace is not None and not trace.absolute().parent.is_dir():
            raise ConfigError(f"--trace {trace}: the folder {trace.parent} does not exist.\n  Create it first.")
        stages = {"schedule": schedule, "num_microbatches": micro_batches}
        sections = sections_of(config, tp, pp, cp, ep, sp, pipeline=stages, zero={"stage": zero})
        parsed = ParallelConfig.parse(sections, gpus)
        parsed = parsed if policy is None else replace(parsed, policy=str(policy))
        left = parsed.data_parallel_size(gpus)
        if dp not in (None, left):
            raise ConfigError(f"--dp must be {left} with the other sizes on {gpus:,} GPUs; got {dp}")
        built: Any = heads(model, trust=trust)[0].build()
        try:
            found = run(built, parsed, gpus, gpu=card, optimizer=optimizer, **sizes)
        except RuntimeError as error:
            raise AutoparError(str(error)) from error
    if trace is not None and found.timeline is not None:
        found.write_timeline(trace)
    elif trace is not None:
        print(f"{trace} is not written: not all ranks finish", file=sys.stderr)
    print(json.dumps(_to_json(found), indent=1) if as_json else "\n".join(_in_words(found)))
    if found.problems:
        raise typer.Exit(1)


def _in_words(found: Rehearsal) -> list[str]:
    from autopar.cli.tables import digits, lines, table

    shown = table("axis", "calls", "GB sent", "to other nodes")
    for name, traffic in found.traffic.items():
        shown.add_row(name, str(traffic.calls), digits(traffic.bytes / 1e9), digits(traffic.between / 1e9))
    kinds = sum(call.kind == "new_group" for _, call in next(iter(found.traces.values())))
    calls = ", ".join(f"{found.calls(part)} in the {part}" for part in _PARTS)
    head = [
        f"{found.mesh}, {found.world} ranks: rehearsed {len(found.traces)} ranks in {found.seconds:.1f} s, "
        f"{found.mebibytes:.0f} MiB per process",
        f"{kinds} process groups; calls: {calls}",
        "sent in one training step by the rank that sends the most:",
        *lines(shown),
        *_counted(found),
    ]
    if not found.problems:
        return [*head, "all collectives and messages match, and all ranks finish"]
    more = [f"... and {len(found.problems) - _SHOWN} more: --json lists all"] if len(found.problems) > _SHOWN else []
    return [*head, f"{len(found.problems)} problems:", *found.problems[:_SHOWN], *more]


def _counted(found: Rehearsal) -> Iterator[str]:
    """Yield lines about memory and time, if they were counted."""
    from autopar.cli.tables import digits, size

    if found.held and found.timeline is not None:
        rank, most = max(found.held.items(), key=lambda pair: pair[1].peak)
        parts = ", ".join(f"{name} {size(getattr(most, name))}" for name in ("weights", "gradients", "optimizer"))
        yield f"peak memory: {size(most.peak)} on rank {rank} ({parts})"
        time, waits = found.timeline.time, [found.timeline.spent(rank)["wait"] for rank in found.timeline.slots]
        shares = f"{min(waits) / time:.1%} to {max(waits) / time:.1%}" if time else "none"
        yield f"{digits(time)} s per step without overlap; ranks wait for {shares} of it"
        if found.hidden:
            yield f"{digits(time - found.hidden)} s per step if {digits(found.hidden)} s of dp traffic overlap"


def _to_json(found: Rehearsal) -> dict[str, Any]:
    return {
        "world": found.world,
        "mesh": found.mesh,
        "rehearsed": sorted(found.traces),
        "calls": {part: found.calls(part) for part in ("initialize", *_PARTS)},
        "traffic": {name: traffic._asdict() for name, traffic in found.traffic.items()},
        "held": {rank: held._asdict() for rank, held in found.held.items()},
        "step_time": None if found.timeline is None else found.timeline.time - found.hidden,
        "step_time_without_overlap": None if found.timeline is None else found.timeline.time,
        "problems": found.problems,
        "seconds": round(found.seconds, 2),
        "mebibytes": round(found.mebibytes),
    }


@app.command(short_help="Say where the ranks of a job part, from its traces.", epilog="Example: autopar trace traces")
def trace(folder: Annotated[Path, typer.Argument(help="Of AUTOPAR_TRACE.")], as_json: Json = False) -> None:
    """Match the collectives that the ranks of a job have noted with AUTOPAR_TRACE=FOLDER, and say where each rank is.

    Exit code 0 if they match and all ranks finished, else 1.
    """
    with errors(as_json):
        from autopar.errors import ConfigError
        from autopar.tools.rehearsal.matching import differences, latest, waiting
        from autopar.tools.rehearsal.trace import read

        traces = read(folder)
        if not traces:
            raise ConfigError(f"{folder} has no traces (rank-N.jsonl).\n  Start the job with AUTOPAR_TRACE={folder}.")
        missing = sorted({rank for calls in traces.values() for call in calls for rank in call.group.ranks} - {*traces})

        def stand_ins_for(ranks: Sequence[int]) -> list[int]:
            first = next((rank for rank in ranks if rank in traces), min(traces))
            return [rank if rank in traces else first for rank in ranks]

        problems = list(differences(traces, stand_ins_for))
        left = waiting(traces, waited={rank: latest(calls) for rank, calls in traces.items()})
        ends = [  # ranks that ended while another rank waits
            f"rank {rank} ended after {calls[-1]}\n    {calls[-1].where}" if calls else f"rank {rank} has no calls"
            for rank, calls in traces.items()
            if left and rank not in left
        ]
        waits = [f"rank {rank} waits in {call}\n    {call.where}" for rank, call in left.items()]
    if as_json:
        shown = {"ranks": len(traces), "missing": missing, "problems": problems, "ended": ends, "waiting": waits}
        print_json(shown)
    else:
        print("\n".join(_trace_in_words(traces, missing, problems, ends, waits)))
    if problems or waits or missing:
        raise typer.Exit(1)


def _trace_in_words(
    traces: Traces, missing: Sequence[int], problems: list[str], ends: list[str], waiting: list[str]
) -> list[str]:
    calls = sorted({len(each) for each in traces.values()})
    counted = f"{calls[0]} calls each" if len(calls) == 1 else f"{calls[0]} to {calls[-1]} calls"
    head = [f"{len(traces)} ranks, {counted}"]
    if missing:
        ranks = ", ".join(map(str, missing[:_SHOWN])) + (" ..." if len(missing) > _SHOWN else "")
        head.append(f"no trace of rank {ranks}: only the other ranks are compared")
    if not problems and not waiting:
        return [*head, "all collectives and messages match, and all ranks finish"]
    last = [f"rank {rank} ends with {calls[-1]}\n    {calls[-1].where}" for rank, calls in traces.items() if calls]
    return [*head, *ends[:_SHOWN], *problems[:_SHOWN], *(waiting or last)[: 2 * _SHOWN]]

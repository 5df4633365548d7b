"""Efficiency of all pipeline schedules over 2 processes, one thread each, against one process in the same run.

    python -m benchmarks pipeline --schedules 1f1b gpipe --microbatches 8 --rounds 8

The textbook: a pipeline of p equal stages and m micro-batches without any cost reaches m / (m + p - 1) of p times one
process. Schedules with several stages a rank or split backwards may reach more. Rounds of one process (the other
sleeps) and of the pipeline take turns; the ratio is the median of neighbours, and that of the fastest of each stands
beside it. CPU tells what the pipeline itself costs, whatever else runs: the sum over the stages is that of one process
where it costs nothing. Activations: the most bytes that are saved for backward at one time, on each stage.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import Size, build, tokens
from benchmarks.ranks import run_ranks
from benchmarks.rounds import Taken, Turns, Variant, interleave, ratio, summary

RANKS = 2
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--family", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="*", help="blocks of each stage; default: by parameters")
    parser.add_argument("--profile", action="store_true", help="print where the first stage's time goes")


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all schedules in one world."""
    rows: list[dict[str, Any]] = run_ranks("benchmarks.pipeline:rank_main", options, RANKS)[0]
    if options["profile"]:
        print("\n".join(row.pop("profile") for row in rows))
    return rows


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: one schedule after the other."""
    turns = Turns(options["folder"])
    size: Size = {key: options[key] for key in ("hidden", "layers", "vocab", "seq")}
    plain = build(options["family"], size)
    ids = tokens(size, batch=options["microbatches"])
    return [_schedule(schedule, plain, ids, options, turns) for schedule in options["schedules"]]


def _schedule(schedule: str, plain: Any, ids: torch.Tensor, options: dict[str, Any], turns: Turns) -> dict[str, Any]:
    import autopar

    settings = {"schedule": schedule, "microbatch_size": 1, "layers_per_stage": options["stages"] or []}
    config = {"model_parallelism": {"pipeline_parallel_size": RANKS}, "pipeline": settings}
    piped = autopar.initialize(copy.deepcopy(plain), config)
    step = partial(piped.execute_pipeline, {"input_ids": ids, "labels": ids})
    one = partial(one_process, plain, ids)
    variants = {"one process": Variant(one, True), "pipeline": Variant(step)}
    samples = interleave(variants, options["rounds"], turns, warm_up=1)
    found = summary(samples, ["one process"], "one process")
    activations: list[Any] = [None] * RANKS
    dist.all_gather_object(activations, round(activation_peak(step) / 2**20, 1))
    row = {
        "schedule": schedule,
        "one process, ms": found["one process"]["ms"],
        "pipeline, ms": found["pipeline"]["ms"],
        "speedup": found["pipeline"]["speedup"],
        **efficiency(samples["one process"], samples["pipeline"], len(ids), RANKS),
        "CPU of all stages / of one": round(found["pipeline"]["cpu_ms"] * RANKS / found["one process"]["cpu_ms"], 3),
        "activations, MiB a stage": activations,
        "blocks a stage": [stop - start for start, stop in itertools.pairwise(piped._autopar.stages.bounds)],
    }
    if options["profile"]:
        row["profile"] = profile(step)
    piped.mpu.destroy()
    return row


def efficiency(
    alone: list[list[Taken]], together: list[list[Taken]], microbatches: int, ranks: int
) -> dict[str, float]:
    """Return the share of ``m / (m + p - 1)`` that was reached: the median of rounds, and of the fastest ones."""
    ideal = ranks * microbatches / (microbatches + ranks - 1)
    ones = [max(taken.wall for taken in row) for row in alone]
    twos = [max(taken.wall for taken in row) for row in together]
    return {
        "of textbook": round(ratio(ones, twos) / ideal, 3),
        "of textbook, fastest": round(min(ones) / min(twos) / ideal, 3),
        "spread": round(statistics.pstdev(twos) / statistics.mean(twos), 3),
    }


def one_process(plain: Any, ids: torch.Tensor) -> None:
    """Do the same micro-batches in one process."""
    for row in ids.split(1):
        (plain(input_ids=row, labels=row).loss / len(ids)).backward()


def activation_peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that were saved for backward at one time, weights aside; a storage counts once."""

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    alive: weakref.WeakSet[Saved] = weakref.WeakSet()
    most = 0

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal most
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return tensor
        saved = Saved(tensor)
        alive.add(saved)
        storages = {s.tensor.untyped_storage().data_ptr(): s.tensor.untyped_storage().nbytes() for s in alive}
        most = max(most, sum(storages.values()))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda s: s.tensor if isinstance(s, Saved) else s):
        work()
    return most


def profile(work: Callable[[], Any]) -> str:
    """Return a table of where the time goes."""
    with torch.profiler.profile() as made:
        work()
    return str(made.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))

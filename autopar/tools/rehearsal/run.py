"""Rehearse a job of many ranks on this machine: ``autopar.rehearse`` and ``autopar rehearse``."""

from __future__ import annotations

import functools
import json
import resource
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from autopar.config import ParallelConfig
from autopar.deferred_init.context import lazy_init
from autopar.distributed.axis import MeshSizes
from autopar.dry_run.plan_model import ModelPlans, plan_model, prepared
from autopar.errors import ConfigError
from autopar.tools.planner.candidate import mesh_words
from autopar.tools.planner.hardware import Node, find_node
from autopar.tools.planner.network import exposed
from autopar.tools.planner.planned_model import inputs_of, without_memory
from autopar.tools.rehearsal.matching import OVER_NCCL, blocked_calls, differences, waiting, where_awaited
from autopar.tools.rehearsal.one_rank import Job, MakeOptimizer, Part, Rehearsed, run_round
from autopar.tools.rehearsal.simulated_ranks import axes_of, coordinates_of, rounds_of, stand_ins_for
from autopar.tools.rehearsal.timeline import Held, Timeline, Traffic, chrome_trace, play, traffic_of
from autopar.tools.rehearsal.trace import Call

# A rehearsal has no tensor values, no shared memory and no accelerator.
_OVERRIDES: dict[str, Any] = {"consistency_check": False, "cpu_transport": "gloo", "zero_cpu_offload": False}


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        world: The number of ranks of the job.
        mesh: The mesh in words.
        traces: The calls of each rehearsed rank; each call has its part of the program.
        problems: The mismatches and deadlocks; empty if all collectives and messages match and all ranks finish.
        traffic: The traffic of the training step by axis.
        held: The memory of each rehearsed rank in the training step; only with ``gpu`` and without ``loop``.
        timeline: The training step without overlap; None without ``gpu``, or if there are problems.
        hidden: The seconds of communication that overlap with work, by the planner's estimate.
        coordinates: The coordinates (pp, cp, ep, tp, dp) of every rank of the world.
        seconds, mebibytes: The duration of the rehearsal, and the peak memory of one of its processes.
    """

    world: int
    mesh: str
    traces: Mapping[int, list[Part]]
    problems: list[str]
    traffic: dict[str, Traffic]
    held: Mapping[int, Held]
    timeline: Timeline | None
    hidden: float
    coordinates: Sequence[tuple[int, ...]]
    seconds: float
    mebibytes: float

    def calls(self, part: str = "") -> int:
        """Count the calls of all rehearsed ranks in one part of the program, or in all parts."""
        return sum(part in ("", own) for parts in self.traces.values() for own, _ in parts)

    def write_timeline(self, file: str | Path) -> None:
        """Write the training step for https://ui.perfetto.dev and ``chrome://tracing``.

        Raises:
            ConfigError: If the timeline is missing, because ``gpu`` was not given or the ranks do not finish.
        """
        if self.timeline is None:
            raise ConfigError("The rehearsal has no timeline.\n  Call rehearse(..., gpu='h100'), and fix its problems.")
        Path(file).write_text(json.dumps(chrome_trace(self.timeline)), encoding="utf-8")


def rehearse(
    model: PreTrainedModel | PretrainedConfig,
    config: Mapping[str, Any] | str | Path | ParallelConfig,
    world: int,
    *,
    batch: int = 0,
    sequence: int = 128,
    gpus_per_node: int | None = None,
    gpu: str | Node | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    loop: Callable[[Any, Any, dict[str, Any]], None] | None = None,
) -> Rehearsal:
    """Initialize, train a step, evaluate, save and load on some ranks of a job, without GPUs, weights or a network.

    The rehearsal runs the first and the last rank of each axis, each stage, and one rank for each other shape of
    shards. Each rank is a local process with tensors that have no memory. The rehearsal compares every collective over
    all members of its group, and every message with its receive call. Then it replays all ranks to find deadlocks. It
    does not rehearse comparisons of values (``consistency_check``).

    Args:
        model: A model, which is only read, or a config, whose causal language model is built without memory.
        config: The configuration of :func:`autopar.initialize`.
        world: The number of ranks.
        batch: The samples of a replica in a step; 0: one sample for each stage or micro-batch, at least 2.
        sequence: The tokens of each sample.
        gpus_per_node: The ranks of a node. Default: the number of ``gpu``'s node, or 8.
        gpu: A GPU or machine of ``autopar plan``, or its specification. The rehearsal then counts memory and time.
        optimizer: ``adamw``, ``adam``, ``sgd``, ``sgd-momentum``, ``muon`` (for all matrices), or a function that
            makes an optimizer from a list of parameters.
        loop: A function that replaces the program after ``initialize``. It gets the model, optimizer and batch.

    Raises:
        ConfigError, PolicyError, UnsupportedModelError: The errors of ``initialize``.
        RuntimeError: If a rank fails in its rehearsal, with its traceback.
    """
    if dist.is_initialized():
        raise ConfigError("rehearse must run before torch.distributed is initialized.\n  Call it in a single process.")
    least = {"world": (world, 1), "batch": (batch, 0), "sequence": (sequence, 1), "gpus_per_node": (gpus_per_node, 1)}
    for name, (size, fits) in least.items():
        if size is not None and size < fits:
            raise ConfigError(f"rehearse: {name} must be at least {fits}; got {size}")
    start = time.perf_counter()
    node = gpu if isinstance(gpu, Node) else find_node(gpu or "dgx-h100", gpus_per_node)
    card = None if gpu is None else node.gpu
    built: Any = model
    if not isinstance(model, nn.Module):
        with lazy_init():
            built = AutoModelForCausalLM.from_config(model)
    full = without_memory(built, grouped=card is not None, cache=loop is not None and card is None)
    parsed = replace(ParallelConfig.parse(config, world), **_OVERRIDES)
    tp, pp, cp = parsed.tensor_parallel_size, parsed.pipeline_parallel_size, parsed.context_parallel_size
    sizes = MeshSizes(tp, pp, parsed.data_parallel_size(world), cp)
    plans = ModelPlans.of(full, None, parsed.policy)
    if not isinstance(plans.inner, PreTrainedModel):
        raise ConfigError(f"rehearse: model must be a Hugging Face PreTrainedModel; got {type(full).__name__}")
    inputs = inputs_of(plans.inner, batch or max(2, sizes.pp, parsed.pipeline.num_microbatches or 1), sequence)
    job = Job(full, parsed, world, inputs, loop, card, gpus_per_node=node.gpus, optimizer=optimizer)
    found, problems = _run(job, plans, sizes)
    axes = axes_of(sizes, parsed.expert_parallel_size, parsed.zero_shard_size)
    timeline = None
    if card is not None and not problems:
        pairs = {}
        for rank, one in found.items():
            ordered = where_awaited([call for _, call in one.parts], one.waited)
            pairs[rank] = [(one.parts[at][1], one.work[at]) for at in ordered if one.parts[at][0] == "step"]
        timeline = play(pairs, {rank: one.after for rank, one in found.items()}, node, axes)
    in_step = {rank: [call for part, call in one.parts if part == "step"] for rank, one in found.items()}
    return Rehearsal(
        world,
        mesh_words(sizes.tp, sizes.cp, sizes.pp, sizes.dp),
        {rank: one.parts for rank, one in found.items()},
        problems,
        traffic_of(in_step, axes, node.gpus),
        {rank: one.held for rank, one in found.items() if card is not None and loop is None},
        timeline,
        _hidden(parsed, timeline),
        coordinates_of(sizes, parsed.expert_parallel_size),
        time.perf_counter() - start,
        max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024,
    )


def _hidden(config: ParallelConfig, timeline: Timeline | None) -> float:
    """Return the seconds of communication between replicas that overlap with work, on the busiest rank.

    FSDP2's communication overlaps with all work. Gradient averaging overlaps with the last micro-batch's backward.
    """
    if timeline is None or (config.pipeline_parallel_size > 1 and config.zero_stage == 2):
        return 0.0
    rank = min(timeline.slots, key=lambda rank: timeline.spent(rank)["wait"])
    between = [slot for slot in timeline.slots[rank] if "dp" in slot.lane]
    work = [slot for slot in timeline.slots[rank] if slot.lane == "compute"]
    if not config.fully_sharded:
        between = [slot for slot in between if slot.name.startswith("all_reduce")]
        work = [slot for slot in work if "backward" in slot.name]
        last = work[-1].name.rpartition("micro-batch ")[2] if work else ""
        work = [slot for slot in work if slot.name.rpartition("micro-batch ")[2] == last]
    total, overlapping = (sum(slot.end - slot.start for slot in slots) for slots in (between, work))
    return total - exposed(total, overlapping)


def _run(job: Job, plans: ModelPlans, sizes: MeshSizes) -> tuple[dict[int, Rehearsed], list[str]]:
    """Rehearse the stand-ins for all ranks; return their results and the problems."""
    made = plan_model(plans, job.config, lambda plan: None)  # cached before the fork, for all processes
    made.fingerprint(job.model)  # cached, too
    coordinates = coordinates_of(sizes, job.config.expert_parallel_size)
    found: dict[int, Rehearsed] = {}

    def calls_of(found: Mapping[int, Rehearsed]) -> dict[int, list[Call]]:
        return {rank: [call for _, call in one.parts] for rank, one in found.items()}

    def mismatches(found: Mapping[int, Rehearsed], cut: Collection[int]) -> Iterator[str]:
        stands = functools.cache(lambda ranks: stand_ins_for(ranks, [*found], coordinates))
        return differences(calls_of(found), stands, cut=cut)

    with prepared(plans):
        rows = made.features.get("context_parallel")
        chained = rows is not None and bool(rows.in_runs)
        for ranks in rounds_of(sizes, job.config.expert_parallel_size, made.tensors, chained=chained):
            if set(ranks) <= set(found):
                continue
            made_by, failed = run_round(job, ranks, coordinates, {rank: one.transcript for rank, one in found.items()})
            if failed:
                rank = min(failed, key=lambda rank: ("Timed out" in failed[rank], rank))
                before = "".join(f"Before that, {each}" for each in islice(mismatches(made_by, made_by), 1))
                raise RuntimeError(f"rank {rank} of {job.world} fails in its rehearsal:\n{failed[rank]}{before}")
            found |= made_by
    at = {rank: one.parts[one.blocked_at][1] for rank, one in found.items() if one.blocked_at >= 0}
    problems = [*mismatches(found, at), *blocked_calls(at)]
    calls, waited = calls_of(found), {rank: one.waited for rank, one in found.items()}
    problems = problems or blocked_calls(waiting(calls, waited=waited))
    return found, problems or blocked_calls(waiting(calls, waited=waited, in_order=True), OVER_NCCL)

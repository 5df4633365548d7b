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
from autopar.tools.rehearsal.cast import axes_of, casts, coordinates_of, standing_in
from autopar.tools.rehearsal.matching import differences, standing, stuck, where_awaited
from autopar.tools.rehearsal.one_rank import Job, MakeOptimizer, Part, Rehearsed, inputs_of, run_cast, without_memory
from autopar.tools.rehearsal.timeline import Held, Timeline, Traffic, chrome_trace, play, traffic_of
from autopar.tools.rehearsal.trace import Call

# Settings of a configuration without values, shared memory and an accelerator.
_UNLIKE: dict[str, Any] = {"consistency_check": False, "cpu_transport": "gloo", "zero_cpu_offload": False}


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        world: The number of ranks of the job.
        mesh: The mesh in words.
        traces: The calls of each rehearsed rank, with the part of the program of each.
        problems: The differences and endless waits; empty if every collective and message of the job finds its like,
            and all ranks come to an end.
        traffic: The traffic of the training step by axis.
        held: The bytes of each rehearsed rank in the training step; only with ``gpu``, and without ``loop``.
        timeline: The training step, without overlap; None without ``gpu``.
        hidden: The seconds of the step that overlap hides, as the planner counts them.
        coordinates: The place of every rank of the world on (pp, cp, ep, tp, dp).
        seconds, mebibytes: The time of the rehearsal, and the most memory of one of its processes.
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
        """Count the calls of the rehearsed ranks in one part of the program, or in all."""
        return sum(part in ("", own) for parts in self.traces.values() for own, _ in parts)

    def write_timeline(self, file: str | Path) -> None:
        """Write the training step for https://ui.perfetto.dev and ``chrome://tracing``.

        Raises:
            ConfigError: If no timeline was made, without ``gpu=`` or an end of all ranks.
        """
        if self.timeline is None:
            raise ConfigError("no timeline was made: rehearse(..., gpu='h100') makes one if it finds no problems")
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

    The first and the last rank of each axis, each stage, and ranks with further shapes of shards run in a process of
    this machine each, on tensors without memory. Every collective is compared with the ones of all members of its
    group, every message with its receiver's. Then all ranks are played against each other, which shows whether some
    wait for each other for ever. Comparisons by value (``consistency_check``) are not rehearsed.

    Args:
        model: A model, only read; or a config, whose causal language model is built without memory.
        config: The configuration of :func:`autopar.initialize`.
        world: The number of ranks.
        batch: The samples of a replica in a step; 0: one for each stage or micro-batch, at least 2.
        sequence: The tokens of a sample.
        gpus_per_node: The ranks of a machine; by default the GPUs of ``gpu``, or 8.
        gpu: A GPU or machine that ``autopar plan`` knows, or its figures: counts memory, and times the step.
        optimizer: ``adamw``, ``adam``, ``sgd``, ``sgd-momentum``, ``muon`` of all matrices, or a function that makes
            an optimizer of a list of parameters.
        loop: A function called with model, optimizer and batch in place of all after ``initialize``.

    Raises:
        ConfigError, PolicyError, UnsupportedModelError: The errors of ``initialize``.
        RuntimeError: If a rank fails in its rehearsal, with its traceback.
    """
    if dist.is_initialized():
        raise ConfigError("rehearse runs in one process, before torch.distributed is started: outside of the job")
    least = {"world": (world, 1), "batch": (batch, 0), "sequence": (sequence, 1), "gpus_per_node": (gpus_per_node, 1)}
    for name, (size, fits) in least.items():
        if size is not None and size < fits:
            raise ConfigError(f"rehearse: {name}={size}, and at least {fits} fits")
    start = time.perf_counter()
    node = gpu if isinstance(gpu, Node) else find_node(gpu or "dgx-h100", gpus_per_node)
    card = None if gpu is None else node.gpu
    built: Any = model
    if not isinstance(model, nn.Module):
        with lazy_init():
            built = AutoModelForCausalLM.from_config(model)
    full = without_memory(built, counted=card is not None, cache=loop is not None and card is None)
    parsed = replace(ParallelConfig.parse(config, world), **_UNLIKE)
    tp, pp, cp = parsed.tensor_parallel_size, parsed.pipeline_parallel_size, parsed.context_parallel_size
    sizes = MeshSizes(tp, pp, parsed.data_parallel_size(world), cp)
    plans = ModelPlans.of(full, None, parsed.policy)
    if not isinstance(plans.inner, PreTrainedModel):
        raise ConfigError(f"rehearse: {type(full).__name__} is not a Hugging Face model: its inputs are unknown")
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
    """Return the seconds of the exchange of replicas that overlap with work, on the rank that ends last.

    FSDP2's overlaps with all work, the average of gradients with the backward of the last micro-batch.
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
    total, beside = (sum(slot.end - slot.start for slot in slots) for slots in (between, work))
    return total - exposed(total, beside)


def _run(job: Job, plans: ModelPlans, sizes: MeshSizes) -> tuple[dict[int, Rehearsed], list[str]]:
    """Rehearse the ranks that stand for all; return them, and the problems."""
    made = plan_model(plans, job.config, lambda plan: None)  # once for all processes
    made.fingerprint(job.model)  # likewise
    coordinates = coordinates_of(sizes, job.config.expert_parallel_size)
    found: dict[int, Rehearsed] = {}

    def calls_of(found: Mapping[int, Rehearsed]) -> dict[int, list[Call]]:
        return {rank: [call for _, call in one.parts] for rank, one in found.items()}

    def unlike(found: Mapping[int, Rehearsed], cut: Collection[int]) -> Iterator[str]:
        stands = functools.cache(lambda ranks: standing_in(ranks, [*found], coordinates))
        return differences(calls_of(found), stands, cut=cut)

    with prepared(plans):
        rows = made.features.get("context_parallel")
        chained = rows is not None and bool(rows.in_runs)
        for cast in casts(sizes, job.config.expert_parallel_size, made.tensors, chained=chained):
            if set(cast) <= set(found):
                continue
            made_by, failed = run_cast(job, cast, coordinates, {rank: one.told for rank, one in found.items()})
            if failed:
                rank = min(failed, key=lambda rank: ("Timed out" in failed[rank], rank))
                before = "".join(f"Before that, {each}" for each in islice(unlike(made_by, made_by), 1))
                raise RuntimeError(f"rank {rank} of {job.world} fails in its rehearsal:\n{failed[rank]}{before}")
            found |= made_by
    at = {rank: one.parts[one.stands_at][1] for rank, one in found.items() if one.stands_at >= 0}
    problems = [*unlike(found, at), *standing(at)]
    calls, waited = calls_of(found), {rank: one.waited for rank, one in found.items()}
    return found, problems or stuck(calls, waited=waited) or stuck(calls, waited=waited, in_order=True)

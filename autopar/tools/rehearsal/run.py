"""Rehearse a job of many ranks on this machine: ``autopar.rehearse`` and ``autopar rehearse``."""

from __future__ import annotations

import functools
import json
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autopar.config import ParallelConfig
from autopar.distributed.mesh_sizes import MeshSizes
from autopar.distributed.trace import Call
from autopar.dry_run.plan_model import ModelPlans, plan_model, prepared
from autopar.errors import AutoparError, ConfigError, first_line
from autopar.quantized.layers import StandIn
from autopar.tools.planner.candidate import Candidate, mesh_words
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import Gpu, find_gpu
from autopar.tools.planner.search import Found, gigabytes
from autopar.tools.rehearsal.against import Way, check_world, ways
from autopar.tools.rehearsal.cast import axes_of, casts, coordinates_of, standing_for, standing_in
from autopar.tools.rehearsal.matching import Traces, differences, standing, stuck, where_awaited
from autopar.tools.rehearsal.one_rank import (
    Job,
    MakeOptimizer,
    Part,
    Rehearsed,
    inputs_of,
    run_cast,
    without_memory,
)
from autopar.tools.rehearsal.timeline import Timeline, Traffic, chrome_trace, draw, play, traffic_of
from autopar.tools.rehearsal.work import Held

# Of the configuration: without values, without shared memory, without an accelerator.
_UNLIKE: dict[str, Any] = {"consistency_check": False, "cpu_transport": "gloo", "zero_cpu_offload": False}


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        world: ranks of the job.
        mesh: in words.
        traces: of each rank that was rehearsed: its calls, with the part of the program that each is in.
        problems: what does not fit; none: every collective and message of the job finds its like, and all ranks come
            to an end.
        traffic: by axis, in the training step.
        held: bytes of each rank that was rehearsed, in the training step; only with ``gpu``, and without ``loop``.
        written: bytes of the files that each of them saves.
        timeline: of the training step; None without ``gpu``.
        coordinates: of every rank of the world.
        seconds, mebibytes: that the rehearsal took, and the most memory of one of its processes.
    """

    world: int
    mesh: str
    traces: Mapping[int, list[Part]]
    problems: list[str]
    traffic: dict[str, Traffic]
    held: Mapping[int, Held]
    written: Mapping[int, int]
    timeline: Timeline | None
    coordinates: Sequence[tuple[int, ...]]
    seconds: float
    mebibytes: float

    def calls(self, part: str = "") -> int:
        """Count the calls of the rehearsed ranks."""
        return sum(part in ("", own) for parts in self.traces.values() for own, _ in parts)

    def write_timeline(self, file: str | Path, title: str = "") -> None:
        """Write the training step: as a picture into a ``.svg``, else for Perfetto and ``chrome://tracing``.

        Raises:
            ConfigError: there is no timeline: ``gpu=`` was not given, or the ranks do not come to an end.
        """
        if self.timeline is None:
            raise ConfigError("there is no timeline: rehearse(..., gpu='h100') makes one, where there are no problems")
        picture = Path(file).suffix == ".svg"
        text = draw(self.timeline, title or self.mesh) if picture else json.dumps(chrome_trace(self.timeline))
        Path(file).write_text(text, encoding="utf-8")

    def against(self, traces: Traces) -> list[Way]:
        """Compare the traces of a job, of :func:`autopar.distributed.trace.read`, with this one (:func:`ways`).

        Raises:
            ConfigError: they are of another number of ranks.
        """
        check_world(traces, self.world)
        rehearsed = tuple(self.traces)
        return ways(traces, self.traces, lambda rank: standing_for(rank, rehearsed, self.coordinates))


def rehearse(
    model: PreTrainedModel | PretrainedConfig,
    config: Mapping[str, Any] | str | Path | ParallelConfig,
    world: int,
    *,
    batch: int = 0,
    sequence: int = 128,
    gpus_per_node: int = 8,
    gpu: str | Gpu | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    loop: Callable[[Any, Any, dict[str, Any]], None] | None = None,
) -> Rehearsal:
    """Initialize, train a step, evaluate, save and load on some ranks of a job, without GPUs, weights or a network.

    Each rank that has a part of its own (a stage, other shards, the first and the last of each axis) runs in a process
    of this machine, on tensors without memory. Every collective that it issues is noted and compared with those of all
    other members of its group; every message with its receiver's. Then all ranks are played against each other, which
    shows whether some wait for each other for ever. Comparisons by value (``consistency_check``) are not rehearsed.

    Args:
        model: only read; a config's causal language model is built without memory.
        config: of :func:`autopar.initialize`.
        world: ranks.
        batch: samples of a replica in a step; 0: one for each stage or micro-batch, at least 2.
        sequence: tokens of a sample.
        gpus_per_node: ranks of a machine.
        gpu: name of a GPU that ``autopar plan`` knows, or its figures: memory is counted, and the step gets times.
        optimizer: ``adamw``, ``adam``, ``sgd``, ``sgd-momentum``, ``muon`` of all matrices, or what makes yours of a
            list of parameters.
        loop: a loop of your own, called with model, optimizer and batch instead of what follows ``initialize``.

    Raises:
        ConfigError, PolicyError, UnsupportedModelError: what ``initialize`` would raise.
        RuntimeError: a rank failed in its rehearsal; with its traceback.
    """
    if dist.is_initialized():
        raise ConfigError("rehearse runs in one process, before torch.distributed is started: outside of the job")
    least = {"world": (world, 1), "batch": (batch, 0), "sequence": (sequence, 1), "gpus_per_node": (gpus_per_node, 1)}
    for name, (size, fits) in least.items():
        if size < fits:
            raise ConfigError(f"rehearse: {name}={size}, and at least {fits} fits")
    start = time.perf_counter()
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    whole = without_memory(_built(model), counted=card is not None, cache=loop is not None and card is None)
    parsed = replace(ParallelConfig.parse(config, world), **_UNLIKE)
    tp, pp, cp = parsed.tensor_parallel_size, parsed.pipeline_parallel_size, parsed.context_parallel_size
    sizes = MeshSizes(tp, pp, parsed.data_parallel_size(world), cp)
    plans = ModelPlans.of(whole, None, parsed.policy)
    if not isinstance(plans.inner, PreTrainedModel):
        raise ConfigError(f"rehearse: {type(whole).__name__} is no Hugging Face model: its inputs are not known")
    inputs = inputs_of(plans.inner, batch or max(2, sizes.pp, parsed.pipeline.num_microbatches or 1), sequence)
    job = Job(whole, parsed, world, inputs, loop, card, gpus_per_node=gpus_per_node, optimizer=optimizer)
    found, problems = _run(job, plans, sizes)
    axes = axes_of(sizes, parsed.expert_parallel_size, parsed.zero_shard_size)
    in_step = {rank: [call for part, call in one.parts if part == "step"] for rank, one in found.items()}
    return Rehearsal(
        world,
        mesh_words(sizes.tp, sizes.cp, sizes.pp, sizes.dp),
        {rank: one.parts for rank, one in found.items()},
        problems,
        traffic_of(in_step, axes, gpus_per_node),
        {rank: one.held for rank, one in found.items() if card is not None and loop is None},
        {rank: one.written for rank, one in found.items()},
        None if card is None or problems else _timeline(found, card, gpus_per_node),
        coordinates_of(sizes, parsed.expert_parallel_size),
        time.perf_counter() - start,
        max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024,
    )


def _run(job: Job, plans: ModelPlans, sizes: MeshSizes) -> tuple[dict[int, Rehearsed], list[str]]:
    """Rehearse the ranks that stand for all; return them, and what does not fit."""
    made = plan_model(plans, job.config, lambda plan: None)  # once for all processes
    made.fingerprint(job.model)  # likewise
    coordinates = coordinates_of(sizes, job.config.expert_parallel_size)
    found: dict[int, Rehearsed] = {}
    with prepared(plans):
        chained = made.rows is not None and bool(made.rows.in_runs)
        for cast in casts(sizes, job.config.expert_parallel_size, made.tensors, chained=chained):
            if set(cast) <= set(found):
                continue
            made_by, failed = run_cast(job, cast, coordinates, {rank: one.told for rank, one in found.items()})
            if failed:
                raise RuntimeError(_failure(job.world, made_by, failed, coordinates))
            found |= made_by
    calls = _calls(found)
    at = {rank: one.parts[one.stands_at][1] for rank, one in found.items() if one.stands_at >= 0}
    problems = [*differences(calls, _standing(found, coordinates), cut=at), *standing(at)]
    waited = {rank: one.waited for rank, one in found.items()}
    return found, problems or stuck(calls, waited=waited) or stuck(calls, waited=waited, in_order=True)


def _calls(found: Mapping[int, Rehearsed]) -> dict[int, list[Call]]:
    return {rank: [call for _, call in one.parts] for rank, one in found.items()}


def _standing(
    found: Mapping[int, Rehearsed], coordinates: Sequence[tuple[int, ...]]
) -> Callable[[Sequence[int]], Sequence[int]]:
    traced = tuple(found)
    return functools.cache(lambda ranks: standing_in(ranks, traced, coordinates))


def _failure(
    world: int, found: Mapping[int, Rehearsed], failed: Mapping[int, str], coordinates: Sequence[tuple[int, ...]]
) -> str:
    """Say how a rank failed, and what did not fit before."""
    rank = min(failed, key=lambda rank: ("Timed out" in failed[rank], rank))
    told = f"rank {rank} of {world} fails in its rehearsal:\n{failed[rank]}"
    before = next(differences(_calls(found), _standing(found, coordinates), cut=found), "")
    return told + (f"Before that, {before}" if before else "")


def _timeline(found: Mapping[int, Rehearsed], gpu: Gpu, gpus_per_node: int) -> Timeline:
    """Play the calls of the training step."""
    pairs = {}
    for rank, one in found.items():
        ordered = where_awaited([call for _, call in one.parts], one.waited)
        pairs[rank] = [(one.parts[at][1], one.work[at]) for at in ordered if one.parts[at][0] == "step"]
    return play(pairs, {rank: one.after for rank, one in found.items()}, gpu, gpus_per_node)


def _built(model: Any) -> Any:
    if isinstance(model, nn.Module):
        return model
    from transformers import AutoModelForCausalLM

    from autopar.deferred_init.context import lazy_init

    with lazy_init():
        return AutoModelForCausalLM.from_config(model)


def check_rehearsed(estimator: Estimator) -> None:
    """Raise ConfigError for a model that is planned, and that a rehearsal does not take."""
    quantized = next((each for each in estimator.model.model.parameters() if isinstance(each, StandIn)), None)
    if quantized is not None:
        raise ConfigError(
            f"--rehearse: weights in {quantized.kind.form} are planned, not rehearsed. Without it their memory is "
            "estimated; with another model, or without --quantization, it is counted."
        )


def count_found(estimator: Estimator, found: Found) -> None:
    """Rehearse the best candidates, and note what each rank of their pipelines holds at most.

    Those that need more than the GPU has, and those whose ranks do not match, become refused ones.
    """
    for place, estimate in reversed([*enumerate(found.best)]):
        candidate = estimate.candidate
        counted, reason = _counted(estimator, candidate, estimate.memory[0].reserve)
        found.best[place] = replace(estimate, counted=counted)
        if reason:
            del found.best[place]
            found.refused.append(((candidate.tp, candidate.cp, candidate.pp, candidate.dp), reason))


def _counted(estimator: Estimator, candidate: Candidate, reserve: int) -> tuple[tuple[int, ...], str]:
    """Return the bytes of each rank of the pipeline, of its rank that holds most; or why the candidate falls out."""
    model = estimator.model
    whole: Any = model.model

    try:
        run = rehearse(
            whole,
            model.sections(candidate),
            candidate.gpus,
            batch=candidate.microbatch * candidate.microbatches,
            sequence=model.sequence,
            gpus_per_node=estimator.gpus_per_node,
            gpu=estimator.gpu,
            optimizer=model.optimizer,
        )
    except AutoparError as error:
        return (), first_line(error)
    except RuntimeError as error:
        return (), f"fails in its rehearsal: {str(error).partition('Before that, ')[0].splitlines()[-1]}"
    most = [0] * candidate.pp
    for rank, held in run.held.items():
        stage = run.coordinates[rank][0]
        most[stage] = max(most[stage], held.peak + reserve)
    large = max(most) > estimator.gpu.memory
    fits = f"needs {gigabytes(max(most))} GB, counted in its rehearsal" if large else ""
    return tuple(most), next(iter(run.problems), fits)

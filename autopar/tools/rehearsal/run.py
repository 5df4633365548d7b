"""Rehearse a job of many ranks on this machine: ``autopar.rehearse`` and ``autopar rehearse``."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autopar.checks.optimizer_probe import probe
from autopar.config import ParallelConfig
from autopar.distributed.mesh_sizes import MeshSizes
from autopar.distributed.trace import Call
from autopar.dry_run.plan_model import ModelPlans, Plans, plan_model, prepared
from autopar.errors import ConfigError
from autopar.policy.described_model import model_inside
from autopar.policy.match import find_policy, given_policy
from autopar.tools.planner.candidate import mesh_words
from autopar.tools.rehearsal.cast import standing_for
from autopar.tools.rehearsal.coordinates import casts, coordinates_of
from autopar.tools.rehearsal.matching import differences, stuck
from autopar.tools.rehearsal.one_rank import (
    Job,
    Part,
    inputs_of,
    optimizer_of,
    run_cast,
    without_memory,
)

__all__ = ["Rehearsal", "Traffic", "rehearse"]


class Traffic(NamedTuple):
    """Traffic of a rank over one axis in a training step.

    Attributes:
        calls: collectives and messages.
        bytes: that the rank gives to them, of the rank that gives most.
        between: whether some of the axis's ranks are on other nodes.
    """

    calls: int
    bytes: int
    between: bool


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        world: ranks of the job.
        mesh: in words.
        traces: of each rank that was rehearsed: its calls, with the part of the program that each is in.
        problems: what does not fit; none: every collective and message of the job finds its like, and all ranks come
            to an end.
        traffic: by axis.
        seconds, mebibytes: that the rehearsal took, and the most memory of one of its processes.
    """

    world: int
    mesh: str
    traces: Mapping[int, list[Part]]
    problems: list[str]
    traffic: dict[str, Traffic]
    seconds: float
    mebibytes: float

    def calls(self, part: str = "") -> int:
        """Count the calls of the rehearsed ranks."""
        return sum(part in ("", own) for parts in self.traces.values() for own, _ in parts)


def rehearse(
    model: PreTrainedModel | PretrainedConfig,
    config: Mapping[str, Any] | str | Path | ParallelConfig,
    world: int,
    *,
    batch: int = 0,
    sequence: int = 128,
    gpus_per_node: int = 8,
    loop: Callable[[Any, Any, dict[str, Any]], None] | None = None,
) -> Rehearsal:
    """Run ``initialize``, a training step and an evaluation of some ranks of a job, without GPUs, weights or a network.

    Each rank that has a part of its own (a stage, other shards, the first and the last of each axis) runs in a process
    of this machine, on tensors without memory. Every collective that it issues is noted and compared with those of all
    other members of its group: kinds, sizes, dtypes, roots and splits; every message with its receiver's. Then all
    ranks are played against each other, which shows whether some wait for each other for ever. Comparisons by value
    in training (``consistency_check``) are not rehearsed.

    Args:
        model: only read; a config's causal language model is built without memory.
        config: of :func:`autopar.initialize`.
        world: ranks.
        batch: samples of a replica in a step; 0: one for each stage, at least 2.
        sequence: tokens of a sample.
        gpus_per_node: ranks of a machine.
        loop: a loop of your own, called with model, optimizer and batch instead of the step and the evaluation.

    Raises:
        ConfigError, PolicyError, UnsupportedModelError: what ``initialize`` would raise.
        RuntimeError: a rank failed in its rehearsal; with its traceback.
    """
    if dist.is_initialized():
        raise ConfigError("rehearse runs in one process, before torch.distributed is started: outside of the job")
    start = time.perf_counter()
    whole = without_memory(_built(model))
    parsed = replace(ParallelConfig.parse(config, world), consistency_check=False, cpu_transport="gloo")
    tp, pp, cp = parsed.tensor_parallel_size, parsed.pipeline_parallel_size, parsed.context_parallel_size
    sizes, experts = MeshSizes(tp, pp, parsed.data_parallel_size(world), cp), parsed.expert_parallel_size
    plans = _plans_of(whole)
    made = plan_model(plans, parsed, lambda plan: None)  # once for all processes
    _refuse(plans.inner, made)
    inputs = inputs_of(plans.inner, batch or max(2, sizes.pp), sequence)
    job = Job(whole, parsed, world, inputs, pp == 1 and not parsed.fully_sharded, loop)
    coordinates = coordinates_of(sizes, experts)
    optimizer = optimizer_of([nn.Parameter(torch.zeros(2, 2))])
    probe(optimizer, optimizer.param_groups[0])  # likewise
    traces: dict[int, list[Part]] = {}
    with prepared(plans):
        for cast in casts(sizes, experts, made.tensors):
            if not set(cast) <= set(traces):
                traces |= run_cast(job, cast, coordinates)
    calls = {rank: [call for _, call in parts] for rank, parts in traces.items()}
    problems = list(differences(calls, lambda rank: standing_for(rank, tuple(calls), coordinates)))
    problems += stuck(calls) if not problems else []
    mesh = mesh_words(sizes.tp, sizes.cp, sizes.pp, sizes.dp)
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    taken = time.perf_counter() - start
    return Rehearsal(world, mesh, traces, problems, _traffic(traces, gpus_per_node), taken, most / 1024)


def _built(model: Any) -> Any:
    if isinstance(model, nn.Module):
        return model
    from transformers import AutoModelForCausalLM

    from autopar.deferred_init.context import lazy_init

    with lazy_init():
        return AutoModelForCausalLM.from_config(model)


def _plans_of(model: nn.Module) -> ModelPlans:
    own = given_policy(model, None)
    prefix, inner = model_inside(model, own)
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(f"rehearse: {type(model).__name__} is no Hugging Face model: its inputs are not known")
    return ModelPlans(model, inner, prefix, find_policy(inner, own))


def _refuse(inner: nn.Module, made: Plans) -> None:
    if made.rows is not None and made.rows.in_runs:
        raise ConfigError(
            f"rehearse: {type(inner).__name__} hands states on between context-parallel ranks, which cannot be "
            "rehearsed: leave context_parallel_size out"
        )


def _traffic(traces: Mapping[int, list[Part]], gpus_per_node: int) -> dict[str, Traffic]:
    """Count what travels in the step, by axis."""
    found: dict[str, Traffic] = {}
    for parts in traces.values():
        calls, given, between = Counter[str](), Counter[str](), Counter[str]()
        for part, call in parts:
            if part == "step" and call.kind != "new_group" and not call.control:
                calls[call.group.name] += 1
                given[call.group.name] += _given(call)
                nodes = {rank // gpus_per_node for rank in call.group.ranks}
                between[call.group.name] += len(nodes) > 1
        for name in calls:
            other = found.get(name, Traffic(0, 0, False))
            most = max((given[name], calls[name]), (other.bytes, other.calls))
            found[name] = Traffic(most[1], most[0], bool(between[name]) or other.between)
    return found


def _given(call: Call) -> int:
    return 0 if call.kind == "recv" else call.bytes

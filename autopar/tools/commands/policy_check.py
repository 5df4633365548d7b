"""Check a policy on a model without weights: plan, shard sizes, dry run and stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar import registry
from autopar.config import ParallelConfig
from autopar.dry_run.plan_model import ModelPlans
from autopar.errors import AutoparError
from autopar.plan.plan import Plan, derived_notice
from autopar.plan.stages import StagePlan
from autopar.policy.schema import Policy
from autopar.tools.planner.parallelized import rule_of

_CP = 2  # default size for the check of context parallelism


def check_policy(
    model: nn.Module,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    *,
    tp: int = 2,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    long_sequences: bool = False,
    dry_run: bool = True,
) -> dict[str, Any]:
    """Run the checks of ``initialize`` without changing the model, and return a report as plain data.

    Args:
        model: A model on the meta device, or with weights. It is only read.
        policy: The policy, as in :func:`autopar.initialize`. Default: the policy that lists the model type.
        tp, pp, ep: The sizes of the mesh.
        cp: The context-parallel size. If it is above 1, the model must support it.
        sequence_parallel: A flag: the model must support sequence parallelism.
        long_sequences: A flag to report also whether the model supports sequence and context parallelism.
        dry_run: A flag to run the shards.

    Returns:
        A dict. ``policy``, ``notice`` (for an automatically derived policy) and ``attributes`` describe the policy.
        ``tensors`` has the ``rule``, its place ``where``, ``shape``, ``local_shapes`` (over the larger of tp and ep)
        and pipeline ``ranks`` of each parameter. ``ranks`` has the ``parameters`` and ``bytes`` of each rank.
        ``stages``, ``dry_run``, ``sequence_parallel`` and ``context_parallel`` have results, or reasons for failure.
        ``errors`` lists all errors, and ``holds`` is True if there are none.
    """
    report: dict[str, Any] = {"model": type(model).__name__, "policy": None, "notice": None}
    report |= {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "expert_parallel_size": ep}
    report |= {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    report |= {"attributes": [], "tensors": [], "ranks": [], "stages": None, "dry_run": "not run"}
    report |= {"sequence_parallel": None, "context_parallel": None, "errors": []}
    try:
        ParallelConfig.parse({"tp": tp, "pp": pp, "ep": ep})
        plans = ModelPlans.of(model, policy)
        used = plans.policy
        report["policy"] = {"name": used.name, "where": str(used.where), "model_types": list(used.model_types)}
        plan = plans.tensors(tp, experts=ep)
        report["notice"] = derived_notice(plans.model, plan, used)
    except AutoparError as error:
        report["errors"].append(str(error))
        return {**report, "holds": False}
    tries: list[tuple[str, Callable[[], Any], bool]] = [
        ("dry_run", lambda: "ok" if plans.tried(tp, experts=ep) else _why_not_run(plans.inner, tp, ep), True),
        ("stages", lambda: _stage_report(plans.stages(pp)), True),
    ][not dry_run :]
    if sequence_parallel or (long_sequences and tp > 1 and registry.installed("sequence_parallel")):
        from autopar.features.sequence_parallel import plan as sequence_plan

        sequence = functools.partial(sequence_plan.sequence, plans, tp, experts=ep)
        tries.append(("sequence_parallel", lambda: sequence(plans.stages(pp)) and "ok", sequence_parallel))
    if cp > 1 or (long_sequences and registry.installed("context_parallel")):
        from autopar.features.context_parallel import plan as context_plan

        tries.append(("context_parallel", lambda: context_plan.rows(plans, cp if cp > 1 else _CP) and "ok", cp > 1))
    for name, step, needed in tries:
        if report["errors"] and name not in ("dry_run", "stages"):
            break
        try:
            report[name] = step()
        except AutoparError as error:
            report[name] = "fails" if needed else f"refused: {error}"
            report["errors"] += [str(error)] if needed else []
    stages = plans.stages(pp) if isinstance(report["stages"], list) else None
    tensors = list(_tensors(model, plan, stages))
    attributes = [
        {"name": f"{a.path}.{a.name}", "where": a.where, "whole": a.whole}
        | {"local": [*a.values] * (plan.shards // len(a.values))}  # over tp ranks, or over all ranks with shards
        for a in plan.attributes
    ]
    ranks = list(_ranks(tensors, plan, pp if stages else 1))
    return {**report, "attributes": attributes, "tensors": tensors, "ranks": ranks, "holds": not report["errors"]}


def _why_not_run(model: nn.Module, tp: int, ep: int) -> str:
    if tp == 1:
        return f"not run: one rank holds the full model{', except for experts' if ep > 1 else ''}"
    if not isinstance(model, PreTrainedModel):
        return "not run: the forward's arguments are unknown; initialize runs it in the first forward"
    return "not run: the model does not run without data; compare loss and gradients with the reference model"


def _stage_report(stages: StagePlan) -> list[dict[str, Any]]:
    return [
        {
            "stage": stage,
            "rank": stages.rank_of[stage],
            "modules": list(stages.elements[stages.bounds[stage] : stages.bounds[stage + 1]]),
            "parameters": stages.costs[stage] if stages.costs else None,
        }
        for stage in range(stages.stages)
    ]


def _tensors(model: nn.Module, plan: Plan, stages: StagePlan | None) -> Iterator[dict[str, Any]]:
    """Yield an entry for each parameter. Tied parameters have one entry."""
    parameters = {plan.canonical(name) for name, _ in model.named_parameters()}
    for name, tensor in plan.tensors.items():
        if name in parameters:
            yield {
                "name": name,
                "tied": list(tensor.aliases),
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "rule": rule_of(plan, tensor),
                "where": tensor.where,
                "local_shapes": [list(tensor.local_shape(rank)) for rank in range(plan.shards)],
                "ranks": list(stages.holders(name)) if stages is not None else [0],
            }


def _ranks(tensors: list[dict[str, Any]], plan: Plan, pp: int) -> Iterator[dict[str, int]]:
    for stage in range(pp):
        for rank in range(plan.shards):
            held = [tensor for tensor in tensors if stage in tensor["ranks"]]
            sizes = [(torch.Size(tensor["local_shapes"][rank]).numel(), tensor["dtype"]) for tensor in held]
            yield {
                "tp": rank % plan.tp,
                "pp": stage,
                **({"ep": rank} if plan.shards > plan.tp else {}),
                "parameters": sum(count for count, _ in sizes),
                "bytes": sum(count * getattr(torch, dtype).itemsize for count, dtype in sizes),
            }

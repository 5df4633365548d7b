"""Marks of sharded parameters, for norms of Megatron-LM and DeepSpeed; which parameters a stage holds.

``tensor_model_parallel`` (counts on every rank; otherwise on the first one only), ``partition_dim``, and
``partition_stride``, the number of blocks that lie side by side (two for ``gate | up``). ``shared`` and
``ds_pipe_replicated``: an earlier pipeline stage holds and counts it, too. ``allreduce`` is False of experts that are
sharded over replicas, too: Megatron-LM's sign that the data-parallel group does not hold them alike.

The first of the ranks that hold a KV head counts it. One flag cannot describe a weight that is held twice only in part
(a fused ``q | k | v`` with fewer KV heads than ranks): it counts on every rank. DeepSpeed's norms are given what counts
(:mod:`autopar.integrations.deepspeed`), one of your own is too large by the repeated heads; ``autopar.clip_grad_norm_``
is exact there, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.distributed.mesh import MPU
from autopar.plan.plan import Plan, TensorPlan
from autopar.plan.stages import StagePlan

_NAMES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared", "ds_pipe_replicated", "allreduce")


def mark(model: nn.Module, plan: Plan, stages: StagePlan, mpu: MPU) -> None:
    """Set the attributes on the parameters that this rank holds. ``copy.deepcopy`` drops them, ``.to`` keeps them."""
    due: dict[str, TensorPlan] = {name: one for one in plan.tensors.values() for name in (one.name, *one.aliases)}
    for name, parameter in model.named_parameters():
        if name not in due:
            continue
        layout = due[name].layout
        if plan.tp > 1:
            rank = (mpu.shards if name in plan.experts else mpu.tp).rank
            counts = layout is not None and (bool(layout.owned(rank)) or not layout.ranges(rank))
            mark_shard(parameter, -1 if layout is None else layout.dim, len(layout.blocks) if layout else 1, counts)
        if name in plan.experts:
            parameter.allreduce = False  # type: ignore[attr-defined]
        if name in stages.tensors and min(stages.holders(name), default=mpu.pp.rank) < mpu.pp.rank:
            parameter.shared = parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def describe_stage(model: nn.Module, stages: StagePlan, mpu: MPU) -> str:
    """Return which stages this rank holds, and how many of the parameters."""
    here, values = (
        len(list(model.parameters())),
        (value for module in model.modules() for value in vars(module).values()),
    )
    gone = {value.weight_name for value in values if hasattr(value, "weight_name")}  # of other stages
    own = stages.stages_on(mpu.pp.rank)
    which = f"stage{'s' if len(own) > 1 else ''} {' and '.join(map(str, own))} of {stages.stages}"
    return f"this rank holds {which}: {here} of {here + len(gone)} parameters"


def mark_shard(parameter: torch.Tensor, dim: int, stride: int = 1, counts: bool = True) -> None:
    """Set the attributes of one parameter; ``dim`` is -1 if it is replicated, ``counts``: whether it counts here."""
    marked: Any = parameter
    marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = counts, dim, stride


def unmark(model: nn.Module) -> None:
    """Remove the attributes that :func:`mark` set."""
    for parameter in model.parameters():
        for name in _NAMES:
            vars(parameter).pop(name, None)

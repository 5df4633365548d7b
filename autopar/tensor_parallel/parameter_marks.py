"""Marks and descriptions of sharded parameters: for norms of Megatron-LM and DeepSpeed, and for errors of shapes.

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

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.distributed.axis import Axis
from autopar.distributed.mesh import MPU
from autopar.distributed.shard_reads import Shard, unwatch, watch
from autopar.foreign.tensors import own_parameters
from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan
from autopar.plan.stages import StagePlan

_NAMES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared", "ds_pipe_replicated", "allreduce")


def mark(model: nn.Module, plan: Plan, stages: StagePlan, mpu: MPU) -> None:
    """Set the attributes on the parameters that this rank holds. ``copy.deepcopy`` drops them, ``.to`` keeps them."""
    told: set[tuple[str, int]] = set()
    joins = not any(isinstance(parameter, DTensor) for parameter in model.parameters())  # not with ZeRO 2 and 3
    due: dict[str, TensorPlan] = {name: one for one in plan.tensors.values() for name in (one.name, *one.aliases)}
    for name, parameter in model.named_parameters():
        if name not in due:
            continue
        layout = due[name].layout
        if plan.tp > 1:
            counts = layout is not None and _counts(layout, (mpu.shards if name in plan.experts else mpu.tp).rank)
            mark_shard(parameter, -1 if layout is None else layout.dim, len(layout.blocks) if layout else 1, counts)
        if name in plan.experts:
            parameter.allreduce = False  # type: ignore[attr-defined]
        if layout is not None and plan.shards > 1:
            rank, axis = (mpu.shards.rank, "expert") if name in plan.experts else (mpu.tp.rank, "tensor")
            own = due[name]
            watch(parameter, Shard(own.name, tuple(own.shape), layout, rank, told, f"{axis}-parallel", joins))
        if name in stages.tensors and min(stages.holders(name), default=mpu.pp.rank) < mpu.pp.rank:
            parameter.shared = parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def describe_stage(model: nn.Module, stages: StagePlan, mpu: MPU) -> str:
    """Return which stages this rank holds, and how many of the parameters."""
    here, gone = len(list(model.parameters())), {name for m in model.modules() for name in _gone(m)}
    own = stages.stages_on(mpu.pp.rank)
    which = f"stage{'s' if len(own) > 1 else ''} {' and '.join(map(str, own))} of {stages.stages}"
    return f"this rank holds {which}: {here} of {here + len(gone)} parameters"


def _gone(module: nn.Module) -> list[str]:
    """Return the names of weights of other stages, for which something stands in a module."""
    return [value.weight_name for value in vars(module).values() if hasattr(value, "weight_name")]


def mark_shard(parameter: torch.Tensor, dim: int, stride: int = 1, counts: bool = True) -> None:
    """Set the attributes of one parameter.

    Args:
        dim: along which it is sharded; -1 if it is replicated.
        stride: parts that lie side by side.
        counts: in norms, on this rank whichever it is; otherwise on the first one only.
    """
    marked: Any = parameter
    marked.tensor_model_parallel = counts
    marked.partition_dim = dim
    marked.partition_stride = stride


def _counts(layout: Layout, rank: int) -> bool:
    return bool(layout.owned(rank)) or not layout.ranges(rank)


def unmark(model: nn.Module) -> None:
    """Remove the attributes that :func:`mark` set."""
    for parameter in model.parameters():
        unwatch(parameter)
        for name in _NAMES:
            vars(parameter).pop(name, None)


_LISTED = 3


def shards_named(model: nn.Module) -> Callable[[BaseException], str | None]:
    """Return a function that tells of an error which sharded parameters have the sizes that it names; None of others.

    The model is held weakly.
    """
    held = weakref.ref(model)

    def explain(error: BaseException) -> str | None:
        living, text = held(), str(error)
        if living is None or not isinstance(error, RuntimeError) or not re.search(r"\b(size|shape)", text):
            return None
        sizes = {int(number) for number in re.findall(r"\d+", text)}
        found: dict[int, str] = {}  # tied ones once
        for name, module in living.named_modules():
            found = _fitting(name, module, sizes) | found
        if not found:
            return None
        more = f"\n  and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        return (
            "autopar: parameters of these sizes are shards of whole ones:\n"
            + "\n".join(list(found.values())[:_LISTED])
            + more
            + "\n  What was made of whole weights (an average, a product) fits them before autopar.initialize, or "
            "after autopar.deparallelize(model)."
        )

    return explain


def _fitting(path: str, module: nn.Module, sizes: set[int]) -> dict[int, str]:
    """Describe the shards of a module of which both sizes, here and in the plain model, are among ``sizes``, by id."""
    axis: Axis | None = vars(module).get("tp")
    layouts: dict[str, Layout] = vars(module).get("autopar_layouts", {})
    lines: dict[int, str] = {}
    if axis is None:
        return lines
    for name, layout in layouts.items():
        parameter = own_parameters(module).get(name)
        if parameter is None or parameter.shape[layout.dim] == layout.size:
            continue
        if {parameter.shape[layout.dim], layout.size} <= sizes:
            whole = [*parameter.shape]
            whole[layout.dim] = layout.size
            lines[id(parameter)] = f"  {path}.{name}: rank {axis.rank}'s shard {list(parameter.shape)} of {whole}"
    return lines

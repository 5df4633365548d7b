"""Autograd collectives over one axis of the mesh: what the activations of a tensor-parallel layer go through.

| function             | forward                    | backward                    | Megatron-LM (mappings.py)         |
|----------------------|----------------------------|-----------------------------|-----------------------------------|
| ``copy``             | identity                   | all-reduce                  | f, _CopyToModelParallelRegion     |
| ``reduce``           | all-reduce                 | identity                    | g, _ReduceFromModelParallelRegion |
| ``gather``           | all-gather along a dim     | keep own part               | _GatherFromModelParallelRegion    |
| ``scatter``          | keep own part              | all-gather along the dim    | _ScatterToModelParallelRegion     |
| ``gather_sum``       | all-gather along a dim     | reduce-scatter              | _GatherFromSequenceParallelRegion |
| ``reduce_scatter``   | reduce-scatter along a dim | all-gather                  | _ReduceScatterToSequenceParallel  |
| ``all_to_all``       | all-to-all along dim 0     | all-to-all, splits swapped  | _AllToAll                         |
| ``sum_replicas``     | identity on a weight       | sum over the ranks that hold the same units | -                 |

The convention is that of Shoeybi et al., "Megatron-LM" (2019), section 3: after ``reduce`` or ``gather`` every rank
computes the same thing from the same values, so the backward of ``reduce`` is the identity and not another sum
(that is where ``torch.distributed.nn`` differs and gives gradients ``size`` times too large).

All are linear, and the backward of each is another one of them, so derivatives of any order go through them.

On the meta device the collectives compute shapes and communicate nothing: a dry run needs no process group.

None of these mutates its input except ``reduce_``, which is for a matmul output that nothing else has seen.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.distributed import gloo_collectives
from autopar.distributed import plain_collectives as plain
from autopar.distributed.axis import Axis
from autopar.distributed.derivatives import NoGraph, any_order, is_watched, keep_none, refuse_transforms
from autopar.distributed.plain_collectives import (
    all_gather,
    broadcast,
    even_layout,
    extremes_over,
    run,
    start_all_reduce,
)
from autopar.distributed.profiling import named_collective
from autopar.distributed.recompute_tape import note_on_meta
from autopar.foreign.autograd import is_transformed
from autopar.layout import Layout

__all__ = [
    "all_gather",
    "all_to_all",
    "broadcast",
    "copy",
    "even_layout",
    "extremes_over",
    "gather",
    "gather_sum",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "run",
    "scatter",
    "start_all_reduce",
    "sum_replicas",
]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @named_collective("all-reduce: gradient at the entry of a sharded region")
    @any_order(lambda ctx, grad: (reduce(grad, ctx.axis), None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return plain.all_reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    @named_collective("all-reduce: exit of a sharded region")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis = axis
        return plain.all_reduce(x, axis)

    @staticmethod
    @any_order(lambda ctx, grad: (copy(grad, ctx.axis), None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _ReduceInPlace(_Reduce):
    @staticmethod
    @named_collective("all-reduce: exit of a sharded region")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis = axis
        ctx.mark_dirty(x)
        plain.sum_in_place(x, axis)
        return x


class _Gather(torch.autograd.Function):
    @staticmethod
    @named_collective("all-gather: exit of a sharded region")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.layout, ctx.dim = axis, layout, dim
        return all_gather(x, axis, layout, dim)

    @staticmethod
    @any_order(lambda ctx, grad: (_owned_shard(grad, ctx.axis, ctx.layout, ctx.dim), None, None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        part = ctx.layout.shard(grad, ctx.axis.rank, ctx.dim)
        return plain.owned(part, ctx.axis, ctx.layout, ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.layout, ctx.dim = axis, layout, dim
        return layout.shard(x, axis.rank, dim)

    @staticmethod
    @named_collective("all-gather: gradient at the entry of a sharded region")
    @any_order(lambda ctx, grad: (_sum_of_shards(grad, ctx.axis, ctx.layout, ctx.dim), None, None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        layout: Layout = ctx.layout
        if not layout.replicated:
            return all_gather(grad, ctx.axis, layout, ctx.dim), None, None, None
        return plain.sum_shards(grad, ctx.axis, layout, ctx.dim), None, None, None  # of replicas each has a part


class _GatherSum(torch.autograd.Function):
    @staticmethod
    @named_collective("all-gather: entry of a sharded region")
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, dim: int, layout: Layout | None, gathered: torch.Tensor | None
    ) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.dim, ctx.layout = axis, dim, layout or even_layout(x.shape[dim] * axis.size, axis.size)
        return all_gather(x, axis, ctx.layout, dim) if gathered is None else gathered.detach()

    @staticmethod
    @named_collective("reduce-scatter: gradient at the entry of a sharded region")
    @any_order(lambda ctx, grad: (reduce_scatter(grad, ctx.axis, ctx.dim, ctx.layout), *(None,) * 4))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return plain.reduce_scatter(grad, ctx.axis, ctx.dim, ctx.layout), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    @named_collective("reduce-scatter: exit of a sharded region")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, layout: Layout | None) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.dim, ctx.layout = axis, dim, layout or even_layout(x.shape[dim], axis.size)
        return plain.reduce_scatter(x, axis, dim, ctx.layout)

    @staticmethod
    @named_collective("all-gather: gradient at the exit of a sharded region")
    @any_order(lambda ctx, grad: (gather_sum(grad, ctx.axis, ctx.dim, ctx.layout), *(None,) * 3))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_gather(grad, ctx.axis, ctx.layout, ctx.dim), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    @named_collective("all-to-all: rows")
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, output_splits: list[int] | None, input_splits: list[int] | None
    ) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.splits = axis, (input_splits, output_splits)
        rows = x.shape[0] if output_splits is None else sum(output_splits)
        out = x.new_empty(rows, *x.shape[1:])
        if axis.group is None:
            note_on_meta("all_to_all_single", out)
        else:
            run(gloo_collectives.all_to_all_single, axis, out, x.contiguous(), output_splits, input_splits)
        return out

    @staticmethod
    @any_order(lambda ctx, grad: (all_to_all(grad, ctx.axis, *ctx.splits), None, None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.axis, *ctx.splits), None, None, None


class _SumReplicas(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, axis: Axis, layout: Layout) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.layout = axis, layout
        return weight.view_as(weight)

    @staticmethod
    @named_collective("all-reduce: gradient of a weight with replicated units")
    @any_order(lambda ctx, grad: (_sum_of_replicas(grad, ctx.axis, ctx.layout), None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout: Layout = ctx.layout
        return layout.shard(plain.sum_shards(grad, ctx.axis, layout, layout.dim), ctx.axis.rank), None, None


class _SumOfShards(torch.autograd.Function):
    """The backward of :class:`_Scatter` as a function, whose own backward keeps this rank's shard."""

    @staticmethod
    @named_collective("all-reduce: gradient at the entry of a sharded region")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.layout, ctx.dim = axis, layout, dim
        return plain.sum_shards(x, axis, layout, dim)

    @staticmethod
    @any_order(lambda ctx, grad: (scatter(grad, ctx.axis, ctx.layout, ctx.dim), None, None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.layout.shard(grad, ctx.axis.rank, ctx.dim), None, None, None


class _SumOfReplicas(torch.autograd.Function):
    """The backward of :class:`_SumReplicas` as a function, whose own backward is the identity."""

    @staticmethod
    @named_collective("all-reduce: gradient of a weight with replicated units")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, layout: Layout) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.layout = axis, layout
        return layout.shard(plain.sum_shards(x, axis, layout, layout.dim), axis.rank)

    @staticmethod
    @any_order(lambda ctx, grad: (sum_replicas(grad, ctx.axis, ctx.layout), None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


def _owned_shard(x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    return plain.owned(scatter(x, axis, layout, dim), axis, layout, dim)


def _sum_of_shards(x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    return _apply(_SumOfShards, x, axis, layout, dim) if layout.replicated else gather(x, axis, layout, dim)


def _sum_of_replicas(x: torch.Tensor, axis: Axis, layout: Layout) -> torch.Tensor:
    return _apply(_SumOfReplicas, x, axis, layout)


def _apply(function: Any, x: torch.Tensor, axis: Axis, *args: Any) -> torch.Tensor:
    if axis.size == 1:
        return x
    if is_transformed():
        refuse_transforms(lambda: x)
    if x.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = function.apply(x, axis, *args)
    else:  # as autograd would, without its cost
        result = function.forward(NoGraph(), x, axis, *args)
    return result


def copy(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Enter a sharded region: identity forward, gradients of all ranks summed backward. Any shape."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _apply(_Copy, x, axis)


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Leave a sharded region: sum over the axis forward, identity backward. Any shape; ``x`` is kept as it was."""
    return _apply(_Reduce, x, axis)


def reduce_(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Reduce in place, like :func:`reduce`, a contiguous matmul output that nothing has saved."""
    return _apply(_Reduce if torch.is_grad_enabled() and is_watched(x) else _ReduceInPlace, x, axis)


def gather(x: torch.Tensor, axis: Axis, layout: Layout, dim: int = -1) -> torch.Tensor:
    """All-gather ``[..., n/axis] -> [..., n]`` along ``dim`` by ``layout``; backward keeps this rank's shard."""
    return _apply(_Gather, x, axis, layout, dim)


def scatter(x: torch.Tensor, axis: Axis, layout: Layout, dim: int = -1) -> torch.Tensor:
    """Keep this rank's shard, ``[..., n] -> [..., n/axis]`` along ``dim`` by ``layout``; backward all-gathers."""
    return _apply(_Scatter, x, axis, layout, dim)


def gather_sum(
    x: torch.Tensor, axis: Axis, dim: int = 0, layout: Layout | None = None, gathered: torch.Tensor | None = None
) -> torch.Tensor:
    """All-gather ``[..., n/axis] -> [..., n]`` into a sharded region; backward is a reduce-scatter.

    Args:
        layout: of ``n``; by default every rank has as much as this one.
        gathered: what the all-gather would make, where that is known already.
    """
    return _apply(_GatherSum, x, axis, dim, layout, gathered)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int = 0, layout: Layout | None = None) -> torch.Tensor:
    """Reduce-scatter ``[..., n] -> [..., n/axis]``, evenly or by ``layout``. Backward is an all-gather."""
    return _apply(_ReduceScatter, x, axis, dim, layout)


def all_to_all(
    x: torch.Tensor, axis: Axis, output_splits: list[int] | None = None, input_splits: list[int] | None = None
) -> torch.Tensor:
    """Exchange rows: ``input_splits[r]`` rows of dim 0 go to rank ``r``, ``output_splits[r]`` come from it."""
    return _apply(_AllToAll, x, axis, output_splits, input_splits)


def sum_replicas(weight: torch.Tensor, axis: Axis, layout: Layout) -> torch.Tensor:
    """Use a weight whose units are replicated: its *incoming* gradient is summed over the ranks that hold the same.

    Summing the incoming and not the accumulated gradient keeps gradient accumulation right: a sum after the second
    micro-batch would count the first one again.
    """
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    return _apply(_SumReplicas, weight, axis, layout)

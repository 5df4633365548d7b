"""Autograd collectives over rows of the sequence: uneven, in any order of rows, along any dim.

| function      | forward                                    | backward                                  |
|---------------|--------------------------------------------|-------------------------------------------|
| ``own_rows``  | keep own rows                              | zeros for the rows of others              |
| ``gather_rows`` | all-gather                               | reduce-scatter: the sum of all ranks      |
| ``exchange``  | all-to-all, rows of all heads -> all rows of some heads, or the reverse | the other direction |

With them each rank's gradient is a part whose sum over the axis is the whole (what each computed alone), or, of what all
ranks compute alike, the whole once for each rank. Averaged over the ranks, gradients need the first ones scaled by the
number of ranks: ``gather_rows`` does, since all ranks go on from what it returns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather, run
from autopar.distributed.profiling import named_collective
from autopar.layout import Layout

__all__ = ["exchange", "gather_rows", "own_rows"]

_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_rows(x: torch.Tensor, axis: Axis, layout: Layout, dim: int = 1) -> torch.Tensor:
    """Keep this rank's rows, ``[..., rows, ...] -> [..., rows/axis, ...]``, in memory of their own."""
    return layout.shard(x, axis.rank, dim)


def gather_rows(x: torch.Tensor, axis: Axis, layout: Layout, dim: int = 1) -> torch.Tensor:
    """All-gather ``[..., rows/axis, ...] -> [..., rows, ...]``; backward is a reduce-scatter."""
    result: torch.Tensor = _GatherRows.apply(x, axis, layout, dim % x.ndim)
    return result


def exchange(x: torch.Tensor, axis: Axis, heads: Layout, rows: Layout, *, to_heads: bool) -> torch.Tensor:
    """Exchange rows for heads, ``[batch, heads, rows/axis, d] -> [batch, heads/axis, rows, d]``, or the reverse."""
    result: torch.Tensor = _Exchange.apply(x, axis, heads, rows, to_heads)
    return result


class _GatherRows(torch.autograd.Function):
    @staticmethod
    @named_collective("all-gather: rows of the sequence")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
        ctx.axis, ctx.layout, ctx.dim = axis, layout, dim
        return all_gather(x, axis, layout, dim)

    @staticmethod
    @named_collective("reduce-scatter: gradient of rows of the sequence")
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _reduce_scatter_rows(grad, ctx.axis, ctx.layout, ctx.dim), None, None, None


def _reduce_scatter_rows(x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    """Sum over the axis and keep this rank's rows; padded if uneven."""
    shards = [layout.shard(x, rank, dim) for rank in range(axis.size)]
    mine = shards[axis.rank]
    if x.is_meta:
        return mine
    most = max(shard.shape[dim] for shard in shards)
    sent = x.new_zeros(axis.size, *x.shape[:dim], most, *x.shape[dim + 1 :])
    for rank, shard in enumerate(shards):
        sent[rank].narrow(dim, 0, shard.shape[dim]).copy_(shard)
    out = torch.empty_like(sent[0])
    run(_reduce_scatter_flat, axis, out.view(-1), sent.view(-1))
    return out.narrow(dim, 0, mine.shape[dim])


class _Exchange(torch.autograd.Function):
    @staticmethod
    @named_collective("all-to-all: rows and heads")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, heads: Layout, rows: Layout, to_heads: bool) -> torch.Tensor:
        ctx.axis, ctx.heads, ctx.rows, ctx.to_heads = axis, heads, rows, to_heads
        return _exchange(x, axis, heads, rows, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grad, ctx.axis, ctx.heads, ctx.rows, not ctx.to_heads), None, None, None, None


def _exchange(x: torch.Tensor, axis: Axis, heads: Layout, rows: Layout, to_heads: bool) -> torch.Tensor:
    given, taken = (1, 2) if to_heads else (2, 1)  # dim that is given away, dim that becomes whole
    by_given, by_taken = (heads, rows) if to_heads else (rows, heads)
    shape = list(x.shape)
    shape[given] = by_given.local_size(axis.rank)
    received = []
    for rank in range(axis.size):
        shape[taken] = by_taken.local_size(rank)
        received.append(tuple(shape))
    if x.is_meta:
        shape[taken] = by_taken.size
        return x.new_empty(shape)
    sent = [by_given.shard(x, rank, given).view(-1) for rank in range(axis.size)]
    sizes = [math.prod(each) for each in received]
    out = x.new_empty(sum(sizes))
    run(dist.all_to_all_single, axis, out, torch.cat(sent), sizes, [part.numel() for part in sent])
    parts = [part.view(each) for part, each in zip(out.split(sizes), received, strict=True)]
    return by_taken.unshard(parts, taken)

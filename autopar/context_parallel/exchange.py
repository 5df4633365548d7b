"""The all-to-all of attention over rows: rows of all heads are exchanged for all rows of some heads, and back.

Uneven numbers of both are fine, rows in any order, and heads that several ranks get: their gradients are added up.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import run
from autopar.distributed.derivatives import keep_none, single_backward
from autopar.distributed.gloo_collectives import all_to_all_single
from autopar.distributed.profiling import named_collective
from autopar.layout import Layout

__all__ = ["exchange"]


def exchange(x: torch.Tensor, axis: Axis, heads: Layout, rows: Layout, *, to_heads: bool) -> torch.Tensor:
    """Exchange rows for heads, ``[batch, heads, rows/cp, d] -> [batch, heads/cp, rows, d]``, or the reverse."""
    result: torch.Tensor = _Exchange.apply(x, axis, heads, rows, to_heads)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    @named_collective("all-to-all: rows and heads")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, heads: Layout, rows: Layout, to_heads: bool) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.heads, ctx.rows, ctx.to_heads = axis, heads, rows, to_heads
        return _exchange(x, axis, heads, rows, to_heads)

    @staticmethod
    @single_backward
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
    run(all_to_all_single, axis, out, torch.cat(sent), sizes, [part.numel() for part in sent])
    parts = [part.view(each) for part, each in zip(out.split(sizes), received, strict=True)]
    return _summed(parts, by_taken, taken) if by_taken.replicated else by_taken.unshard(parts, taken)


def _summed(parts: list[torch.Tensor], layout: Layout, dim: int) -> torch.Tensor:
    """Put gradients together: heads that several ranks had are added up."""
    shape = list(parts[0].shape)
    shape[dim] = layout.size
    full = parts[0].new_zeros(shape)
    for rank, part in enumerate(parts):
        offset = 0
        for start, stop in layout.ranges(rank):
            full.narrow(dim, start, stop - start).add_(part.narrow(dim, offset, stop - start))
            offset += stop - start
    return full

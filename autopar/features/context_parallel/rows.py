"""Rows of the sequence over the context-parallel axis: exchanged for heads, and joined.

Where rows are exchanged for heads (the all-to-all of attention), uneven numbers of both are fine, rows in any order,
and heads that several ranks get: their gradients are added up.

Where rows are joined, every rank computes the whole behind that, and a loss is the same on all of them: in the
backward the gradients of all ranks are summed for each row. In front of it the gradient on each rank is that of its
rows: a part, which the average over ranks adds up. A value that is not a sum of parts (a penalty on gradients) cannot
be made of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.compat.tensors import PLAIN, tree_map
from autopar.distributed.autograd_functions import keep_none, named_collective, single_backward
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gather_sum, note_on_meta, reduce, run
from autopar.distributed.gloo_collectives import all_to_all_single
from autopar.layout import Block, Layout, even_shards


def heads_layout(units: int, width: int, ranks: int) -> Layout:
    """Return the layout along dim 1 of ``units`` runs of ``width`` heads each; a rank may have none."""
    return Layout.of(1, [Block("heads", units, width, even_shards(units, ranks))])


def keys_layout(queries: Layout, kv_heads: int) -> Layout:
    """Return the KV heads that each rank's heads of ``queries`` look at, where the ranks are more than KV heads are.

    >>> keys_layout(heads_layout(6, 1, 4), 2).ranges(1)  # heads 2 and 3, of groups of three
    ((0, 2),)
    """
    each = queries.size // kv_heads
    held = [next(iter(queries.ranges(rank)), (0, 0)) for rank in range(queries.axis_size)]
    needed = tuple((low // each, -(-high // each)) if low < high else (0, 0) for low, high in held)
    return Layout.of(1, [Block("heads", kv_heads, 1, needed)])


def exchange(x: torch.Tensor, axis: Axis, heads: Layout, rows: Layout, *, to_heads: bool) -> torch.Tensor:
    """Exchange rows for heads, ``[batch, heads, rows/cp, d] -> [batch, heads/cp, rows, d]``, or the reverse."""
    return _Exchange.apply(x, axis, heads, rows, to_heads)


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
    if axis.group is None:
        note_on_meta("all_to_all_single", x, [sum(math.prod(each) for each in received)])
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


def join(x: torch.Tensor, axis: Axis, dim: int, rows: Layout) -> torch.Tensor:
    """Gather rows along ``dim``, ``[..., rows/cp, ...] -> [..., rows, ...]``.

    Raises:
        ConfigError: in a backward that is to be differentiated.
    """
    if x.requires_grad and torch.is_grad_enabled():
        x = _Parts.apply(x)
    return gather_sum(x, axis, dim, rows)


def entered(values: Any, axis: Axis) -> Any:
    """Return what the model is given, so that tensors which want a gradient get the whole one, on every rank."""

    def whole(x: Any) -> Any:
        wants = type(x) in PLAIN and x.requires_grad and torch.is_grad_enabled()
        return _Entered.apply(x, axis) if wants else x

    return tree_map(whole, values)


class _Entered(torch.autograd.Function):
    """In front of it gradients are those of the whole, behind it parts of them, as large as an average needs them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @named_collective("all-reduce: gradient of what the model is given")
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce(grad, ctx.axis) / ctx.axis.size, None


class _Parts(torch.autograd.Function):
    """Behind it gradients are those of the whole, in front of it parts of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        keep_none(ctx)
        return x.view_as(x)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad

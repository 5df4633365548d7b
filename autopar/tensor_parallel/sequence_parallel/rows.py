"""Rows of the sequence: dim 1 of ``[batch, seq, hidden]``, or both dims flattened, over the tensor-parallel ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import copy, even_layout, gather, gather_sum, reduce_scatter, scatter
from autopar.layout import Layout

__all__ = ["enter_rows", "gather_rows", "own_rows", "rows_of", "sum_to_rows", "take_rows"]


@functools.lru_cache(maxsize=4096)
def rows_of(length: int, ranks: int) -> Layout | None:
    """Return which rows of a sequence each rank has; None: it is shorter than the ranks are many, all have it whole."""
    return even_layout(length, ranks, 1) if length >= ranks else None


def gather_rows(x: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Gather ``[batch, seq/tp, ...] -> [batch, seq, ...]``; backward keeps this rank's rows."""
    return _unflattened(x, rows.local_size(axis.rank), lambda y: gather(y, axis, rows, 1))


def enter_rows(x: torch.Tensor, gathered: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Return what :func:`gather_rows` made of ``x``, for a sharded region; backward is a reduce-scatter."""
    if x.ndim != 2:
        return gather_sum(x, axis, 1, rows, gathered)
    x, gathered = x.unflatten(0, (-1, rows.local_size(axis.rank))), gathered.unflatten(0, (-1, rows.size))
    return gather_sum(x, axis, 1, rows, gathered).flatten(0, 1)


def own_rows(x: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Keep this rank's rows, ``[batch, seq, ...] -> [batch, seq/tp, ...]``; backward gathers."""
    return _unflattened(x, rows.size, lambda y: scatter(y, axis, rows, 1))


def sum_to_rows(x: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Sum ``[batch, seq, ...]`` over the ranks, ``[batch, seq/tp, ...]`` each; backward gathers."""
    return _unflattened(x, rows.size, lambda y: reduce_scatter(y, axis, 1, rows))


def take_rows(x: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Return :func:`own_rows` of a tensor beside hidden states; of ``[batch, 1, ...]``, the same for all rows, itself.

    The gradient of that one is summed.
    """
    return copy(x, axis) if x.shape[1] == 1 else own_rows(x, axis, rows)


def _unflattened(x: torch.Tensor, length: int, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Change ``[batch, length, ...]``, also where batch and length are one dim: ``[batch * length, features]``."""
    y = x.unflatten(0, (-1, length)) if x.ndim == 2 else x
    if y.shape[1] != length:
        raise ValueError(f"a sequence of {length} rows is expected here in dim 1 of {list(x.shape)}")
    return change(y).flatten(0, 1) if x.ndim == 2 else change(y)

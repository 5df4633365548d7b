"""Rows of the sequence between the regions of a model, and those that layers of a region save.

Rows are dim 1 of ``[batch, seq, hidden]``, or of both dims flattened, over the tensor-parallel ranks. A column-parallel
layer saves rows of its input for its weight's gradient, and gathers them again in the backward. Nothing stays of the
full sequence that it multiplied, ``[batch, seq, in]``: the layer itself sees a detached weight, whose gradient is
computed by a function next to it (as in :mod:`autopar.tensor_parallel.regions`). Layers that read the same sequence
gather it once. Megatron-LM has one function for a layer (core/tensor_parallel/layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.compat.tensors import version_of
from autopar.distributed.autograd_functions import any_order, keep_none, named_collective
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather, copy, gather, gather_sum, reduce_, reduce_scatter, scatter
from autopar.layout import Layout
from autopar.tensor_parallel.regions import Late, LateWeight, WeightGradient


def gather_rows(x: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Gather ``[batch, seq/tp, ...] -> [batch, seq, ...]``; backward keeps this rank's rows."""
    return _unflattened(x, rows.local_size(axis.rank), lambda y: gather(y, axis, rows, 1))


def _enter_rows(x: torch.Tensor, gathered: torch.Tensor | None, axis: Axis, rows: Layout) -> torch.Tensor:
    """Return the result of :func:`gather_rows` for a sharded region; backward is a reduce-scatter."""
    known = gathered if gathered is None or x.ndim != 2 else gathered.unflatten(0, (-1, rows.size))
    return _unflattened(x, rows.local_size(axis.rank), lambda y: gather_sum(y, axis, 1, rows, known))


def own_rows(x: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Keep this rank's rows, ``[batch, seq, ...] -> [batch, seq/tp, ...]``; backward gathers."""
    return _unflattened(x, rows.size, lambda y: scatter(y, axis, rows, 1))


def take_rows(x: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Return :func:`own_rows` of another tensor. One row for all, ``[batch, 1, ...]``, stays: gradients add up."""
    return copy(x, axis) if x.shape[1] == 1 else own_rows(x, axis, rows)


def _unflattened(x: torch.Tensor, length: int, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Change ``[batch, length, ...]``, also with one dim for both: ``[batch * length, features]``."""
    y = x.unflatten(0, (-1, length)) if x.ndim == 2 else x
    if y.shape[1] != length:
        raise ValueError(f"a sequence of {length} rows is expected here in dim 1 of {list(x.shape)}")
    return change(y).flatten(0, 1) if x.ndim == 2 else change(y)


class Rows(NamedTuple):
    """The rows that a block computes with, as regions know them (``Region.rows``); ``training``: mode of the block."""

    axis: Axis
    layout: Layout
    training: bool

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the output of a region, ``[batch, seq, ...]``, over the ranks, ``[batch, seq/tp, ...]`` each."""
        return _unflattened(x, self.layout.size, lambda y: reduce_scatter(y, self.axis, 1, self.layout))


class Entered:
    """A full sequence that entered a region, ``[batch, seq, in]`` or both dims flattened, and this rank's rows."""

    def __init__(self, whole: torch.Tensor, rows: torch.Tensor, axis: Axis, layout: Layout) -> None:
        self.whole, self.rows, self.version = whole, rows, version_of(whole)
        self.inside: torch.Tensor | None = None  # the tensor that layers of the region read
        self._again = _Again(axis, layout)

    def is_full(self, x: torch.Tensor) -> bool:
        """Return whether ``x`` is the sequence, unchanged."""
        return self.whole is x and version_of(x) == self.version

    def late_weight(self, weight: torch.Tensor, gradient: WeightGradient) -> Late:
        """Return the gradient of a layer's weight, to attach to the layer's output."""
        self._again.readers += 1
        tokens = self.whole.shape[:-1].numel()
        made = LateWeight.apply(weight, self.rows.detach(), tokens, gradient, self._again.tokens)
        return Late(gradient, self._again.entered, made, weight, self.rows)

    def enter(self) -> torch.Tensor:
        """Return the tensor that layers of the region read: their gradient is reduce-scattered once."""
        if self.inside is None:
            self.inside = _enter_rows(self.rows, self.whole.detach(), self._again.axis, self._again.layout)
        return self.inside


class _Again:
    """The sequence gathered in the backward, while layers still want it. Holds no activation in the forward."""

    def __init__(self, axis: Axis, layout: Layout) -> None:
        self.axis, self.layout = axis, layout
        self.readers = self.done = 0
        self._tokens: torch.Tensor | None = None

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather ``[tokens, in]``, once for all readers."""
        tokens = self._tokens
        if tokens is None:
            own = self.layout.local_size(self.axis.rank)
            tokens = _unflattened(rows, own, lambda y: _gather(y, self.axis, self.layout)).flatten(0, -2)
            self._tokens = tokens
        self.done += 1
        if self.done == self.readers:
            self.done, self._tokens = 0, None
        return tokens

    def entered(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather ``[tokens, in]`` as it enters the region, differentiable."""
        return _enter_rows(rows, None, self.axis, self.layout).flatten(0, -2)


@named_collective("all-gather: rows that a weight's gradient reads")
def _gather(rows: torch.Tensor, axis: Axis, layout: Layout) -> torch.Tensor:
    return all_gather(rows, axis, layout, 1)


# -- parameters that work on rows ----------------------------------------------------------------------------------
#
# Their gradients, of each rank's rows, are summed over the ranks. Summed is the incoming gradient, not the accumulated
# one, so that micro-batches add up; once for all such parameters of a block: they enter the block through one function,
# whose backward runs when the gradients of all of them are there.


class _SumRows(torch.autograd.Function):
    keeps_nothing = True

    @staticmethod
    def forward(ctx: Any, axis: Axis, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keep_none(ctx)
        ctx.axis = axis
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @named_collective("all-reduce: gradients of parameters that work on rows of the sequence")
    @any_order(lambda ctx, *gradients: (None, *sum_flat(gradients, ctx.axis)))
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, *sum_flat(gradients, ctx.axis)


def sum_flat(tensors: Sequence[torch.Tensor | None], axis: Axis) -> list[torch.Tensor | None]:
    """Sum tensors over the axis in one all-reduce for each dtype, out of place; all ranks have the same ones."""
    found: list[torch.Tensor | None] = [None] * len(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors if x is not None):
        chosen = [(place, x) for place, x in enumerate(tensors) if x is not None and x.dtype == dtype]
        flat = reduce_(torch.cat([x.reshape(-1) for _, x in chosen]), axis)
        for (place, x), part in zip(chosen, flat.split([x.numel() for _, x in chosen]), strict=True):
            found[place] = part.view_as(x)
    return found


def summed_over_rows(parameters: Sequence[nn.Parameter], axis: Axis) -> list[torch.Tensor]:
    """Return the tensor that a forward with rows uses for each parameter: its gradient is summed over the axis."""
    trained = {id(p): p for p in parameters if p.requires_grad} if torch.is_grad_enabled() else {}
    used = dict(zip(trained, _SumRows.apply(axis, *trained.values()), strict=True)) if trained else {}
    return [used.get(id(p), p) for p in parameters]

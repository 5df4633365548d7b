"""Rows of the sequence between the regions of a model, and rows that the layers of a region save.

The tensor-parallel ranks shard dim 1 of ``[batch, seq, hidden]``, also with both dims flattened. A column-parallel
layer saves its rows of the input for the weight gradient, and gathers the sequence again in the backward pass. Autograd
does not save the full input ``[batch, seq, in]``: the layer sees a detached weight, and a separate function computes
the weight's gradient (see :mod:`autopar.tensor_parallel.regions`). Layers that read the same sequence gather it once.
Megatron-LM has one function per layer instead (core/tensor_parallel/layers.py).
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
    """Gather ``[batch, seq/tp, ...] -> [batch, seq, ...]``; the backward keeps this rank's rows."""
    return _unflattened(x, rows.local_size(axis.rank), lambda y: gather(y, axis, rows, 1))


def _enter_rows(x: torch.Tensor, gathered: torch.Tensor | None, axis: Axis, rows: Layout) -> torch.Tensor:
    """Gather rows as :func:`gather_rows` does, for a sharded region: the backward is a reduce-scatter."""
    known = gathered if gathered is None or x.ndim != 2 else gathered.unflatten(0, (-1, rows.size))
    return _unflattened(x, rows.local_size(axis.rank), lambda y: gather_sum(y, axis, 1, rows, known))


def own_rows(x: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Keep this rank's rows, ``[batch, seq, ...] -> [batch, seq/tp, ...]``; the backward gathers."""
    return _unflattened(x, rows.size, lambda y: scatter(y, axis, rows, 1))


def sum_gradients(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return a copy of a replicated tensor that works on rows; the backward sums its gradients."""
    return copy(x, axis)


def take_rows(x: torch.Tensor, axis: Axis, rows: Layout) -> torch.Tensor:
    """Keep this rank's rows of ``x``; a single row for all positions, ``[batch, 1, ...]``, stays and sums gradients."""
    return sum_gradients(x, axis) if x.shape[1] == 1 else own_rows(x, axis, rows)


def _unflattened(x: torch.Tensor, length: int, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply ``change`` to ``[batch, length, ...]``, or to ``[batch * length, features]`` with the dims split."""
    y = x.unflatten(0, (-1, length)) if x.ndim == 2 else x
    if y.shape[1] != length:
        raise ValueError(f"expected a sequence of {length} rows in dim 1, got shape {list(x.shape)}")
    return change(y).flatten(0, 1) if x.ndim == 2 else change(y)


class Rows(NamedTuple):
    """The rows of the running block, for its regions (``Region.rows``).

    Attributes:
        layouts: Layout of the hidden states' rows, and of each further stream of another length.
        training: Mode of the block.
    """

    axis: Axis
    layouts: tuple[Layout, ...]
    training: bool = False

    def of_full(self, x: torch.Tensor) -> Layout:
        """Return the layout for a full sequence."""
        return next((each for each in self.layouts if x.ndim > 2 and each.size == x.shape[1]), self.layouts[0])

    def of_rows(self, x: torch.Tensor) -> Layout:
        """Return the layout of this rank's rows; no two layouts have as many of them."""
        own = ((each, each.local_size(self.axis.rank)) for each in self.layouts)
        return next((each for each, size in own if x.ndim > 2 and size == x.shape[1]), self.layouts[0])

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter the output of a region, ``[batch, seq, ...] -> [batch, seq/tp, ...]``."""
        layout = self.of_full(x)
        return _unflattened(x, layout.size, lambda y: reduce_scatter(y, self.axis, 1, layout))


class Entered:
    """A full sequence at the start of a region, ``[batch, seq, in]`` or ``[batch * seq, in]``, and its local rows."""

    def __init__(self, full: torch.Tensor, rows: torch.Tensor, axis: Axis, layout: Layout) -> None:
        self.full, self.rows, self.version = full, rows, version_of(full)
        self.inside: torch.Tensor | None = None  # the tensor that layers of the region read
        self._again = _Again(axis, layout)

    def is_full(self, x: torch.Tensor) -> bool:
        """Return whether ``x`` is the full sequence, not changed in place."""
        return self.full is x and version_of(x) == self.version

    def late_weight(self, weight: torch.Tensor, gradient: WeightGradient) -> Late:
        """Return the weight-gradient function of a layer, to attach to the layer's output."""
        self._again.readers += 1
        tokens = self.full.shape[:-1].numel()
        made = LateWeight.apply(weight, self.rows.detach(), tokens, gradient, self._again.tokens)
        return Late(gradient, self._again.entered, made, weight, self.rows)

    def enter(self) -> torch.Tensor:
        """Return the input for the layers of the region; its gradient is reduce-scattered once."""
        if self.inside is None:
            self.inside = _enter_rows(self.rows, self.full.detach(), self._again.axis, self._again.layout)
        return self.inside


class _Again:
    """The sequence gathered in the backward pass, kept until its last reader is done. Empty in the forward pass."""

    def __init__(self, axis: Axis, layout: Layout) -> None:
        self.axis, self.layout = axis, layout
        self.readers = self.done = 0
        self._tokens: torch.Tensor | None = None

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather ``[tokens, in]`` once for all readers."""
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
        """Gather ``[tokens, in]`` differentiably, as at the start of the region."""
        return _enter_rows(rows, None, self.axis, self.layout).flatten(0, -2)


@named_collective("all-gather: rows that a weight's gradient reads")
def _gather(rows: torch.Tensor, axis: Axis, layout: Layout) -> torch.Tensor:
    return all_gather(rows, axis, layout, 1)


# -- parameters that work on rows ----------------------------------------------------------------------------------
#
# Each rank computes their gradients from its rows, and the ranks sum these gradients: the incoming one, not ``.grad``,
# so that micro-batches accumulate. All such parameters of a block pass through one function. Its backward runs after
# all their gradients are computed, so one all-reduce is enough.


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
    """Sum tensors over the axis out of place, with one all-reduce per dtype; all ranks must pass the same list."""
    found: list[torch.Tensor | None] = [None] * len(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors if x is not None):
        chosen = [(place, x) for place, x in enumerate(tensors) if x is not None and x.dtype == dtype]
        flat = reduce_(torch.cat([x.reshape(-1) for _, x in chosen]), axis)
        for (place, x), part in zip(chosen, flat.split([x.numel() for _, x in chosen]), strict=True):
            found[place] = part.view_as(x)
    return found


def summed_over_rows(parameters: Sequence[nn.Parameter], axis: Axis) -> list[torch.Tensor]:
    """Return the parameters for a forward with rows, as tensors whose gradients are summed over the axis."""
    trained = {id(p): p for p in parameters if p.requires_grad} if torch.is_grad_enabled() else {}
    used = dict(zip(trained, _SumRows.apply(axis, *trained.values()), strict=True)) if trained else {}
    return [used.get(id(p), p) for p in parameters]

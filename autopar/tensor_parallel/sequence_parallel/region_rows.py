"""State of a region while a block computes with rows of the sequence, and the rows that its layers save.

A column-parallel layer saves rows of its input for its weight's gradient, and gathers them again in the backward. Of
the whole sequence that it multiplied, ``[batch, seq, in]``, nothing stays: the layer itself sees a detached weight,
whose gradient is computed by a function beside it (as in :mod:`autopar.tensor_parallel.overlap`). Layers that read the
same sequence gather it once. Megatron-LM has one function for a layer (core/tensor_parallel/layers.py).
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.distributed.derivatives import is_watched, keep_none, single_backward
from autopar.distributed.profiling import named_collective
from autopar.foreign.autograd import is_forward_mode
from autopar.foreign.tensors import version_of
from autopar.layout import Layout
from autopar.tensor_parallel.overlap import WeightGradient
from autopar.tensor_parallel.sequence_parallel.rows import enter_rows, gather_rows

__all__ = ["Entered", "RowsOfRegion", "can_save_rows"]


def can_save_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the gradient of ``weight`` can be computed from rows of ``x``, beside the layer."""
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and type(x) is torch.Tensor
        and x.dtype == weight.dtype
        and not torch.compiler.is_compiling()
        and (x.is_meta or not torch.is_autocast_enabled(x.device.type))
        and not is_forward_mode()
        and not is_watched(x)
    )


class Entered:
    """A whole sequence that entered a region, and its rows.

    Attributes:
        whole: ``[batch, seq, in]``, or both dims flattened.
        rows: this rank's.
        inside: what layers of the region read; None before the first does.
    """

    def __init__(self, whole: torch.Tensor, rows: torch.Tensor, axis: Axis, layout: Layout) -> None:
        self.whole, self.rows, self.version = whole, rows, version_of(whole)
        self.inside: torch.Tensor | None = None
        self._again = _Again(axis, layout)

    def is_whole(self, x: torch.Tensor) -> bool:
        """Return whether ``x`` is the sequence, unchanged."""
        return self.whole is x and version_of(x) == self.version

    def late_weight(self, weight: torch.Tensor, gradient: WeightGradient) -> torch.Tensor:
        """Return what a layer attaches to its output, ``[tokens, out/tp]`` without memory: its weight's gradient."""
        self._again.readers += 1
        rows = self.rows.detach()
        tokens = self.whole.shape[:-1].numel()
        made: torch.Tensor = _WeightOfRows.apply(weight, rows, tokens, gradient, self._again)
        return made


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
            if rows.ndim == 2:
                rows = rows.unflatten(0, (-1, self.layout.local_size(self.axis.rank)))
            tokens = self._tokens = _gather(rows, self.axis, self.layout).flatten(0, -2)
        self.done += 1
        if self.done == self.readers:
            self.done, self._tokens = 0, None
        return tokens


@named_collective("all-gather: rows that a weight's gradient reads")
def _gather(rows: torch.Tensor, axis: Axis, layout: Layout) -> torch.Tensor:
    return all_gather(rows, axis, layout, 1)


class _WeightOfRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rows: torch.Tensor, tokens: int, gradient: WeightGradient, again: _Again
    ) -> torch.Tensor:
        keep_none(ctx)
        ctx.gradient, ctx.again = gradient, again
        ctx.save_for_backward(rows)
        return weight.new_empty(()).expand(tokens, weight.shape[gradient.out_dim])

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (rows,) = ctx.saved_tensors
        return ctx.gradient.of(ctx.again.tokens(rows), grad), None, None, None, None


class RowsOfRegion(ABC):
    """Base of a region: rows of the sequence between regions, in sequence parallelism.

    Attributes:
        rows: which rows each rank has; None: whole sequences are computed with.
        rows_of_parameters: id of a parameter -> what rows are computed with instead.
        rows_are_out: whether a list of blocks has begun with rows, and its last block has not run.
        row_tensors: id -> hidden states that are rows, and what makes them whole.
    """

    axis: Axis
    tracking: Any

    def __init__(self) -> None:
        self._entered: Entered | None = None
        self._training = False
        self.row_tensors: dict[int, tuple[weakref.ref[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {}
        self.forget_rows()

    def forget_rows(self) -> None:
        """Compute with whole sequences again, whatever an interrupted forward left behind."""
        self.rows: Layout | None = None
        self.rows_are_out = False
        self.rows_of_parameters: Mapping[int, torch.Tensor] = {}
        self.row_tensors.clear()

    @abstractmethod
    def release(self) -> None:
        """Release the references to activations."""

    @abstractmethod
    def draw_per_rank(self, training: bool) -> None:
        """Draw differently on each rank."""

    @abstractmethod
    def draw_alike(self) -> None:
        """Draw the same on all ranks again."""

    @abstractmethod
    def outside(self) -> AbstractContextManager[None]:
        """Draw the same on all ranks, then as before."""

    @abstractmethod
    def mark_replicated(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, which is replicated from here on."""

    @contextlib.contextmanager
    def on_rows(self, rows: Layout, parameters: Mapping[int, torch.Tensor], training: bool) -> Iterator[None]:
        """Compute with rows of the sequence between regions: each rank has its own, and draws by itself.

        Args:
            parameters: id -> what stands for a parameter that works on rows.
        """
        self.rows, self.rows_of_parameters, self._training = rows, parameters, training
        self.draw_per_rank(training)
        try:
            yield
        finally:
            self.rows, self.rows_of_parameters = None, {}
            self.draw_alike()
            self.release()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Compute with whole sequences inside :meth:`on_rows`, as without it."""
        rows, parameters = self.rows, self.rows_of_parameters
        self.rows, self.rows_of_parameters = None, {}
        try:
            with self.outside():
                yield
        finally:
            self.rows, self.rows_of_parameters = rows, parameters
            self.release()

    def enter_whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather the sequence, ``[batch, seq/tp, hidden] -> [batch, seq, hidden]``, for a region and what precedes it.

        The gradient of what :meth:`enter` makes of it is reduce-scattered; of any other, which is whole, the own rows
        are kept.
        """
        assert self.rows is not None
        x = gather_rows(rows, self.axis, self.rows)
        if self.tracking is not None:
            return self.mark_replicated(x)
        self.draw_alike()
        if x.requires_grad and torch.is_grad_enabled():
            self._entered = Entered(x, rows, self.axis, self.rows)
        return x

    def _enter_rows(self, entered: Entered, rows: Layout) -> torch.Tensor:
        if entered.inside is None:
            entered.inside = enter_rows(entered.rows, entered.whole.detach(), self.axis, rows)
        return entered.inside

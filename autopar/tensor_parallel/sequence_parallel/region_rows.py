"""State of a region while a block computes with rows of the sequence."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from autopar.distributed.axis import Axis
from autopar.layout import Layout
from autopar.tensor_parallel.sequence_parallel.rows import enter_rows, gather_rows
from autopar.tensor_parallel.sequence_parallel.saved_rows import Entered

__all__ = ["RowsOfRegion"]


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

"""The door of a list of blocks: hidden states enter the first block as rows of the sequence and leave the last whole.

Masks, positions and rotary angles stay whole: regions see whole sequences. A later pipeline stage runs the door of the
first block too, whose output is what the stage received: rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from autopar.layout import Layout
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sequence_parallel.borders import change_first, change_named, change_output
from autopar.tensor_parallel.sequence_parallel.hidden_states import note_rows
from autopar.tensor_parallel.sequence_parallel.parameters import summed_over_rows
from autopar.tensor_parallel.sequence_parallel.rows import gather_rows, own_rows, rows_of

__all__ = ["RowsBlock", "RowsOfList"]


class RowsOfList:
    """The rows in which a list of blocks computes now; None: whole sequences.

    Args:
        inputs: names of arguments of the blocks, besides hidden states, of which rows are taken.
    """

    def __init__(self, region: Region, inputs: tuple[str, ...] = ()) -> None:
        self.region, self.inputs = region, inputs
        self.rows: Layout | None = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Note the length of a sequence, ``[batch, seq, hidden]``; return its rows."""
        self.rows = rows_of(x.shape[1], self.region.axis.size)
        if self.rows is None:
            return x
        return self.made(self.take(x))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of ``[batch, seq, ...]``."""
        assert self.rows is not None
        return self.region.mark_rows(own_rows(x, self.region.axis, self.rows))

    def made(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, rows that the model may collect."""
        assert self.rows is not None
        return note_rows(x, self.region, functools.partial(self.leave, rows=self.rows))

    def leave(self, x: torch.Tensor, rows: Layout | None = None) -> torch.Tensor:
        """Return the whole sequence of which ``x``, ``[batch, seq/tp, hidden]``, is rows."""
        rows = rows or self.rows
        assert rows is not None
        return self.region.mark_replicated(gather_rows(x, self.region.axis, rows))


class RowsBlock:
    """Class before that of a block."""

    rows_list: RowsOfList
    rows_ends: tuple[bool, bool]  # whether it is the first block of its list, and the last
    rows_parameters: tuple[tuple[nn.Module, str], ...]  # that work on rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of, (first, last) = self.rows_list, self.rows_ends
        if first:
            args, kwargs = change_first(self, args, kwargs, of.enter)
        if of.rows is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if of.inputs:
            args, kwargs = change_named(self, of.inputs, args, kwargs, of.take)
        output = super().__call__(*args, **kwargs, autopar_rows=of.rows)  # type: ignore[misc]
        output = change_output(output, of.made)
        return change_output(output, of.leave) if last else output

    def forward(self, *args: Any, autopar_rows: Layout | None = None, **kwargs: Any) -> Any:
        """Compute with rows; activation checkpointing calls it a second time, without the door."""
        if autopar_rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        region = self.rows_list.region
        parameters = summed_over_rows([owner._parameters[name] for owner, name in self.rows_parameters], region.axis)
        with region.on_rows(autopar_rows, parameters, self.training):  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]

"""The boundaries of a list of blocks: hidden states enter the first one as rows of the sequence, leave the last whole.

Masks, positions and rotary angles stay whole: regions see whole sequences. A later pipeline stage runs that of the
first block too, whose output is what the stage received: rows.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.foreign.modules import own_parameters
from autopar.foreign.tensors import tree_leaves
from autopar.layout import Layout
from autopar.plan.sequence import SequencePlan
from autopar.tensor_parallel.hooks import Hook
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sequence_parallel.borders import (
    argument_names,
    change_first,
    change_named,
    change_output,
)
from autopar.tensor_parallel.sequence_parallel.parameters import summed_over_rows
from autopar.tensor_parallel.sequence_parallel.rows import gather_rows, own_rows, rows_of, take_rows

__all__ = ["Arguments", "RowsBlock", "RowsOfList"]

# Arguments that say nothing about what rows are computed with.
_OF_BLOCKS = frozenset(
    (
        *("attention_mask", "position_ids", "cache_position", "past_key_values", "past_key_value", "layer_past"),
        *("head_mask", "layer_head_mask", "use_cache", "position_embeddings", "encoder_attention_mask"),
    )
)
_OF_MODELS = _OF_BLOCKS | {
    *("input_ids", "inputs_embeds", "token_type_ids", "labels", "num_items_in_batch"),
    *("encoder_hidden_states", "decoder_input_ids", "decoder_attention_mask"),
}


def _unknown(known: frozenset[str], module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what a module gets under names that are not known, besides its first argument."""
    names = argument_names(module)
    given = [*zip(names, args, strict=False), *kwargs.items()]
    return tree_leaves([value for name, value in given if name not in known and name != names[0]])


def _has_tensor(values: list[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


class RowsOfList:
    """The rows in which a list of blocks computes now; None: whole sequences.

    Args:
        plan: which arguments of blocks are taken by rows, and which are known from the dry run.

    Attributes:
        between: whether hidden states are whole between the blocks.
        stays_whole: whether sequences are not sharded at all: the model is to return what its routers make of rows.
    """

    def __init__(self, region: Region, plan: SequencePlan) -> None:
        self.region, self.inputs = region, plan.inputs
        self.known = _OF_BLOCKS | set(plan.given)
        self.rows: Layout | None = None
        self.between = self.stays_whole = False
        self.routers_whole = plan.routers_whole

    def note_length(self, x: torch.Tensor) -> torch.Tensor:
        """Note the length of a sequence, ``[batch, seq, hidden]``; returns it."""
        self.rows = None if self.stays_whole else rows_of(x.shape[1], self.region.axis.size)
        self.region.rows_are_out = self.rows is not None
        return x

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of ``[batch, seq, hidden]``."""
        assert self.rows is not None
        return self.made(self.region.mark_rows(own_rows(x, self.region.axis, self.rows)))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of ``[batch, seq, ...]``, a tensor beside hidden states."""
        assert self.rows is not None
        return self.region.mark_rows(take_rows(x, self.region.axis, self.rows))

    def made(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, rows that the model may collect."""
        assert self.rows is not None
        self.region.row_tensors[id(x)] = (weakref.ref(x), functools.partial(self.leave, rows=self.rows))
        return x

    def leave(self, x: torch.Tensor, rows: Layout | None = None) -> torch.Tensor:
        """Return the whole sequence of which ``x``, ``[batch, seq/tp, hidden]``, is rows."""
        rows = rows or self.rows
        assert rows is not None
        return self.region.mark_replicated(gather_rows(x, self.region.axis, rows))


class Arguments(Hook):
    """Forward pre-hook of the model around a list of blocks: whether its code may read what is between them.

    It got something that the dry run did not give: images, whose features some models add between the first blocks.

    Args:
        seen: names of arguments that the dry run gave.
    """

    def __init__(self, of: RowsOfList, seen: Iterable[str]) -> None:
        self.of, self.known = of, _OF_MODELS | set(seen)

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        of = self.of
        others = _unknown(self.known, model, args, kwargs)
        of.rows = None  # until the first block
        of.between = _has_tensor(others) or any(type(value) is int and value != 0 for value in others)
        name = "output_router_logits"
        of.stays_whole = not of.routers_whole and bool(kwargs.get(name, getattr(model.config, name, False)))


class RowsBlock:
    """Class before that of a block."""

    rows_list: RowsOfList
    rows_ends: tuple[bool, bool]  # whether it is the first block of its list, and the last
    rows_parameters: tuple[tuple[nn.Module, str], ...]  # that work on rows

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of, (first, last) = self.rows_list, self.rows_ends
        comes_whole = first or (of.between and of.rows is not None)
        leaves_whole = last or of.between
        if comes_whole:
            change_first(self, args, kwargs, of.note_length)
        if of.rows is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if _has_tensor(_unknown(of.known, self, args, kwargs)):  # the dry run has not seen what it does with them
            if not comes_whole:
                args, kwargs = change_first(self, args, kwargs, of.leave)
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
            of.region.rows_are_out &= not leaves_whole
            return output if leaves_whole else change_output(output, of.enter)
        if comes_whole:
            args, kwargs = change_first(self, args, kwargs, of.enter)
        if of.inputs:
            args, kwargs = change_named(self, of.inputs, args, kwargs, of.take)
        output = super().__call__(*args, **kwargs, autopar_rows=of.rows)  # type: ignore[misc]
        output = change_output(output, of.made)
        of.region.rows_are_out &= not leaves_whole
        return change_output(output, of.leave) if leaves_whole else output

    def forward(self, *args: Any, autopar_rows: Layout | None = None, **kwargs: Any) -> Any:
        """Compute with rows; activation checkpointing calls it a second time, without the boundary."""
        if autopar_rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        region = self.rows_list.region
        parameters = summed_over_rows(
            [own_parameters(owner)[name] for owner, name in self.rows_parameters], region.axis
        )
        with region.on_rows(autopar_rows, parameters, self.training):  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]

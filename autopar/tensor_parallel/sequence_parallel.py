"""Sequence parallelism of one model: where rows of the sequence begin and end, around blocks and inside of them.

Hidden states enter the first block as rows of the sequence and leave the last whole. Masks, positions and rotary angles
stay whole: regions see whole sequences. A later pipeline stage runs the boundary of the first block too, whose output
is what the stage received: rows.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.foreign.tensors import own_parameters, tree_leaves
from autopar.foreign.transformers import CACHES
from autopar.layout import Layout
from autopar.plan.matching import around
from autopar.swap import swap, unswap
from autopar.tensor_parallel.hooks import Hook
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sequence_rows import (
    ReadByRows,
    gather_rows,
    own_rows,
    reader_class,
    rows_of,
    summed_over_rows,
    take_rows,
)


@dataclass(frozen=True)
class SequencePlan:
    """The parts of each block that see rows of the sequence (Korthikanti et al. 2022).

    Attributes:
        lists: paths of the blocks, in forward order; of an encoder-decoder model two lists.
        entries: paths of modules whose input is gathered; their region's output is summed into rows.
        wholes: paths of modules that compute with whole sequences, from input to output.
        inputs: names of other arguments of blocks, ``[batch, seq, ...]``, of which each rank's rows are taken.
        seen: names of arguments, of the models around the blocks, that the dry run gave: with others their code may
            read hidden states between the blocks, which are whole there then.
        given: names of arguments that blocks got there; with others a block computes with whole sequences.
        routers_whole: whether what routers return, for a loss that balances experts, is that of whole sequences.
        parameters: block -> names of replicated parameters that work on rows.
    """

    lists: tuple[tuple[str, ...], ...]
    entries: tuple[str, ...] = ()
    wholes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    routers_whole: bool = True
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


# Arguments that say nothing about what rows are computed with.
_OF_BLOCKS = frozenset(
    (
        *("attention_mask", "position_ids", "cache_position", *CACHES),
        *("head_mask", "layer_head_mask", "use_cache", "position_embeddings", "encoder_attention_mask"),
    )
)
_OF_MODELS = _OF_BLOCKS | {
    *("input_ids", "inputs_embeds", "token_type_ids", "labels", "num_items_in_batch"),
    *("encoder_hidden_states", "decoder_input_ids", "decoder_attention_mask"),
}


def _unknown(known: frozenset[str], module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what a module gets under names that are not known, besides its first argument."""
    given, first = given_by_name(module, args, kwargs), argument_names(module)[0]
    return tree_leaves([value for name, value in given if name not in known and name != first])


def _has_tensor(values: list[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


class RowsOfList:
    """The rows in which a list of blocks computes now; None: whole sequences.

    Args:
        plan: which arguments of blocks are taken by rows, and which are known from the dry run.

    Attributes:
        batch: sequences in the batch.
        between: whether hidden states are whole between the blocks.
        stays_whole: whether sequences are not sharded at all: the model is to return what its routers make of rows.
    """

    def __init__(self, region: Region, plan: SequencePlan) -> None:
        self.region, self.inputs = region, plan.inputs
        self.known = _OF_BLOCKS | set(plan.given)
        self.rows: Layout | None = None
        self.batch = 0
        self.between = self.stays_whole = False
        self.routers_whole = plan.routers_whole

    def note_length(self, x: torch.Tensor) -> torch.Tensor:
        """Note the length of a sequence, ``[batch, seq, hidden]``; returns it."""
        self.rows = None if self.stays_whole else rows_of(x.shape[1], self.region.axis.size)
        self.batch = x.shape[0]
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
    rows_hooked = False  # whether hooks inside see whole sequences, and their gradients

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of, (first, last) = self.rows_list, self.rows_ends
        comes_whole = first or (of.between and of.rows is not None)
        leaves_whole = last or of.between
        if comes_whole:
            change_first(self, args, kwargs, of.note_length)
        if of.rows is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        # The dry run has not seen what the block does with other tensors, nor do hooks get gradients of own rows.
        if self.rows_hooked or _has_tensor(_unknown(of.known, self, args, kwargs)):
            if not comes_whole:
                args, kwargs = change_first(self, args, kwargs, of.leave)
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
            of.region.rows_are_out &= not leaves_whole
            return output if leaves_whole else change_output(output, of.enter)
        if comes_whole:
            args, kwargs = change_first(self, args, kwargs, of.enter)
        if of.inputs:
            taken = lambda name, x: of.take(x) if name in of.inputs and isinstance(x, torch.Tensor) else x  # noqa: E731
            args, kwargs = change_given(self, args, kwargs, taken)
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


class Entry:
    """Class before that of a module with a region: its first argument is the whole sequence, its rows leave it.

    The row-parallel layer of the region sums its output into rows, here or in a later module.
    """

    rows_region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region = self.rows_region
        if region.rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = change_first(self, args, kwargs, region.enter_whole)
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        region.leave()
        return output


class Whole:
    """Class before that of a module which mixes rows: it computes with whole sequences, as without sequence parallel.

    Its first argument is gathered, the first tensor that it returns becomes rows again.
    """

    rows_region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region = self.rows_region
        rows = region.rows
        if rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]

        def gathered(x: torch.Tensor) -> torch.Tensor:
            return region.mark_replicated(gather_rows(x, region.axis, rows))

        args, kwargs = change_first(self, args, kwargs, gathered)
        with region.whole():
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return change_output(output, lambda y: region.mark_rows(own_rows(y, region.axis, rows)))


def argument_names(module: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward."""
    kind: Any = type(module)
    return _names_of(kind)


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    while (swapped := next((each for each in kind.__mro__ if "_autopar_plain" in vars(each)), None)) is not None:
        kind = swapped._autopar_plain  # also below a class that FSDP2 has put on top
    return tuple(name for name in inspect.signature(inspect.unwrap(kind.forward)).parameters if name != "self")


def given_by_name(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the arguments of a forward and their names, in the order in which they were given."""
    names = argument_names(module)
    given = [(names[place] if place < len(names) else f"argument {place}", x) for place, x in enumerate(args)]
    return [*given, *kwargs.items()]


def change_given(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a forward, each of them changed: ``change(name, value)``."""
    values = [change(name, value) for name, value in given_by_name(module, args, kwargs)]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def change_first(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a forward of which the first one, hidden states, is changed, wherever it is given."""
    given = dict(given_by_name(module, args, kwargs))
    first = given.get(argument_names(module)[0])
    first = next(x for x in given.values() if isinstance(x, torch.Tensor)) if first is None else first
    changed = change(first)
    return change_given(module, args, kwargs, lambda _, value: changed if value is first else value)


def change_output(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return what a module returned with its first tensor changed: hidden states."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if type(output) in (tuple, list) and output and isinstance(output[0], torch.Tensor):
        changed = change(output[0])
        return output if changed is output[0] else type(output)([changed, *output[1:]])
    raise TypeError(f"a {type(output).__name__} is returned, where hidden states or a tuple of them is expected")


def apply(model: nn.Module, plan: SequencePlan, region: Region, kind: Callable[..., RowsOfList] = RowsOfList) -> None:
    """Swap the classes of blocks and of modules inside them, in place; parameters stay where they are.

    The last of all swaps: the boundaries of blocks are in front of those of pipeline stages.
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    owned = {block: tuple(_held(modules, names)) for block, names in plan.parameters.items()}
    ids = {id(own_parameters(module)[name]) for held in owned.values() for module, name in held}
    for module in modules.values():
        own = tuple(sorted(name for name, parameter in own_parameters(module).items() if id(parameter) in ids))
        if own and not isinstance(module, ReadByRows):
            module.__class__ = reader_class(type(module), own)  # type: ignore[arg-type]
            module.rows_region = region
    for path in plan.entries:
        swap(modules[path], Entry, rows_region=region)
    for path in plan.wholes:
        swap(modules[path], Whole, rows_region=region)
    for blocks in plan.lists:
        of = kind(region, plan)
        for path in around(blocks[0]):  # the Hugging Face model next around them
            if isinstance(modules[path], PreTrainedModel):
                modules[path].register_forward_pre_hook(Arguments(of, plan.seen), with_kwargs=True)
                break
        for place, path in enumerate(blocks):
            ends = (place == 0, place == len(blocks) - 1)
            swap(modules[path], RowsBlock, rows_list=of, rows_ends=ends, rows_parameters=owned.get(path, ()))


def _held(modules: Mapping[str, nn.Module], names: Iterable[str]) -> Iterator[tuple[nn.Module, str]]:
    """Yield modules and names of the parameters that this stage holds."""
    for name in names:
        path, _, own = name.rpartition(".")
        if own_parameters(modules[path]).get(own) is not None:
            yield modules[path], own


def undo(model: nn.Module, plan: SequencePlan) -> None:
    """Undo :func:`apply`, before what it came after; its hooks go with the others."""
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    for blocks in plan.lists:
        for path in blocks:
            unswap(modules[path], RowsBlock, "rows_list", "rows_ends", "rows_parameters", "rows_hooked")
    for path in plan.wholes:
        unswap(modules[path], Whole)
    for path in plan.entries:
        unswap(modules[path], Entry)
    for module in modules.values():
        if isinstance(module, ReadByRows):
            module.__class__ = type(module)._autopar_plain  # type: ignore[attr-defined]
        vars(module).pop("rows_region", None)

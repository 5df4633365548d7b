"""The step of ``initialize`` that shards and gathers rows of the sequence, at and inside blocks.

Hidden states enter the first block as rows of the sequence and leave the last block in full. Masks, positions and
rotary angles stay full, because regions see full sequences. A later pipeline stage also runs the boundary of the first
block, which then returns the rows that the stage received.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.compat.tensors import own_parameters, tree_leaves, tree_map_only
from autopar.compat.transformers import CACHES
from autopar.errors import ConfigError
from autopar.features.sequence_parallel.rows import (
    Entered,
    Rows,
    gather_rows,
    own_rows,
    sum_gradients,
    summed_over_rows,
    take_rows,
)
from autopar.layout import Layout, rows_layout
from autopar.plan.matching import around
from autopar.policy.match import is_hugging_face_model
from autopar.setup.steps import Given, Parallelized
from autopar.swap import argument_names, change_given, given_by_name, swap, unswap
from autopar.tensor_parallel.hooks import Hook
from autopar.tensor_parallel.regions import Region


def run_on_rows_between_regions(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Swap the classes of blocks after stages are cut: a rank's first block shards rows, its last gathers them."""
    plan = state.features.get("sequence_parallel")
    if plan is not None:
        apply(model, plan, SequenceState(state.region, one_stage=state.mpu.pp.size == 1))
        state.undo.append(lambda model, own: undo(model, own.features["sequence_parallel"]))


@dataclass(frozen=True)
class SequencePlan:
    """The modules and parameters of each block that see rows of the sequence (Korthikanti et al. 2022).

    Attributes:
        lists: Paths of the blocks, in forward order; two lists for an encoder-decoder model.
        entries: Paths of modules that gather their input; the output of their region is summed into rows.
        wholes: Paths of modules that compute with full sequences, from input to output.
        inputs: Names of further block arguments, ``[batch, seq, ...]``, that are sharded by rows.
        streams: Names of block arguments ``[batch, seq, features]`` with rows of their own length, such as the text of
            an image; blocks return them too.
        summed: Name of a block argument without rows that works on rows -> its shape without the batch. The ranks sum
            its gradients.
        seen: Names of arguments of the models around the blocks in the dry run. With further arguments, hidden states
            are full between the blocks, because the model's code may read them there.
        given: Names of block arguments in the dry run; with further arguments a block computes with full sequences.
        routers_whole: True if router outputs, for a load-balancing loss, have all rows.
        parameters: Block -> names of replicated parameters that work on rows.
    """

    lists: tuple[tuple[str, ...], ...]
    entries: tuple[str, ...] = ()
    wholes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    summed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seen: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    routers_whole: bool = True
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


# Arguments that do not change how a block uses rows.
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
    """Return the arguments of a module whose names are not in ``known``, except its first argument."""
    given, first = given_by_name(module, args, kwargs), argument_names(module)[0]
    return tree_leaves([value for name, value in given if name not in known and name != first])


class SequenceState:
    """Sequence parallelism of one model while its forward runs (``Region.sequence``).

    Args:
        one_stage: True if this rank has all blocks, so that the last block must run in each forward.

    Attributes:
        streams: ``SequencePlan.streams``.
        rows_are_out: True from the first block on rows until the last block of its list has run.
        made: Rows that the model may return, or that a recomputed block reads -> their list, and their layouts.
    """

    def __init__(self, region: Region, *, one_stage: bool = False) -> None:
        self.region, self.one_stage = region, one_stage
        self.streams: tuple[str, ...] = ()
        self.made: Any = WeakTensorKeyDictionary()
        self.begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceState:
        copied = memo[id(self)] = copy.copy(self)
        copied.begin()
        copied.made = WeakTensorKeyDictionary()
        copied.region = copy.deepcopy(self.region, memo)
        return copied

    def begin(self) -> None:
        """Reset the state after an interrupted forward."""
        self.rows_are_out = False

    def gathered(self, output: Any) -> Any:
        """Return the output of a model with full hidden states; a collective of the axis if it holds rows."""

        def leave(x: torch.Tensor) -> torch.Tensor:
            of, rows = self.made.get(x, (None, None))
            return x if rows is None else of.leave(x, rows)

        return tree_map_only(torch.Tensor, leave, output)

    def after_forward(self, model: nn.Module, output: Any) -> Any:
        """Return the output of a model with full hidden states; raise ConfigError if its last block did not run."""
        output = self.gathered(output) if len(self.made) else output
        if self.rows_are_out and self.one_stage:
            raise ConfigError(
                f"sequence_parallel: the last block of {type(model).__name__} did not run in this forward, so the "
                "hidden states are not gathered\n  Do not skip the last block, or set sequence_parallel: false."
            )
        return output

    @contextlib.contextmanager
    def on_rows(self, rows: Rows, places: Sequence[tuple[nn.Module, str]], training: bool) -> Iterator[None]:
        """Compute with rows of the sequence between regions; each rank has different rows and random draws.

        Args:
            places: Modules and names of parameters that work on rows; temporarily replaced by :func:`summed_over_rows`.
        """
        region, held = self.region, [own_parameters(module)[name] for module, name in places]
        region.rows = rows._replace(training=training)
        region.draw_per_rank(training)
        try:
            _put(places, summed_over_rows(held, region.axis))
            yield
        finally:
            _put(places, held)
            region.rows = None
            region.draw_alike()
            region.release()

    @contextlib.contextmanager
    def full_sequences(self) -> Iterator[None]:
        """Compute with full sequences inside :meth:`on_rows`."""
        region, rows = self.region, self.region.rows
        region.rows = None
        try:
            with region.outside():
                yield
        finally:
            region.rows = rows
            region.release()

    def enter_full(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather ``[batch, seq/tp, hidden] -> [batch, seq, hidden]`` for a region and the code before it.

        The backward reduce-scatters the gradient of the copy by :meth:`Region.enter`. Any other gradient is full
        already, so the backward keeps this rank's rows of it.
        """
        region, layout = self.region, self.region.rows.of_rows(rows)
        x = gather_rows(rows, region.axis, layout)
        if region.tracking is not None:
            return region.mark_replicated(x)
        region.draw_alike()
        if x.requires_grad and torch.is_grad_enabled():
            region.entered = Entered(x, rows, region.axis, layout)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather ``[batch, seq/tp, hidden] -> [batch, seq, hidden]``; the backward keeps this rank's rows."""
        return self.region.mark_replicated(gather_rows(x, self.region.axis, self.region.rows.of_rows(x)))


def _put(places: Sequence[tuple[nn.Module, str]], tensors: Sequence[Any]) -> None:
    for (module, name), tensor in zip(places, tensors, strict=True):
        own_parameters(module)[name] = tensor


class RowsOfList:
    """The rows of one list of blocks in the current forward.

    Attributes:
        rows: Layouts of the rows; None for full sequences.
        between: True if hidden states are full between the blocks.
        stays_full: True if this forward uses full sequences, because it returns outputs of routers that work on rows.
    """

    def __init__(self, state: SequenceState, plan: SequencePlan) -> None:
        self.state, self.region, self.inputs = state, state.region, plan.inputs
        self.streams, self.summed = plan.streams, plan.summed
        self.known = _OF_BLOCKS | set(plan.given)
        self.rows: Rows | None = None
        self.between = self.stays_full = False
        self.routers_whole = plan.routers_whole

    def note_length(self, x: torch.Tensor) -> torch.Tensor:
        """Record the length of ``x``, ``[batch, seq, hidden]``; returns ``x``."""
        layout = None if self.stays_full else rows_layout(x.shape[1], self.region.axis.size)
        self.rows = None if layout is None else Rows(self.region.axis, (layout,))
        self.state.rows_are_out = layout is not None
        return x

    def note_again(self, x: torch.Tensor) -> torch.Tensor:
        """Use the layouts of rows that a block made; returns ``x``."""
        self.rows = self.state.made.get(x, (self, self.rows))[1]
        return x

    def note_streams(self, given: Mapping[str, Any]) -> None:
        """Record the lengths of the streams; use full sequences if numbers of rows do not tell two lengths apart."""
        if self.rows is not None and self.streams:
            size, found = self.region.axis.size, list[Layout | None](self.rows.layouts)
            for x in map(given.get, self.streams):
                found.append(rows_layout(x.shape[1], size) if isinstance(x, torch.Tensor) and x.ndim == 3 else None)
            layouts = tuple(each for each in dict.fromkeys(found) if each is not None)
            differ = all(len({each.local_size(rank) for each in layouts}) == len(layouts) for rank in range(size))
            self.rows = self.rows._replace(layouts=layouts) if differ and None not in found else None
            self.state.rows_are_out = self.rows is not None

    def has_new_arguments(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a block gets tensor arguments, or forms of them, that it did not get in the dry run."""
        given = dict(given_by_name(block, args, kwargs)) if self.summed else {}
        return any(getattr(given.get(name), "shape", ())[1:] != shape for name, shape in self.summed.items()) or any(
            isinstance(value, torch.Tensor) for value in _unknown(self.known, block, args, kwargs)
        )

    def is_changed_between(self, others: Iterable[Any]) -> bool:
        """Return whether a model may change hidden states between blocks, by arguments unknown to the dry run."""
        return any(isinstance(x, torch.Tensor) or (type(x) is int and x != 0) for x in others)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of ``[batch, seq, hidden]``."""
        assert self.rows is not None
        return self.made(self.region.mark_rows(own_rows(x, self.region.axis, self.rows.of_full(x))))

    def take(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return a further argument of a block for its work on rows."""
        assert self.rows is not None
        if name in self.summed:
            return sum_gradients(x, self.region.axis)
        return self.region.mark_rows(take_rows(x, self.region.axis, self.rows.layouts[0]))

    def made(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` and record how to gather it, because the model may return it."""
        self.state.made[x] = self, self.rows
        return x

    def leave(self, x: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        """Gather rows ``[batch, seq/tp, hidden]`` into the full sequence."""
        rows = rows or self.rows
        assert rows is not None
        return self.region.mark_replicated(gather_rows(x, self.region.axis, rows.of_rows(x)))


class Arguments(Hook):
    """Forward pre-hook of the model around a list of blocks; decides whether hidden states are full between blocks.

    They are full if the model gets an argument not ``seen`` in the dry run. Some models add image features to the
    hidden states between their first blocks.
    """

    def __init__(self, of: RowsOfList, seen: Iterable[str]) -> None:
        self.of, self.known = of, _OF_MODELS | set(seen)

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        of = self.of
        others = _unknown(self.known, model, args, kwargs)
        of.rows = None  # until the first block
        of.between = of.is_changed_between(others)
        name = "output_router_logits"
        of.stays_full = not of.routers_whole and bool(kwargs.get(name, getattr(model.config, name, False)))


class RowsBlock:
    """Class mixed into a block; comes first in the MRO."""

    rows_list: RowsOfList
    rows_ends: tuple[bool, bool]  # whether it is the first and the last block of its list
    rows_parameters: tuple[tuple[nn.Module, str], ...]  # modules and names of parameters that work on rows
    rows_hooked = False  # whether the block contains user hooks, which need full sequences

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of, (first, last) = self.rows_list, self.rows_ends
        enters_full = first or (of.between and of.rows is not None)
        leaves_full = last or of.between
        if enters_full:
            change_first(self, args, kwargs, of.note_length)
            of.note_streams(dict(given_by_name(self, args, kwargs)))
        else:  # diffusers calls this again to recompute the block, maybe after a forward of another length
            change_first(self, args, kwargs, of.note_again)
        if of.rows is None:
            return change_output(super().__call__(*args, **kwargs), of.made, of.streams)  # type: ignore[misc]
        # The dry run did not see these arguments; and hooks must get gradients of full sequences.
        if self.rows_hooked or of.has_new_arguments(self, args, kwargs):
            if not enters_full:
                args, kwargs = change_first(self, args, kwargs, of.leave)
                args, kwargs = change_named(self, args, kwargs, of.streams, lambda _, x: of.leave(x))
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
            of.state.rows_are_out &= not leaves_full
            return output if leaves_full else change_output(output, of.enter, of.streams)
        if enters_full:
            args, kwargs = change_first(self, args, kwargs, of.enter)
            args, kwargs = change_named(self, args, kwargs, of.streams, lambda _, x: of.enter(x))
        args, kwargs = change_named(self, args, kwargs, (*of.inputs, *of.summed), of.take)
        output = super().__call__(*args, **kwargs, autopar_rows=of.rows)  # type: ignore[misc]
        output = change_output(output, of.made, of.streams)
        of.state.rows_are_out &= not leaves_full
        return change_output(output, of.leave, of.streams) if leaves_full else output

    @property
    def full_length(self) -> int | None:
        """The length of the full sequence; None if hidden states are full already."""
        rows = self.rows_list.rows
        return None if rows is None else rows.layouts[0].size

    def forward(self, *args: Any, autopar_rows: Rows | None = None, **kwargs: Any) -> Any:
        """Compute with rows; activation checkpointing calls this again in the backward, without ``__call__``."""
        if autopar_rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        training: bool = self.training  # type: ignore[attr-defined]
        with self.rows_list.state.on_rows(autopar_rows, self.rows_parameters, training):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class GatheredInput:
    """Class mixed into a module with a region: gathers the first argument, and the region's output is rows.

    The row-parallel layer of the region, here or in a later module, sums its output into rows.
    """

    rows_state: SequenceState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region = self.rows_state.region
        if region.rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = change_first(self, args, kwargs, self.rows_state.enter_full)
        gather = lambda _, x: self.rows_state.gather(x)  # noqa: E731
        args, kwargs = change_named(self, args, kwargs, self.rows_state.streams, gather)
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        region.leave()
        return output


class FullSequence:
    """Class mixed into a module that mixes rows: gathers its first argument, and shards its first output into rows."""

    rows_state: SequenceState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, region = self.rows_state, self.rows_state.region
        rows: Rows | None = region.rows
        if rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = change_first(self, args, kwargs, state.gather)
        args, kwargs = change_named(self, args, kwargs, state.streams, lambda _, x: state.gather(x))
        with state.full_sequences():
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        own = lambda y: region.mark_rows(own_rows(y, region.axis, rows.of_full(y)))  # noqa: E731
        return change_output(output, own, state.streams)


def change_first(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward with ``change`` applied to the hidden states, its first argument."""
    given = dict(given_by_name(module, args, kwargs))
    first = given.get(argument_names(module)[0])
    first = next(x for x in given.values() if isinstance(x, torch.Tensor)) if first is None else first
    changed = change(first)
    return change_given(module, args, kwargs, lambda _, value: changed if value is first else value)


def change_named(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str], change: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward with ``change`` applied to tensors with these names, except the first one."""
    if not names:
        return args, kwargs
    chosen = set(names) - {argument_names(module)[0]}
    changed = lambda name, x: change(name, x) if name in chosen and isinstance(x, torch.Tensor) else x  # noqa: E731
    return change_given(module, args, kwargs, changed)


def change_output(output: Any, change: Callable[[torch.Tensor], torch.Tensor], streams: Sequence[str] = ()) -> Any:
    """Return the output of a module with ``change`` applied to the hidden states.

    These are its first tensor; with ``streams``, all its tensors ``[batch, seq, features]``.
    """
    if isinstance(output, torch.Tensor):
        return change(output)
    if streams and type(output) in (tuple, list):
        return type(output)(change(x) if isinstance(x, torch.Tensor) and x.ndim == 3 else x for x in output)
    if type(output) in (tuple, list) and output and isinstance(output[0], torch.Tensor):
        changed = change(output[0])
        return output if changed is output[0] else type(output)([changed, *output[1:]])
    raise TypeError(f"expected hidden states or a tuple that starts with them, got {type(output).__name__}")


def apply(
    model: nn.Module, plan: SequencePlan, state: SequenceState, kind: Callable[..., RowsOfList] = RowsOfList
) -> None:
    """Swap the classes of blocks and of modules inside them in place; parameters are not moved.

    This must be the last swap, so that the boundary of a block runs before the boundary of a pipeline stage.
    """
    state.region.sequence, state.streams = state, plan.streams
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # id of a parameter -> modules that have it
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    for path in plan.entries:
        swap(modules[path], GatheredInput, rows_state=state)
    for path in plan.wholes:
        swap(modules[path], FullSequence, rows_state=state)
    for blocks in plan.lists:
        of = kind(state, plan)
        for path in around(blocks[0]):  # the innermost Hugging Face model around the blocks
            if is_hugging_face_model(modules[path]):
                modules[path].register_forward_pre_hook(Arguments(of, plan.seen), with_kwargs=True)
                break
        for place, path in enumerate(blocks):
            ends = (place == 0, place == len(blocks) - 1)
            names = (name.rpartition(".") for name in plan.parameters.get(path, ()))
            held = (own_parameters(modules[owner]).get(own) for owner, _, own in names)  # None on another stage
            on_rows = tuple(each for parameter in held for each in places.get(id(parameter), ()))
            swap(modules[path], RowsBlock, rows_list=of, rows_ends=ends, rows_parameters=on_rows)


def undo(model: nn.Module, plan: SequencePlan) -> None:
    """Undo :func:`apply`; earlier swaps must be undone later. The model's hooks are removed elsewhere."""
    for path in itertools.chain(*plan.lists):
        unswap(model.get_submodule(path), RowsBlock, "rows_list", "rows_ends", "rows_parameters", "rows_hooked")
    for path in plan.wholes:
        unswap(model.get_submodule(path), FullSequence, "rows_state")
    for path in plan.entries:
        unswap(model.get_submodule(path), GatheredInput, "rows_state")

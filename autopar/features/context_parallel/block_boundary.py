"""The boundaries of a list of blocks: the sequence is cut into rows before the first one, and joined behind the last.

Everything before the first block is the model's own and sees the whole sequence: positions, masks, documents, and
embeddings, which may be lazy tensors (:mod:`autopar.features.context_parallel.lazy_rows`). A block gets this rank's
rows of the hidden states and of whatever else has a row for each position; masks stay whole. Modules that need all
rows gather them, and keep their own of what they return.

Embeddings before the blocks may look up this rank's rows only, and return lazy tensors. The dry run finds them: what
they return reaches the blocks through operations that treat rows apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from autopar.compat.tensors import keystr, tree_flatten_with_path, tree_map_with_path, tree_unflatten
from autopar.compat.transformers import RECOMPUTE
from autopar.distributed.collectives import all_gather
from autopar.errors import ConfigError
from autopar.features.context_parallel.lazy_rows import LazyRows, lazy_rows, whole_tensors
from autopar.features.context_parallel.recurrent.state_passing import StatesOfRank, own_arguments, with_states
from autopar.features.context_parallel.rows import join
from autopar.features.context_parallel.state import RowState, WholeModule
from autopar.layout import Layout
from autopar.swap import argument_names, change_given, given_by_name
from autopar.tensor_tracking import tensors_in


def may_own_rows(module: nn.Module) -> bool:
    """Check whether a module in front of the blocks is an embedding that looks up each row by itself, and no more."""
    plain = isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq
    return plain and len(argument_names(module)) == 1


class OwnRows:
    """Class before that of an embedding in front of the blocks: it looks up this rank's rows of ids, ``[batch, rows]``.

    Attributes:
        _autopar_own: its path.
    """

    num_embeddings: int
    _autopar_rows: RowState
    _autopar_own: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, path = self._autopar_rows, self._autopar_own
        ids = args[0] if len(args) == 1 and not kwargs else None
        rows = self._rows_of(ids) if isinstance(ids, torch.Tensor) and ids.ndim == 2 else None
        if ids is None or rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        own = super().forward(state.mark(rows.shard(ids, state.axis.rank, 1)))  # type: ignore[misc]
        return lazy_rows(own, 1, rows, state, frozenset((path,)))

    def _rows_of(self, ids: torch.Tensor) -> Layout | None:
        """Return which rows of ``ids`` each rank has; None if all ranks look up all of them."""
        state, length = self._autopar_rows, ids.shape[1]
        if not state.cutting or (state.tracking is not None and length != state.tracking.prime * state.axis.size):
            return None
        if ids.is_cpu and ids.numel():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= self.num_embeddings:
                return None  # raises in the module, on every rank
        return state.rows_of(length)


class BlockBoundary:
    """Class before that of a block.

    Attributes:
        _autopar_place: number of its list, whether it is the first in it, and the last.
    """

    training: bool
    _gradient_checkpointing_func: Callable[..., Any]
    _autopar_rows: RowState
    _autopar_place: tuple[int, bool, bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, (number, first, last) = self._autopar_rows, self._autopar_place
        if not state.cutting:
            state.check_recomputed()
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        named = given_by_name(self, args, kwargs)
        hidden = next((name for name, x in named if isinstance(x, torch.Tensor)), "")
        if (first and number in state.inside) and not state.plan.between and state.tracking is not None:
            raise state.tracking.mixed("the first block runs a second time", between=True)
        if first or state.plan.between:
            x = dict(named).get(hidden)
            state.enter(number, _length(hidden, x, state), x.shape[0] if isinstance(x, torch.Tensor) else 0)
        layout = state.layout(number)
        if layout is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        state.region.draw_per_rank(self.training)
        recompute = vars(self).get(RECOMPUTE)
        if recompute is not None and not isinstance(recompute, Recomputed):
            for module in self.modules():  # type: ignore[attr-defined]  # also layers that are recomputed by themselves
                plain = vars(module).get(RECOMPUTE)
                if plain is not None and not isinstance(plain, Recomputed):
                    module._gradient_checkpointing_func = Recomputed(plain, state)
        whole = first or state.plan.between
        enter = lambda name, x: self._enter(name, x, layout, whole=whole or name != hidden)  # noqa: E731
        args, kwargs = change_given(self, args, kwargs, enter)
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        keeps = state.keeping and number == len(state.plan.lists) - 1  # behind the last block come rows, up to the head
        if (last and not keeps) or state.plan.between:
            state.region.draw_alike()
        if (last or state.plan.between) and state.tracking is not None:
            _note_rows(state, layout.local_size(state.axis.rank), out)  # also where this forward keeps them
        if (last and not keeps) or state.plan.between:
            state.inside.discard(number)
            out = _join(state, layout, out)
        return out

    def _enter(self, name: str, value: Any, layout: Layout, *, whole: bool) -> Any:
        """Return this rank's part of an argument."""
        if isinstance(value, Cache):
            return None  # an empty one, which the model made for itself
        if not whole or _is_whole(name):
            return value
        state = self._autopar_rows

        def own(path: Any, x: Any) -> Any:
            if type(x) is int:
                _check_number(f"{name}{keystr(path)}", x, state)
            if not isinstance(x, torch.Tensor):
                return x
            dim = _dim_of_rows(_place(f"{name}{keystr(path)}", x), x, layout.size, state)
            return whole_tensors(x) if dim is None else _own_rows(x, layout, dim, state)

        return tree_map_with_path(own, value)


def _own_rows(x: torch.Tensor, layout: Layout, dim: int, state: RowState) -> torch.Tensor:
    if not isinstance(x, LazyRows):
        return state.narrow(x, layout, dim)
    own = x.opened(layout, dim)
    return state.narrow(x.whole(), layout, dim) if own is None else own


def _place(name: str, x: torch.Tensor) -> str:
    return f"{name} of {x.ndim} dims"


def _length(name: str, x: Any, state: RowState) -> int:
    """Return how many rows the hidden states have; 0 for what has none."""
    if not isinstance(x, torch.Tensor) or x.ndim < 3:
        return 0
    if state.tracking is not None:
        whole = state.tracking.prime * state.axis.size
        return whole if list(x.shape).count(whole) == 1 and not state.tracking.holds_rows(x) else 0
    return x.shape[state.plan.arguments.get(_place(name, x), 1)]


def _note_rows(state: RowState, own: int, out: Any) -> None:
    """Note in a rehearsal which dims of what a block returns are rows."""
    for path, x in tree_flatten_with_path(out)[0]:
        if isinstance(x, torch.Tensor):
            dims = [dim for dim, size in enumerate(x.shape) if size == own] if state.tracking.holds_rows(x) else []
            state.plan.arguments[_place(f"return{keystr(path)}", x)] = dims[0] if len(dims) == 1 else -1


def _join(state: RowState, layout: Layout, out: Any) -> Any:
    """Gather the rows of what a block returns; of a tuple, the hidden states."""
    own = layout.local_size(state.axis.rank)

    def join(path: Any, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        dim = state.plan.arguments.get(_place(f"return{keystr(path)}", x), -1)
        return x if dim < 0 or x.shape[dim] != own else gather_all(x, state, layout, dim)

    return tree_map_with_path(join, out)


def _is_whole(name: str) -> bool:
    """Return whether an argument of a block is not cut: masks, and what belongs to another sequence."""
    return name.startswith("encoder_") or any(part in name for part in ("mask", "alibi", "cross_attention", "cu_seq"))


def _dim_of_rows(path: str, x: torch.Tensor, length: int, state: RowState) -> int | None:
    """Return the dim that has a row for each position; as the rehearsal saw it, else the one that is as long."""
    fitting = [dim for dim, size in enumerate(x.shape) if size == length]
    seen = state.plan.arguments
    if state.tracking is not None and (fitting or path not in seen) and not state.tracking.holds_rows(x):
        seen[path] = fitting[0] if len(fitting) == 1 else -1
    if path in seen:
        return seen[path] if seen[path] in fitting else None
    if len(fitting) > 1 and not (x.ndim <= 3 and 1 in fitting):
        raise ConfigError(
            f"context_parallel_size: argument {path} of a block has shape {list(x.shape)}, and {length} rows can be "
            f"its dims {' and '.join(map(str, fitting))}: another length of the sequence tells them apart"
        )
    return 1 if len(fitting) > 1 else next(iter(fitting), None)


def _check_number(name: str, number: int, state: RowState) -> None:
    """Check that a number that a block is given was one in the rehearsal: it may count rows."""
    if name.startswith(("max_length_", "max_seqlen_", "num_items_in_batch")):
        return  # of whole sequences, for the attention function and for the loss
    seen = state.plan.numbers.setdefault(name, set())
    if state.tracking is not None:
        if number and number % state.tracking.prime == 0:
            raise state.tracking.mixed(f"argument {name} of a block counts rows, {number}")
        seen.add(number)
    elif number not in seen:
        known = ", ".join(map(str, sorted(seen)[:8])) or "none"
        raise ConfigError(
            f"context_parallel_size={state.axis.size}: a block was given {name}={number}, which may count rows; seen "
            f"before were: {known}. These inputs need the plain model, or tensor_parallel_size."
        )


class Recomputed:
    """A checkpoint function that recomputes a block with the rows that it had in its forward."""

    def __init__(self, plain: Callable[..., Any], state: RowState) -> None:
        self.plain, self.state = plain, state

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forward = self.state.snapshot()

        def resumed(*args: Any, **kwargs: Any) -> Any:
            with self.state.resumed(forward):
                return function(*args, **kwargs)

        return self.plain(resumed, *args, **kwargs)


class NeedsAllRows:
    """Class before that of a module that mixes rows: it runs with all of them, on every rank, or hands on its states.

    Attributes:
        _autopar_whole: number of its list, how it runs, its path.
    """

    _autopar_rows: RowState
    _autopar_whole: tuple[int, WholeModule, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, (number, where, path) = self._autopar_rows, self._autopar_whole
        layout = state.layout(number)
        if not state.cutting or layout is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if where.states is not None and state.tracking is None:
            own = own_arguments(self, (args, kwargs), where.states, where.inputs, layout, state.axis.rank)
            if own is not None:
                anchors = (*tensors_in(own), *self.parameters())  # type: ignore[attr-defined]
                states = StatesOfRank(where.states, state.links, path, anchors)
                args, kwargs = with_states(self, own, where.states, states)
                return states.behind(super().__call__(*args, **kwargs))  # type: ignore[misc]
        args, kwargs = self._gather((args, kwargs), state, number, layout, where)
        state.cutting = False
        try:
            paused = contextlib.nullcontext() if state.tracking is None else state.tracking.paused()
            with paused, state.region.outside():  # all ranks compute the same, and drop the same
                out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            state.cutting = True
        return _own_part(out, state, layout, where)

    def _gather(self, values: Any, state: RowState, number: int, layout: Layout, where: WholeModule) -> Any:
        own = layout.local_size(state.axis.rank)

        def gather(path: Any, x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            name = _place(keystr(path), x)
            if state.tracking is not None and state.tracking.holds_rows(x):
                found = next(d for d, size in enumerate(x.shape) if size and size % own == 0)
                where.inputs[name], where.folded[name] = found, x.shape[found] // own
            dim = where.inputs.get(name)
            before = state.whole_of(x)
            if dim is None or before is not x:
                return before
            folded = where.folded[name]  # how often rows lie in the dim: once, or for each sequence
            times = 1 if folded == 1 else folded // (state.axis.size + 1) * state.batches[number]  # sequences there
            if x.shape[dim] == layout.size * times:
                return x
            if x.shape[dim] != own * times:  # the same on all ranks, whose rows differ in number
                raise ConfigError(
                    f"context_parallel_size={state.axis.size}: argument {name} of a module that needs all rows has "
                    f"shape {list(x.shape)}:\n  neither {own * times} nor {layout.size * times} in dim {dim}. These "
                    "inputs need tensor_parallel_size, or sequence_parallel."
                )
            return gather_all(x, state, layout, dim)

        return tree_map_with_path(gather, values)


def gather_all(x: torch.Tensor, state: RowState, layout: Layout, dim: int) -> torch.Tensor:
    """Gather rows along ``dim``, in which the batch may lie too: ``[batch * rows, ...]``."""
    own = layout.local_size(state.axis.rank)
    if own and x.shape[dim] != own:
        parts = x.unflatten(dim, (-1, own))
        return gather_all(parts, state, layout, dim + 1).flatten(dim, dim + 1)
    if x.is_floating_point():
        return state.unmark(join(x, state.axis, dim, layout))
    return state.unmark(all_gather(x, state.axis, layout, dim))


def _own_part(out: Any, state: RowState, layout: Layout, where: WholeModule) -> Any:
    leaves, structure = tree_flatten_with_path(out)
    kept = []
    for path, x in leaves:
        name = keystr(path)
        if isinstance(x, torch.Tensor):
            if state.tracking is not None:
                dims = [d for d, size in enumerate(x.shape) if size and size % layout.size == 0]
                if len(dims) > 1:
                    state.tracking.mark_table(x)
                if len(dims) == 1:
                    where.outputs[name], where.shapes[name] = dims[0], tuple(x.shape)
            dim = where.outputs.get(name)
            kept.append(x if dim is None else _own_along(x, state, layout, dim))
        else:
            kept.append(x)
    return tree_unflatten(kept, structure)


def _own_along(x: torch.Tensor, state: RowState, layout: Layout, dim: int) -> torch.Tensor:
    if x.shape[dim] != layout.size:  # [batch * rows, ...]
        return _own_along(x.unflatten(dim, (-1, layout.size)), state, layout, dim + 1).flatten(dim, dim + 1)
    return state.mark(layout.shard(x, state.axis.rank, dim))

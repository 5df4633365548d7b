"""Modules in front of the blocks that compute this rank's rows only: embeddings, and rotary angles of positions.

The rehearsal finds them: their operations treat rows apart, and what they return comes to the boundary of the blocks
through others that do. They return lazy tensors (:mod:`~autopar.context_parallel.lazy_rows`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.context_parallel.handed_states import place_of
from autopar.context_parallel.lazy_rows import LazyRows, MadeOf, lazy_rows
from autopar.context_parallel.state import OwnModule, RowState
from autopar.foreign.tensors import keystr, tree_flatten, tree_flatten_with_path, tree_map_with_path, tree_unflatten
from autopar.layout import Layout


def may_own_rows(module: nn.Module) -> bool:
    """Check whether a module in front of the blocks may treat rows apart: an embedding, or a function of positions."""
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    alone = next(module.children(), None) is None and next(module.parameters(), None) is None
    return alone and next(module.buffers(), None) is not None


class OwnRows:
    """Class before that of a module in front of the blocks: it computes this rank's rows.

    Attributes:
        _autopar_own: its path, and where its arguments and outputs hold rows.
    """

    _autopar_rows: RowState
    _autopar_own: tuple[str, OwnModule]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, (path, where) = self._autopar_rows, self._autopar_own
        plain = functools.partial(super().forward, *args, **kwargs)  # type: ignore[misc]
        rows = _rows_of((args, kwargs), where, state) if state.cutting else None
        if rows is None:
            return plain()
        try:
            mine, named = _cut((args, kwargs), where, rows, state)
            out = super().forward(*mine, **named)  # type: ignore[misc]
        except Exception:
            if state.tracking is None:
                raise
            state.spoiled.add(path)
            return plain()
        made_of = [x for _, x in _tensors((args, kwargs))] + [*self.parameters(), *self.buffers()]  # type: ignore[attr-defined]
        return _lazy(out, path, where, rows, state, plain, made_of)


def _tensors(values: Any) -> list[tuple[str, torch.Tensor]]:
    return [(place_of(path, x), x) for path, x in tree_flatten_with_path(values)[0] if isinstance(x, torch.Tensor)]


def _call(values: Any) -> str:
    """Return which arguments a call has, and the numbers among them: they may count rows."""
    numbers = [f"{keystr(path)}={x}" for path, x in tree_flatten_with_path(values)[0] if isinstance(x, int)]
    return ", ".join([*(name for name, _ in _tensors(values)), *numbers])


def _rows_of(values: Any, where: OwnModule, state: RowState) -> Layout | None:
    """Return the rows of the sequence in the arguments; None if they are too few, or what the rehearsal did not see.

    An id that is not in the table raises in the module, which all ranks are to do.
    """
    lengths, call = set[int](), _call(values)
    if state.tracking is None and call not in where.calls:
        return None
    if call not in where.calls:
        where.calls.append(call)
    tensors = _tensors(values)
    for name, x in tensors:
        if state.tracking is not None:
            whole = state.tracking.prime * state.axis.size
            dims = [dim for dim, size in enumerate(x.shape) if size == whole]
            where.inputs[name] = max(where.inputs.get(name, -1), dims[0] if len(dims) == 1 else -1)
        dim = where.inputs[name]
        lengths |= {x.shape[dim]} if dim >= 0 else set()
        if where.entries and len(tensors) == 1 and x.device.type == "cpu" and x.numel():
            low, high = (int(bound) for bound in torch.aminmax(x))
            if low < 0 or high >= where.entries:
                return None
    if len(lengths) != 1:
        return None
    (length,) = lengths
    if state.tracking is not None and length != state.tracking.prime * state.axis.size:
        return None
    return state.rows_of(length)


def _cut(values: Any, where: OwnModule, rows: Layout, state: RowState) -> Any:
    def own(path: Any, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        dim = where.inputs[place_of(path, x)]
        held = x.opened(rows, dim) if isinstance(x, LazyRows) else None
        if held is not None:
            return held
        whole = x.whole() if isinstance(x, LazyRows) else x
        return whole if dim < 0 else state.mark(rows.shard(whole, state.axis.rank, dim))

    return tree_map_with_path(own, values)


def _lazy(
    out: Any, path: str, where: OwnModule, rows: Layout, state: RowState, plain: Callable[[], Any], made_of: list[Any]
) -> Any:
    """Wrap each output, which holds this rank's rows; the first read of one computes all of them in full."""

    @functools.cache
    def every() -> list[Any]:
        return tree_flatten(plain())[0]

    def again(place: int) -> Any:
        return every()[place]

    leaves, structure = tree_flatten_with_path(out)
    made, own = [], rows.local_size(state.axis.rank)
    for place, (name, x) in enumerate(leaves):
        key = place_of(name, x) if isinstance(x, torch.Tensor) else ""
        if state.tracking is not None:
            dims = [dim for dim, size in enumerate(x.shape) if size == own] if state.tracking.holds_rows(x) else []
            where.outputs[key] = dims[0] if len(dims) == 1 else -1
        dim = where.outputs.get(key, -1)
        if dim < 0 or x.shape[dim] != own:
            state.spoiled.add(path)
            return plain()
        how = MadeOf(functools.partial(again, place), made_of)
        made.append(lazy_rows(x, dim, rows, state, frozenset((path,)), how))
    return tree_unflatten(made, structure)

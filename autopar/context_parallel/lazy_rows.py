"""A lazy tensor in front of the blocks: it holds this rank's rows, and computes the whole on any other use.

It may be added to others, scaled, normed and projected, which is done to the rows, and the block boundary opens it.
Any other operation gets the whole tensor, which each rank computes by itself, as it would without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from autopar.context_parallel.rows import join
from autopar.context_parallel.state import RowState
from autopar.distributed.agree import meet
from autopar.distributed.autograd_functions import keep_none, single_backward
from autopar.distributed.whole_on_read import WholeOnRead, name_of
from autopar.foreign.tensors import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    version_of,
    wrapper_subclass,
)
from autopar.layout import Layout

__all__ = ["LazyRows", "MadeOf", "lazy_rows", "version_of", "whole_tensors"]

_ADVICE = (
    "Dropout, or what has changed since, left rows of it on each context-parallel rank. They are gathered when it is\n"
    "  read, which takes all of the ranks: read it on all of them"
)


class LazyRows(WholeOnRead):
    """A whole tensor in front of the blocks, of which this rank has some rows.

    Attributes:
        own: this rank's rows.
        rows_dim: that of rows.
        sources: paths of the modules that made it, for a rehearsal.
    """

    own: torch.Tensor
    rows_dim: int
    rows: Layout
    sources: frozenset[str]
    _state: RowState
    _made_of: MadeOf | None
    _version_of_own: int
    _plain: torch.Tensor | None
    _version_of_plain: int

    @property
    def is_whole(self) -> bool:
        """Whether somebody has read it."""
        return self._plain is not None

    def held(self) -> str:
        """Return which rows this rank has."""
        axis = self._state.axis
        held = ", ".join(f"{start} to {stop - 1}" for start, stop in self.rows.ranges(axis.rank)) or "none"
        return f"{axis.name} rank {axis.rank} of {axis.size} has rows {held}"

    def parts(self) -> list[torch.Tensor]:
        """Return this rank's rows."""
        return [self.own]

    def opened(self, rows: Layout, dim: int) -> torch.Tensor | None:
        """Return this rank's ``rows`` along ``dim``; None if they are others, or somebody has read the whole."""
        if self._plain is not None or self.rows != rows or self.rows_dim != dim:
            return None
        self._state.opened |= self.sources
        return self.own

    def whole(self) -> torch.Tensor:
        """Return the whole tensor: computed on this rank the first time, gathered if that would be another by now."""
        if self._plain is None:
            self._state.spoiled |= self.sources
            with torch.inference_mode(self.own.is_inference()), torch.set_grad_enabled(self.own.requires_grad):
                self._plain = self._made()
            if self.own.requires_grad and self.own.is_leaf and not self._plain.requires_grad:
                self._plain.requires_grad_()
            self._version_of_plain = version_of(self._plain)
        return self._plain

    def _made(self) -> torch.Tensor:
        if self._made_of is not None and self._made_of.unchanged() and version_of(self.own) == self._version_of_own:
            return self._made_of.again()
        axis = self._state.axis
        meet(axis, f"a tensor of {list(self.shape)} in front of the blocks", axis.read_timeout, _ADVICE)
        return join(self.own, self._state.axis, self.rows_dim, self.rows)

    def unchanged(self) -> bool:
        """Return whether nobody has written into the whole tensor."""
        return self._plain is None or version_of(self._plain) == self._version_of_plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from this rank's rows what can be, compute the whole for everything else."""
        first, name = args[0] if args else None, name_of(func)
        if isinstance(first, LazyRows) and not first.is_whole and name in ("requires_grad", "grad_fn", "is_leaf"):
            return getattr(first.own, name)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def from_parts(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do to own rows what treats rows apart."""
        lead = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, LazyRows)), None)
        if lead is None or lead.is_whole:
            return None
        if name == "requires_grad_":
            lead.own.requires_grad_(*args[1:], **kwargs)
            return lead
        return _of_own_rows(lead, func, name, args, kwargs)


class MadeOf:
    """How a tensor was made of others, and whether they are still the same."""

    def __init__(self, again: Callable[[], torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
        self.again = again
        self._lazy = [x for x in tensors if isinstance(x, LazyRows)]
        self._versions = [(x, version_of(x)) for x in tensors if not isinstance(x, LazyRows)]

    def unchanged(self) -> bool:
        """Return whether nobody has written into them."""
        return all(x.unchanged() for x in self._lazy) and all(version_of(x) == seen for x, seen in self._versions)


def lazy_rows(
    own: torch.Tensor, dim: int, rows: Layout, state: RowState, sources: frozenset[str], made_of: MadeOf | None
) -> LazyRows:
    """Return the whole tensor of which ``own`` is this rank's rows along ``dim``, without memory."""
    made: LazyRows = _Closed.apply(own, [*own.shape[:dim], rows.size, *own.shape[dim + 1 :]])
    made.own, made.rows_dim, made.rows, made.sources = state.mark(own), dim, rows, sources
    made._state, made._made_of, made._plain = state, made_of, None
    made._version_of_own, made._version_of_plain = version_of(own), 0
    return made


class _Closed(torch.autograd.Function):
    """A use outside of Python: it has no gradient for the rows, so its backward raises instead of losing one."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, shape: list[int]) -> Any:
        keep_none(ctx)
        return wrapper_subclass(LazyRows, shape, dtype=own.dtype, device=own.device)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            "context_parallel_size: an autograd function in front of the blocks took embeddings, of which each rank "
            "has some rows: their\n  gradient would be lost. Give it the whole tensor: function.apply(embeddings[:])"
        )


def whole_tensors(value: Any) -> Any:
    """Return a nested value with whole tensors in the place of those of which there are rows."""
    if any(isinstance(x, LazyRows) for x in tree_leaves(value)):
        return tree_map_only(LazyRows, lambda x: x.whole(), value)
    return value


# -- operations on own rows ---------------------------------------------------------------------------------------

_UNARY = frozenset(
    (
        *("float", "double", "half", "bfloat16", "to", "contiguous", "clone", "neg", "__neg__", "abs"),
        *("pow", "__pow__", "square", "sqrt", "rsqrt", "exp", "sigmoid", "tanh"),
    )
)
_BINARY = frozenset(
    f"{left}{name}{right}"
    for name, left, right in (
        *((name, "", "") for name in ("add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "divide")),
        *((name, "__", "__") for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")),
    )
)


def _of_own_rows(lead: LazyRows, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what ``func`` makes, or None if it is not known to treat rows apart."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if kwargs.get("out") is not None:
        return None
    if name == "dropout":
        return _dropout(lead, func, args, kwargs) if len(tensors) == 1 else None
    if name in _BINARY:
        parts = [_part(x, lead) if isinstance(x, torch.Tensor) else x for x in leaves]
        if any(isinstance(x, torch.Tensor) and part is None for part, x in zip(parts, leaves, strict=True)):
            return None
    elif (name in _UNARY and len(tensors) == 1) or (leaves[0] is lead and _is_of_features(lead, name, args, kwargs)):
        parts = [lead.own if x is lead else x for x in leaves]
    else:
        return None
    if any(isinstance(x, LazyRows) for x in parts):
        return None
    mine, named = tree_unflatten(parts, structure)
    own = func(*mine, **named)
    if own is lead.own:  # as it was
        return lead
    sources = frozenset[str]().union(*(x.sources for x in tensors if isinstance(x, LazyRows)))

    def again() -> torch.Tensor:
        whole, names = tree_map_only(LazyRows, lambda x: x.whole(), (args, kwargs))
        made: torch.Tensor = func(*whole, **names)
        return made

    dim = own.ndim - (lead.ndim - lead.rows_dim)
    return lazy_rows(own, dim, lead.rows, lead._state, sources, MadeOf(again, tensors))


def _is_of_features(lead: LazyRows, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation works along the last dims, which are not the rows', with weights beside it."""
    if name in ("layer_norm", "rms_norm"):
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return lead.rows_dim < lead.ndim - len(shape)
    if name == "mean":  # over the features, which stay a dim
        given = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
        return given.get("keepdim") is True and given.get("dim") in (-1, (-1,), [-1]) and lead.rows_dim < lead.ndim - 1
    return name == "linear" and lead.rows_dim < lead.ndim - 1


def _part(x: torch.Tensor, lead: LazyRows) -> torch.Tensor | None:
    """Return this rank's rows of a tensor that is broadcast with ``lead``; itself if it is the same for all rows."""
    dim = x.ndim - (lead.ndim - lead.rows_dim)
    if isinstance(x, LazyRows):
        if x._plain is None:
            return x.own if x.rows == lead.rows and x.rows_dim == dim else None
        x = x._plain
    if dim < 0 or x.shape[dim] == 1:
        return x
    return lead.rows.shard(x, lead._state.axis.rank, dim) if x.shape[dim] == lead.rows.size else None


def _dropout(lead: LazyRows, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyRows | None:
    """``F.dropout``: each rank draws for its own rows, as it does in the blocks."""
    given = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
    if not given.get("training", given.get("train", True)) or given.get("p", 0.5) == 0:
        return lead
    region = lead._state.region
    if not args or given.get("inplace") or not region.draws(True):
        return None
    region.draw_per_rank(True)
    own = func(lead.own, *args[1:], **kwargs)
    region.draw_alike()
    return lazy_rows(own, lead.rows_dim, lead.rows, lead._state, lead.sources, None)

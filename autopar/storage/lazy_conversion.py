"""Lazy tensors that transformers' own conversions can work on.

``from_pretrained`` renames, splits, stacks and permutes what it reads, to fit files of one form into modules of
another. A :class:`Sketch` looks to that code like the tensor in the file, but holds no data: each operation on it
gives another sketch that knows which bytes it stands for. An operation that only moves elements about stays a
description of byte ranges; any other is run on the real tensors when somebody reads it, and forgotten again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from autopar.errors import CheckpointError
from autopar.storage.lazy_tensor import (
    Box,
    InMemory,
    Joined,
    LazyTensor,
    Narrowed,
    Permuted,
    Squeezed,
    Stored,
    Unsqueezed,
)
from autopar.tensor_tracking import written_in_place

__all__ = ["Computed", "Converted", "Sketch"]

_ATEN = torch.ops.aten


class Converted(LazyTensor):
    """``base`` in another dtype."""

    def __init__(self, base: LazyTensor, dtype: torch.dtype) -> None:
        super().__init__(base.shape, dtype)
        self.base = base

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        """See :class:`LazyTensor`."""
        if out.dtype == self.dtype:
            self.base.read_into(out, box)
            return
        between = torch.empty(out.shape, dtype=self.dtype, device="cpu")
        self.base.read_into(between, box)
        out.copy_(between)


class Computed(LazyTensor):
    """Output ``which`` of an operation that needs its inputs whole; it is run again at each read.

    Args:
        like: a meta tensor with the output's shape and dtype.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, which: int, like: torch.Tensor) -> None:
        super().__init__(like.shape, like.dtype)
        self._call = func, args, kwargs
        self._which = which

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        """See :class:`LazyTensor`."""
        func, args, kwargs = self._call
        leaves = tree_leaves(func(*tree_map(_real, args), **tree_map(_real, kwargs)))
        InMemory(leaves[self._which]).read_into(out, box)


def _real(value: Any) -> Any:
    return value.lazy.read() if isinstance(value, Sketch) else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


class Sketch(torch.Tensor):
    """What a lazy tensor looks like to code that works on tensors: on the CPU, contiguous, without data.

    Attributes:
        lazy: what it stands for.
    """

    lazy: LazyTensor

    @staticmethod
    def __new__(cls, lazy: LazyTensor) -> Sketch:
        made = torch.Tensor._make_wrapper_subclass(cls, lazy.shape, dtype=lazy.dtype, device=torch.device("cpu"))
        made.lazy = lazy
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Sketch({type(self.lazy).__name__}, {list(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        moved = _moved(func, args, kwargs)
        if moved is not None:
            return [Sketch(lazy) for lazy in moved] if isinstance(moved, list) else Sketch(moved)
        if any(isinstance(leaf, Sketch) for leaf in written_in_place(func, args, kwargs)):
            raise CheckpointError(
                f"a conversion writes into a tensor of the checkpoint ({func}), which lazy loading cannot follow: "
                "load the model with transformers' from_pretrained and pass it to autopar.initialize"
            )
        if not _gives_tensors(func, kwargs):
            return func(*tree_map(_real, args), **tree_map(_real, kwargs))
        like = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        leaves, form = tree_flatten(like)
        return tree_unflatten(
            [
                Sketch(Computed(func, args, kwargs, which, leaf)) if isinstance(leaf, torch.Tensor) else leaf
                for which, leaf in enumerate(leaves)
            ],
            form,
        )


def _gives_tensors(func: Any, kwargs: Any) -> bool:
    """Whether the result can be described; not so a number (``item``), a write into a real tensor, another device."""
    device = kwargs.get("device")
    elsewhere = device is not None and torch.device(device).type != "cpu"
    tensors = all(str(one.type) in ("Tensor", "List[Tensor]") for one in func._schema.returns)
    return tensors and bool(func._schema.returns) and not func._schema.is_mutable and not elsewhere


def _moved(func: Any, args: Any, kwargs: Any) -> LazyTensor | list[LazyTensor] | None:
    """The result of an operation that only moves elements about, or converts them; None if it is none of these."""
    if func in (_ATEN.cat.default, _ATEN.stack.default):
        return _side_by_side(func is _ATEN.stack.default, *args, **kwargs)
    if not args or not isinstance(args[0], Sketch):
        return None
    lazy, rest = args[0].lazy, args[1:]
    if func in (_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN.lift_fresh.default):
        return lazy
    if func is _ATEN._to_copy.default:
        return _copied(lazy, kwargs)
    move = _MOVES.get(func)
    return None if move is None else move(lazy, *rest, **kwargs)


def _side_by_side(stacked: bool, parts: Sequence[Any], dim: int = 0) -> LazyTensor | None:
    if not all(isinstance(part, Sketch) for part in parts) or len({(p.dtype, p.ndim) for p in parts}) != 1:
        return None
    lazies = [part.lazy for part in parts]
    dims = parts[0].ndim + stacked
    dim = dim % dims if dims else dim
    rest = {(*p.shape[:dim], *p.shape[dim + (not stacked) :]) for p in lazies}
    if len(rest) != 1 or not dims:
        return None  # torch says what is wrong
    return Joined([Unsqueezed(lazy, dim) for lazy in lazies] if stacked else lazies, dim)


def _copied(lazy: LazyTensor, kwargs: Any) -> LazyTensor | None:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return None
    dtype = kwargs.get("dtype")
    return lazy if dtype is None or dtype == lazy.dtype else Converted(lazy, dtype)


def _slice(
    lazy: LazyTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> LazyTensor | None:
    if step != 1:
        return None
    dim %= len(lazy.shape)
    first, last, _ = slice(start, stop).indices(lazy.shape[dim])
    return Narrowed(lazy, dim, first, max(first, last))


def _select(lazy: LazyTensor, dim: int, index: int) -> LazyTensor | None:
    dim %= len(lazy.shape)
    size = lazy.shape[dim]
    if not -size <= index < size:
        return None
    return Squeezed(Narrowed(lazy, dim, index % size, index % size + 1), dim)


def _split(lazy: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> list[LazyTensor] | None:
    dim %= len(lazy.shape)
    whole = lazy.shape[dim]
    if isinstance(sizes, int):
        if sizes <= 0:
            return None
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)] or [0]
    if sum(sizes) != whole:
        return None
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [Narrowed(lazy, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _unbind(lazy: LazyTensor, dim: int = 0) -> list[LazyTensor]:
    dim %= len(lazy.shape)
    return [Squeezed(Narrowed(lazy, dim, i, i + 1), dim) for i in range(lazy.shape[dim])]


def _permute(lazy: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    return Permuted(lazy, [dim % len(lazy.shape) for dim in dims])


def _transpose(lazy: LazyTensor, one: int, other: int) -> LazyTensor:
    order = list(range(len(lazy.shape)))
    order[one], order[other] = order[other], order[one]
    return Permuted(lazy, order)


def _t(lazy: LazyTensor) -> LazyTensor:
    return Permuted(lazy, range(len(lazy.shape))[::-1])


def _unsqueeze(lazy: LazyTensor, dim: int) -> LazyTensor:
    return Unsqueezed(lazy, dim % (len(lazy.shape) + 1))


def _squeeze(lazy: LazyTensor, dims: int | Sequence[int] | None = None) -> LazyTensor:
    given = range(len(lazy.shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    for dim in sorted({dim % len(lazy.shape) for dim in given}, reverse=True):
        if lazy.shape[dim] == 1:
            lazy = Squeezed(lazy, dim)
    return lazy


def _view(lazy: LazyTensor, shape: Sequence[int]) -> LazyTensor | None:
    target = list(torch.empty(lazy.shape, device="meta").view(shape).shape)
    if isinstance(lazy, Stored):
        return Stored(lazy.file, lazy.offset, lazy.dtype, target)
    if isinstance(lazy, Converted):
        inside = _view(lazy.base, target)
        return None if inside is None else Converted(inside, lazy.dtype)
    if [size for size in lazy.shape if size != 1] != [size for size in target if size != 1]:
        return None
    lazy = _squeeze(lazy)
    for dim, size in enumerate(target):
        if size == 1:
            lazy = Unsqueezed(lazy, dim)
    return lazy


_MOVES: dict[Any, Any] = {
    _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: _select,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.unbind.int: _unbind,
    _ATEN.permute.default: _permute,
    _ATEN.transpose.int: _transpose,
    _ATEN.t.default: _t,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.squeeze.default: _squeeze,
    _ATEN.squeeze.dim: _squeeze,
    _ATEN.squeeze.dims: _squeeze,
    _ATEN.view.default: _view,
    _ATEN._unsafe_view.default: _view,
}

"""Lazy tensors that transformers' own conversions can work on.

``from_pretrained`` renames, splits, stacks and permutes what it reads, to fit files of one form into modules of
another. A :class:`Sketch` looks to that code like the tensor in the file, but holds no data: each operation on it
gives another sketch that knows which bytes it stands for. A view, as the same operation makes it on the meta device,
stays a description of byte ranges; any other result is computed from the real tensors whenever it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.errors import CheckpointError
from autopar.foreign.tensors import (
    TO_COPY,
    UNSAFE_VIEW,
    disabled_torch_function,
    schema_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    wrapper_subclass,
)
from autopar.storage.files import RangeFile
from autopar.storage.lazy_tensor import Box, InMemory, Joined, LazyTensor
from autopar.storage.views import Converted, lazy_view, reshaped, unsqueezed
from autopar.tensor_tracking import written_in_place

_ATEN = torch.ops.aten


class Computed(LazyTensor):
    """Output ``which`` of an operation that needs its inputs whole; it is run again at each read.

    Args:
        like: a meta tensor with the output's shape and dtype.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, which: int, like: torch.Tensor) -> None:
        super().__init__(like.shape, like.dtype)
        self._call = func, args, kwargs
        self._which = which

    def files(self) -> Iterator[RangeFile]:
        for leaf in tree_leaves(self._call[1:]):
            if isinstance(leaf, Sketch):
                yield from leaf.lazy.files()

    def read_into(self, out: torch.Tensor, box: Box) -> None:
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
    """A lazy tensor as code that works on tensors sees it: on the CPU, contiguous, without data.

    Attributes:
        lazy: the tensor that it stands for.
    """

    lazy: LazyTensor

    @staticmethod
    def __new__(cls, lazy: LazyTensor) -> Sketch:
        made = wrapper_subclass(cls, lazy.shape, dtype=lazy.dtype, device=torch.device("cpu"))
        made.lazy = lazy
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Sketch({type(self.lazy).__name__}, {list(self.shape)}, {self.dtype})"

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

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
    """Tell whether the result can be described; not a number (``item``), a write into a real tensor, another device."""
    device = kwargs.get("device")
    elsewhere = device is not None and torch.device(device).type != "cpu"
    tensors = all(str(one.type) in ("Tensor", "List[Tensor]") for one in schema_of(func).returns)
    return tensors and bool(schema_of(func).returns) and not schema_of(func).is_mutable and not elsewhere


def _moved(func: Any, args: Any, kwargs: Any) -> LazyTensor | list[LazyTensor] | None:
    """Return the result of an operation that only moves elements about or converts them; None for any other."""
    if func in (_ATEN.cat.default, _ATEN.stack.default):
        return _side_by_side(func is _ATEN.stack.default, *args, **kwargs)
    if not args or not isinstance(args[0], Sketch):
        return None
    lazy, first = args[0].lazy, schema_of(func).arguments[0]
    if func in (_ATEN.clone.default, _ATEN.lift_fresh.default):
        return lazy
    if func is TO_COPY.default:
        return _copied(lazy, kwargs)
    is_view = first.alias_info is not None and not schema_of(func).is_mutable
    if not is_view and func is not UNSAFE_VIEW:
        return None
    made = func(torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"), *args[1:], **kwargs)
    views = [_view(lazy, one) for one in made] if isinstance(made, list | tuple) else _view(lazy, made)
    return None if isinstance(views, list) and None in views else views  # type: ignore[return-value]


def _view(lazy: LazyTensor, like: torch.Tensor) -> LazyTensor | None:
    """Return the view of ``lazy`` that ``like`` is of a contiguous tensor on the meta device."""
    if like.dtype != lazy.dtype:
        return None
    found = lazy_view(lazy, like.shape, like.stride(), int(like.storage_offset()))
    same = like.is_contiguous() and like.numel() == math.prod(lazy.shape)
    return reshaped(lazy, like.shape) if found is None and same else found


def _side_by_side(stacked: bool, parts: Sequence[Any], dim: int = 0) -> LazyTensor | None:
    if not all(isinstance(part, Sketch) for part in parts) or len({(p.dtype, p.ndim) for p in parts}) != 1:
        return None
    lazies = [part.lazy for part in parts]
    dims = parts[0].ndim + stacked
    dim = dim % dims if dims else dim
    rest = {(*p.shape[:dim], *p.shape[dim + (not stacked) :]) for p in lazies}
    if len(rest) != 1 or not dims:
        return None  # torch says what is wrong
    return Joined([unsqueezed(lazy, dim) for lazy in lazies] if stacked else lazies, dim)


def _copied(lazy: LazyTensor, kwargs: Any) -> LazyTensor | None:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return None
    dtype = kwargs.get("dtype")
    return lazy if dtype is None or dtype == lazy.dtype else Converted(lazy, dtype)

"""Open the weight files of a Hugging Face checkpoint (safetensors or ``torch.save``) as lazy tensors.

``from_pretrained`` renames, splits, stacks and permutes tensors. In that code a :class:`Sketch` stands for a tensor of
a file. Each operation returns another sketch. A view is again a description of byte ranges; any other result is
computed from real tensors at each read.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.compat.tensors import (
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
from autopar.errors import CheckpointError, first_line
from autopar.storage.files import small_file
from autopar.storage.lazy_tensor import (
    Box,
    Converted,
    InMemory,
    Joined,
    LazyTensor,
    Mapped,
    Stored,
    lazy_view,
    parts_of,
    reshaped,
    unsqueezed,
)
from autopar.storage.safetensors_io import SafetensorsReader
from autopar.tensor_tracking import written_in_place

_ATEN = torch.ops.aten
_CHUNK = 1 << 24  # bytes that are compared at a time


def open_files(files: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str] = "") -> dict[str, LazyTensor]:
    """Open files as name -> lazy tensor, reading only headers. A later file takes precedence.

    Raises:
        CheckpointError: A file is missing, truncated, not a checkpoint, or outside of a local ``folder``.
    """
    tensors: dict[str, LazyTensor] = {}
    for path in map(Path, files):
        # Links are not resolved, because a cache may link its files to another folder.
        around = os.path.abspath(folder) if folder and os.path.isdir(folder) else "/"
        if not Path(os.path.abspath(path)).is_relative_to(around):
            raise CheckpointError(
                f"the index in {folder} names {os.path.relpath(path, folder)}, which must be inside the folder"
            )
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: it is one of the {len(files)} weight files of the checkpoint")
        if path.suffix == ".safetensors":
            reader = SafetensorsReader(path)
            tensors |= {name: reader.lazy(name) for name in reader.entries}
        else:
            tensors |= {name: Mapped(tensor) for name, tensor in _unpickled(path).items()}
    return tensors


def damage(folder: Path) -> str:
    """Return a text that names the damaged small file in ``folder`` and the reason, or ``""``."""
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.index.json")]):
        try:
            data = json.loads(small_file(path))
        except (OSError, ValueError, RecursionError) as error:
            return f"{path} cannot be read: {error}"
        if not isinstance(data, dict):
            return f"{path} must hold a JSON object, got {type(data).__name__}"
        files = {} if path.name == "config.json" else data.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            return f"{path} must have a weight_map from names of tensors to names of files"
    return ""


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """Map a pickle of tensors into memory, with ``weights_only``, which loads no code."""
    mapped = zipfile.is_zipfile(path)  # else a file of torch before 1.6, which is read at once, or not a checkpoint
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a pickle that was cut off or tampered with can raise anything
        reason = first_line(error)
        raise CheckpointError(f"{path} is not a complete checkpoint of tensors: {reason}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a state dict, got {type(found).__name__}")
    return {str(name): tensor.detach() for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def same_values(one: LazyTensor, other: LazyTensor) -> bool:
    """Return whether two tensors hold the same values. The same bytes of one file are equal without reading."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    stored = isinstance(one, Stored) and isinstance(other, Stored)
    if stored and (one.file.path, one.offset) == (other.file.path, other.offset):  # type: ignore[attr-defined]
        return True
    return all(torch.equal(one.read(box), other.read(box)) for box in one.slabs(_CHUNK))


# -- lazy tensors for transformers' conversions ------------------------------------------------------------------------


class Computed(LazyTensor):
    """Output number ``which`` of an operation that runs at each read; ``like`` is a meta tensor of its form.

    It runs on the box alone if all operations up to it are pointwise, otherwise on full inputs.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, which: int, like: torch.Tensor) -> None:
        bases = [leaf.lazy for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Sketch)]
        super().__init__(like.shape, like.dtype, bases)
        self._call = func, args, kwargs
        self._which = which

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        in_boxes = _in_boxes(self)
        for place, part in parts_of(box, self.dtype.itemsize) if in_boxes else ():
            out[place].copy_(self._run(part)[self._which])
        if not in_boxes:
            InMemory(self._run()[self._which]).read_into(out, box)

    def _run(self, box: Box | None = None) -> list[Any]:
        """Run the operation and return all outputs; ``box``: the box of a pointwise operation's output."""

        def real(value: Any) -> Any:
            if box is None or not isinstance(value, torch.Tensor):
                return _real(value)
            ranges = box[len(box) - value.ndim :]  # a dim of one element is broadcast
            mine = tuple((0, 1) if n == 1 else one for n, one in zip(value.shape, ranges, strict=True))
            return (value.lazy if isinstance(value, Sketch) else InMemory(value)).read(mine)

        func, args, kwargs = self._call
        return tree_leaves(func(*tree_map(real, args), **tree_map(real, kwargs)))


def _in_boxes(lazy: LazyTensor) -> bool:
    pointwise = not isinstance(lazy, Computed) or torch.Tag.pointwise in lazy._call[0].tags
    return pointwise and all(map(_in_boxes, lazy.bases))


def _real(value: Any) -> Any:
    return value.lazy.read() if isinstance(value, Sketch) else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


class Sketch(torch.Tensor):
    """A tensor without data, contiguous on the CPU, that stands for a lazy tensor in code that works on tensors."""

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
                f"lazy loading does not support a conversion that writes into a tensor of the checkpoint ({func})\n"
                "  Load the model with transformers' from_pretrained and pass it to autopar.initialize."
            )
        # These need real tensors: a number (``item``), a write into a real tensor, another device.
        schema, device = schema_of(func), kwargs.get("device")
        tensors = schema.returns and all(str(one.type) in ("Tensor", "List[Tensor]") for one in schema.returns)
        if not tensors or schema.is_mutable or (device is not None and torch.device(device).type != "cpu"):
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


def _moved(func: Any, args: Any, kwargs: Any) -> LazyTensor | list[LazyTensor] | None:
    """Return the result of an operation that only moves or converts elements; None for other operations."""
    if func in (_ATEN.cat.default, _ATEN.stack.default):
        return _side_by_side(func is _ATEN.stack.default, *args, **kwargs)
    if not args or not isinstance(args[0], Sketch):
        return None
    lazy, first = args[0].lazy, schema_of(func).arguments[0]
    if func in (_ATEN.clone.default, _ATEN.lift_fresh.default):
        return lazy
    if func is TO_COPY.default:
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        if device is not None and torch.device(device).type != "cpu":
            return None
        return lazy if dtype is None or dtype == lazy.dtype else Converted(lazy, dtype)
    is_view = first.alias_info is not None and not schema_of(func).is_mutable
    if not is_view and func is not UNSAFE_VIEW:
        return None
    made = func(torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"), *args[1:], **kwargs)
    views = [_view(lazy, one) for one in made] if isinstance(made, list | tuple) else _view(lazy, made)
    return None if isinstance(views, list) and None in views else views  # type: ignore[return-value]


def _view(lazy: LazyTensor, like: torch.Tensor) -> LazyTensor | None:
    """Return the view of ``lazy`` with the shape, strides and offset of the meta tensor ``like``."""
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
        return None  # torch raises the error
    return Joined([unsqueezed(lazy, dim) for lazy in lazies] if stacked else lazies, dim)

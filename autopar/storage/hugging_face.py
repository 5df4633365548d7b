"""The weight files of a Hugging Face checkpoint as lazy tensors: safetensors, or what ``torch.save`` writes."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from autopar.errors import CheckpointError, first_line
from autopar.storage.files import RangeFile, small_file
from autopar.storage.lazy_tensor import InMemory, LazyTensor, Stored
from autopar.storage.safetensors_io import SafetensorsReader, nbytes
from autopar.storage.views import permuted

_CHUNK = 1 << 24  # bytes that are compared at a time


def open_files(
    files: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str] = "", mapped: bool = False
) -> dict[str, LazyTensor]:
    """Open files: name -> lazy tensor; of each file only the header is read. A later file takes precedence.

    Args:
        folder: if it is a folder on this machine, no file may lie outside of it.
        mapped: whether tensors may lie in maps of the safetensors files.

    Raises:
        CheckpointError: a file is missing, truncated, no checkpoint, or outside of ``folder``.
    """
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        path = Path(file)
        if folder and os.path.isdir(folder):
            _check_inside(path, Path(folder))
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: the checkpoint has {len(files)} weight files, this is one of them"
            )
        tensors.update(_open_safetensors(path, mapped) if path.suffix == ".safetensors" else _open_pickled(path))
    return tensors


def damage(folder: Path) -> str:
    """Tell which of the small files in ``folder`` that loading reads is damaged, and why; "" if none is."""
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.index.json")]):
        try:
            data = json.loads(small_file(path))
        except (OSError, ValueError, RecursionError) as error:
            return f"{path} cannot be read: {error}"
        if not isinstance(data, dict):
            return f"{path} holds a {type(data).__name__}, not an object"
        files = {} if path.name == "config.json" else data.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            return f"{path} has no weight_map from names of tensors to names of files"
    return ""


def _check_inside(path: Path, folder: Path) -> None:
    """Check the names as they are written: a cache may well link its files to another place."""
    if not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)):
        raise CheckpointError(
            f"the index in {folder} names {os.path.relpath(path, folder)}, which is outside of the folder"
        )


def _open_safetensors(path: Path, mapped: bool) -> dict[str, LazyTensor]:
    reader = SafetensorsReader(path, mapped)
    return {name: reader.lazy(name) for name in reader.entries}


def _open_pickled(path: Path) -> dict[str, LazyTensor]:
    """Open a zip archive of raw storages and a pickle, with ``weights_only``: it can name tensors, not code."""
    if not zipfile.is_zipfile(path):  # torch before 1.6, or no checkpoint at all: has to be read whole
        return {name: InMemory(tensor) for name, tensor in _unpickled(path, "cpu").items()}
    size, file = path.stat().st_size, RangeFile(path)
    return {name: _of_storage(name, tensor, file, size) for name, tensor in _unpickled(path, "meta").items()}


def _unpickled(path: Path, device: str) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a pickle that was cut off or tampered with can raise anything
        reason = first_line(error)
        raise CheckpointError(f"{path} is no whole checkpoint of tensors: {reason}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state dict")
    return {str(name): tensor.detach() for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def _of_storage(name: str, tensor: torch.Tensor, file: RangeFile, size: int) -> LazyTensor:
    storage = tensor.untyped_storage()
    begin: int | None = getattr(storage, "_checkpoint_offset", None)
    if begin is None:
        raise CheckpointError(f"{file.path} does not say where {name} lies")
    steps = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -steps[dim])  # dims from the slowest to the fastest
    stored = tensor.permute(order)
    start = begin + int(tensor.storage_offset()) * tensor.element_size()
    if not stored.is_contiguous():
        raise CheckpointError(
            f"{file.path} holds {name} with gaps: shape {list(tensor.shape)}, strides {list(tensor.stride())}\n"
            "  Load the model with transformers' from_pretrained and pass it to autopar.initialize."
        )
    if start + nbytes(tensor.dtype, tuple(tensor.shape)) > size:
        raise CheckpointError(f"{file.path} is truncated: it has {size} bytes and ends before {name}")
    lazy: LazyTensor = Stored(file, start, tensor.dtype, stored.shape)
    return lazy if order == sorted(order) else permuted(lazy, [order.index(dim) for dim in range(tensor.ndim)])


def same_values(one: LazyTensor, other: LazyTensor) -> bool:
    """Tell whether two tensors hold the same values; the same bytes of one file are not read."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    stored = isinstance(one, Stored) and isinstance(other, Stored)
    if stored and (one.file.path, one.offset) == (other.file.path, other.offset):  # type: ignore[attr-defined]
        return True
    if not one.shape:
        return torch.equal(one.read(), other.read())
    rows = max(1, _CHUNK // max(1, nbytes(one.dtype, one.shape[1:])))
    for start in range(0, one.shape[0], rows):
        box = ((start, min(start + rows, one.shape[0])), *((0, size) for size in one.shape[1:]))
        if not torch.equal(one.read(box), other.read(box)):
            return False
    return True

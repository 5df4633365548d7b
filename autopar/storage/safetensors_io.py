"""Read and write safetensors files one tensor at a time, with a checksum of each.

The official library maps full files or needs all tensors in memory, which is too much for merging a large checkpoint.
Files written here are bitwise equal to files of ``safetensors.torch.save_file``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from autopar.errors import CheckpointError
from autopar.storage.files import Closing, OutputFile, RangeFile, checksum
from autopar.storage.lazy_tensor import LazyTensor, Stored, memory

# The names in the order of the format; a file holds tensors in the reverse order of these, then by name.
_CODES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}
_RANK = {code: rank for rank, code in enumerate(_CODES)}
_CHUNK = 1 << 20  # bytes that are copied or verified at a time; fits into a core's cache


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return ``torch.float32`` for ``float32``. Raises ``ValueError`` for a dtype outside of the safetensors format."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype not in _CODE_OF:
        raise ValueError(f"{name!r} is not a dtype of the safetensors format")
    return dtype


def nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Count the bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


Spec = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and the shape of a tensor."""


class TensorLocation(NamedTuple):
    """The dtype, shape and byte range ``[start, stop)`` of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsWriter(Closing):
    """A context manager that writes one file, without fsync. Write the tensors in the order of :attr:`order`.

    Attributes:
        order: The names in the order of the file.
        checksums: Name -> checksum of the tensor.
        header: The checksum of everything before the first tensor.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._tensors = dict(tensors)
        for name, (dtype, _) in self._tensors.items():
            if dtype not in _CODE_OF:
                raise CheckpointError(f"{name} has dtype {dtype_name(dtype)}, which safetensors does not support")
        dtypes = {name: dtype for name, (dtype, _) in self._tensors.items()}
        self.order = sorted(dtypes, key=lambda name: (-_RANK[_CODE_OF[dtypes[name]]], name))
        self.checksums: dict[str, str] = {}
        self._next = iter(self.order)
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")  # reused: allocating is slower than copying
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for name in self.order:
            dtype, shape = self._tensors[name]
            stop = offset + nbytes(dtype, shape)
            header[name] = {"dtype": _CODE_OF[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file = OutputFile(path)
        text = len(text).to_bytes(8, "little") + text
        self.header = checksum(text)
        self._file.append(text)

    def _is_next(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if name != next(self._next, None) or (dtype, shape) != self._tensors[name]:
            raise ValueError(f"{name} must be written in the order of {self.path.name}, with its dtype and shape")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, from any device. Raises ``ValueError`` for another tensor than the next one."""
        self._is_next(name, tensor.dtype, tuple(tensor.shape))
        on_cpu = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        data = memory(on_cpu)
        self._file.append(data)
        self.checksums[name] = checksum(data)

    def copy(self, name: str, lazy: LazyTensor) -> None:
        """Copy the next tensor, without a checksum. Raises ``ValueError`` for another tensor than the next one."""
        dtype, _ = self._tensors.get(name, (lazy.dtype, ()))
        self._is_next(name, dtype, lazy.shape)
        for box in lazy.slabs(_CHUNK):
            shape = tuple(stop - start for start, stop in box)
            size = nbytes(dtype, shape)
            if self._scratch.numel() < size:
                self._scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
            slab = self._scratch[:size].view(dtype).view(shape)
            lazy.read_into(slab, box)
            self._file.append(memory(slab))

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None and (left := len([*self._next])):
                raise ValueError(f"{self.path.name} lacks {left} tensors")
        finally:
            self._file.close()


class SafetensorsReader(Closing):
    """A context manager that reads one file. ``header``: the checksum of everything before the first tensor.

    Raises:
        CheckpointError: The header is malformed or does not fit the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = RangeFile(path)
        self._file.size()  # raises if the file cannot be opened
        try:
            with safe_open(path, "pt"):  # checks the header, and that its tensors fill the file
                self.metadata, self.entries = self._read_header()
        except (SafetensorError, KeyError) as error:
            said = f"{error} is not a supported dtype" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{path} is not a complete safetensors file: {said}") from error

    def _read_header(self) -> tuple[dict[str, str], dict[str, TensorLocation]]:
        start = bytearray(8)
        self._file.read_into(memoryview(start), 0)
        text = bytearray(int.from_bytes(start, "little"))
        self._file.read_into(memoryview(text), 8)
        self.header = checksum(bytes(start + text))
        header = json.loads(text)
        metadata, begin, entries = header.pop("__metadata__", None) or {}, 8 + len(text), {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            entries[name] = TensorLocation(_CODES[entry["dtype"]], tuple(entry["shape"]), begin + first, begin + last)
        return metadata, entries

    def lazy(self, name: str) -> Stored:
        """Return one tensor as a lazy tensor, without verification."""
        entry = self.entries[name]
        return Stored(self._file, entry.start, entry.dtype, entry.shape)

    def verify(self, name: str, expected: str) -> None:
        """Raise CheckpointError unless the bytes of ``name`` have the expected checksum. Needs little memory."""
        entry, state = self.entries[name], xxhash.xxh3_64()
        buffer = memoryview(bytearray(min(_CHUNK, entry.stop - entry.start)))
        for at in range(entry.start, entry.stop, _CHUNK):
            chunk = buffer[: min(_CHUNK, entry.stop - at)]
            self._file.read_into(chunk, at)
            state.update(chunk)
        if state.hexdigest() != expected:
            raise CheckpointError(
                f"{self.path} is damaged: the bytes of {name} have another checksum than when they were saved"
            )

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        self._file.close()

"""Read and write safetensors files one tensor at a time, with a checksum of each.

The official library maps whole files or wants all tensors in memory at once; merging a large checkpoint can afford
neither. Files written here are byte for byte what ``safetensors.torch.save_file`` would write.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from autopar.errors import CheckpointError

__all__ = ["Entry", "SafetensorsReader", "SafetensorsWriter", "dtype_name", "dtype_of", "nbytes"]

# The format's names in its own order; a file holds tensors from the last of these to the first, then by name.
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
_MAX_HEADER = 100_000_000
_CHUNK = 1 << 24


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``torch.float32`` for ``float32``. Raises ``ValueError`` for what a safetensors file cannot hold."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype not in _CODE_OF:
        raise ValueError(f"{name!r} is no dtype that a safetensors file can hold")
    return dtype


def nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


class Entry(NamedTuple):
    """Where one tensor lies: ``[start, stop)`` in bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())


class SafetensorsWriter:
    """Writes one file; a context manager. Tensors must come in the order of :attr:`order`.

    Args:
        path: the file to make.
        tensors: name -> (dtype, shape) of everything that the file will hold.
        metadata: strings for the header.

    Attributes:
        order: the names in the order in which they lie in the file.
        checksums: name -> CRC-32 of what was written.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self.path = path
        self._tensors = dict(tensors)
        for name, (dtype, _) in self._tensors.items():
            if dtype not in _CODE_OF:
                raise CheckpointError(f"{name} has dtype {dtype_name(dtype)}, which a safetensors file cannot hold")
        self.order = sorted(self._tensors, key=lambda name: (-_RANK[_CODE_OF[self._tensors[name][0]]], name))
        self.checksums: dict[str, int] = {}
        self._next = iter(self.order)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for name in self.order:
            dtype, shape = self._tensors[name]
            stop = offset + nbytes(dtype, shape)
            header[name] = {"dtype": _CODE_OF[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file = open(path, "wb")  # noqa: SIM115  (closed by __exit__)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor; it is copied to the CPU and made contiguous. Raises ``ValueError`` out of order."""
        if name != next(self._next, None) or (tensor.dtype, tuple(tensor.shape)) != self._tensors[name]:
            raise ValueError(f"{name} is not the tensor that comes next in {self.path.name}")
        data = _bytes(tensor.detach().to("cpu").contiguous())
        self._file.write(data)
        self.checksums[name] = zlib.crc32(data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                if len(self.checksums) != len(self.order):
                    raise ValueError(f"{self.path.name} lacks {len(self.order) - len(self.checksums)} tensors")
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


class SafetensorsReader:
    """Reads one file with plain reads, no memory map; a context manager.

    Attributes:
        metadata: the strings of the header.
        entries: name -> :class:`Entry`, in the order of the header.

    Raises:
        CheckpointError: with the file's name, if the header is malformed or points outside of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115  (closed by __exit__)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        try:
            self.metadata, self.entries = self._header()
        except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
            self._file.close()
            raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error

    def _header(self) -> tuple[dict[str, str], dict[str, Entry]]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        begin = 8 + length
        if size < 8 or length > _MAX_HEADER or begin > size:
            raise ValueError(f"it has {size} bytes, its header alone should have {begin}")
        header = json.loads(self._file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no mapping")
        metadata = {str(key): str(value) for key, value in (header.pop("__metadata__", None) or {}).items()}
        entries: dict[str, Entry] = {}
        for name, entry in header.items():
            dtype, shape = _CODES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            start, stop = (int(offset) for offset in entry["data_offsets"])
            if min(shape, default=0) < 0 or start < 0 or stop - start != nbytes(dtype, shape):
                raise ValueError(f"the sizes of {name} in its header contradict each other")
            if begin + stop > size:
                raise ValueError(f"it ends before {name}: it has {size} bytes, {name} ends at {begin + stop}")
            entries[name] = Entry(dtype, shape, begin + start, begin + stop)
        return metadata, entries

    def read(self, name: str, checksum: int | None = None) -> torch.Tensor:
        """One tensor, on the CPU. Raises CheckpointError if it cannot be read or its CRC-32 is not ``checksum``."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        data = _bytes(tensor)
        try:
            self._file.seek(entry.start)
            done = self._file.readinto(data)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        if done != len(data):
            raise CheckpointError(f"{self.path} is truncated: it ends inside {name}")
        if checksum is not None and zlib.crc32(data) != checksum:
            raise self._damaged(name)
        return tensor

    def verify(self, name: str, checksum: int) -> None:
        """Raise CheckpointError if the bytes of ``name`` do not have that CRC-32; needs little memory."""
        actual = 0
        for chunk in self._chunks(self.entries[name]):
            actual = zlib.crc32(chunk, actual)
        if actual != checksum:
            raise self._damaged(name)

    def _damaged(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged: the bytes of {name} are not those that were saved (CRC-32 differs)"
        )

    def _chunks(self, entry: Entry) -> Iterator[bytes]:
        try:
            self._file.seek(entry.start)
            left = entry.stop - entry.start
            while left:
                chunk = self._file.read(min(left, _CHUNK))
                if not chunk:
                    raise CheckpointError(f"{self.path} is truncated")
                left -= len(chunk)
                yield chunk
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""Read files by byte ranges, write them sequentially, and compute their checksums.

All checksums of a checkpoint are XXH3 with 64 bits, as 16 hexadecimal digits. It runs at the speed of memory (measured:
20 GB/s on one core, CRC-32 4 GB/s). It detects accidental damage, not forgery. https://xxhash.com
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import xxhash

from autopar.errors import CheckpointError

_opening = threading.Lock()


class Closing:
    """A base class of context managers that call :meth:`close` on exit."""

    def close(self) -> None:
        """Release the resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RangeFile(Closing):
    """A file that any number of threads read by byte ranges, opened at the first read; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._first: tuple[int, int] | None = None  # size and modification time at the first open

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes from ``offset`` on. Raises CheckpointError if the file ends before."""
        self.read_runs(target, [(0, offset)], len(target))

    def read_runs(self, target: memoryview, places: Iterable[tuple[int, int]], length: int) -> None:
        """Read runs of ``length`` bytes; ``places``: offset in ``target`` and offset in the file of each run.

        A row-parallel weight has one run per row, so this loop contains only the calls (measured: 1.5 us each, without
        copying). Raises CheckpointError if the file ends before.
        """
        preadv, handle = os.preadv, self._opened()
        try:
            for here, there in places:
                done = preadv(handle, [target[here : here + length]], there)
                while done < length:  # one call reads at most 2 GiB
                    more = preadv(handle, [target[here + done : here + length]], there + done)
                    if more == 0:
                        raise CheckpointError(
                            f"{self.path} is truncated: expected at least {there + length} bytes, got {there + done}"
                        )
                    done += more
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error

    def _opened(self) -> int:
        with _opening:
            try:
                if self._handle is None:
                    self._handle = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
            self._first = self._first or self._state(self._handle)
        return self._handle

    def _state(self, handle: int) -> tuple[int, int]:
        found = os.fstat(handle)
        return found.st_size, found.st_mtime_ns

    def size(self) -> int:
        """Return the bytes of the file. Raises CheckpointError if it cannot be opened."""
        return self._state(self._opened())[0]

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file was changed or removed after the first open."""
        if self._first is not None and (now := self._state(self._opened())) != self._first:
            grown = f" (it had {self._first[0]} bytes, now {now[0]})" if now[0] != self._first[0] else ""
            raise CheckpointError(
                f"{self.path} changed during loading{grown}: the weights may be a mix of both versions.\n"
                "  Load it again after the write. Write checkpoints to a temporary file, and rename it."
            )

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


# -- writing -----------------------------------------------------------------------------------------------------------

_PIECE = 1 << 17  # bytes in one call
_EARLY = 1 << 23  # bytes after which the disk starts to write


class OutputFile(io.FileIO):
    """A new file that is written sequentially. Methods raise ``OSError``.

    The disk writes while later data is copied, not only at the fsync (measured: 1 GB in 0.9 s instead of 1.2 s). Calls
    are small, because the kernel allocates blocks of the size of a call, and a virtual machine may request large blocks
    from its host (measured: 1 GB in 0.3 s with calls of 128 KiB, 1.2 s with 2 MiB).
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._written = self._begun = 0

    def append(self, data: bytes | memoryview) -> None:
        """Write these bytes at the end."""
        view = memoryview(data)
        while view:
            done = self.write(view[:_PIECE])
            view = view[done:]
            self._written += done
            if self._written - self._begun >= _EARLY:
                until = self._written // _PIECE * _PIECE  # an incomplete page would be written twice
                if hasattr(os, "posix_fadvise"):  # on Linux this starts the write of these pages
                    advice = os.POSIX_FADV_DONTNEED
                    os.posix_fadvise(self.fileno(), self._begun, until - self._begun, advice)
                self._begun = until


# -- checksums ---------------------------------------------------------------------------------------------------------

NAME = "xxh3"


def checksum(data: bytes | memoryview) -> str:
    """Return the XXH3-64 of a buffer."""
    return xxhash.xxh3_64(data).hexdigest()


def small_file(path: Path) -> bytes:
    """Read a small file. Raises ``OSError`` if that fails, or for a named pipe or a device."""
    if path.exists() and not path.is_file():
        raise OSError("it must be a regular file")
    return path.read_bytes()


def file_checksum(path: Path) -> str:
    """Return the XXH3-64 of a file. Raises CheckpointError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

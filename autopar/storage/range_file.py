"""A file that is read by byte ranges, or mapped where that was asked for."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from autopar.errors import CheckpointError
from autopar.storage.private_map import private_map

__all__ = ["RangeFile"]

_opening = threading.Lock()


class RangeFile:
    """A file that is read by byte ranges, by any number of threads; opened at the first read. A context manager.

    Args:
        path: the file.
        mapped: whether tensors may lie in a private map of it, instead of being read. A write into such a tensor copies
            the page, and never reaches the file. But as long as a page was not written, it shows what the file holds:
            one that is overwritten in place changes the tensors.
    """

    def __init__(self, path: Path, mapped: bool = False) -> None:
        self.path = path
        self.mapped = mapped
        self._handle: int | None = None

    def view(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor | None:
        """Return the mapped memory from byte ``offset`` on as a contiguous tensor, which keeps its map alive.

        None where the system has no map to give: too many of them, no memory, or a file system without.

        Raises:
            CheckpointError: the file cannot be opened, or ends before.
        """
        length = math.prod(shape) * dtype.itemsize
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            handle = self._opened()
            size = os.fstat(handle).st_size
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be mapped: {error}; disable_mmap=True reads it") from error
        if size < offset + length:
            raise self._truncated(size, offset + length)
        # a map for each tensor: of one for all, the kernel also brings in pages of neighbours
        pages = private_map(handle, start, offset - start + length)
        if pages is None:
            return None
        return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=offset - start).view(tuple(shape))

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes from ``offset`` on. Raises CheckpointError if the file ends before."""
        self.read_runs(target, [(0, offset)], len(target))

    def read_runs(self, target: memoryview, places: Iterable[tuple[int, int]], length: int) -> None:
        """Read runs of ``length`` bytes, for each its place in ``target`` and its offset in the file.

        A row-parallel weight has one in every row, so this loop holds nothing but the calls (measured: 1.5 us each
        beside the copying).

        Raises:
            CheckpointError: the file ends before.
        """
        preadv = os.preadv
        try:
            handle = self._opened()
            for here, there in places:
                done = preadv(handle, [target[here : here + length]], there)
                while done < length:  # one call reads at most 2 GiB
                    more = preadv(handle, [target[here + done : here + length]], there + done)
                    if more == 0:
                        raise self._truncated(there + done, there + length)
                    done += more
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error

    def _opened(self) -> int:
        with _opening:
            if self._handle is None:
                self._handle = os.open(self.path, os.O_RDONLY)
        return self._handle

    def _truncated(self, found: int, needed: int) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated: it ends at byte {found}, {needed} are needed")

    def close(self) -> None:
        """Close the file; a later read opens it again. Tensors keep the maps that they lie in."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> RangeFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

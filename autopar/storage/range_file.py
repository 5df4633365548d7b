"""A file that is read by byte ranges, or mapped."""

from __future__ import annotations

import ctypes
import enum
import functools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar.errors import CheckpointError
from autopar.storage.private_map import pages_can_be_replaced, private_map

__all__ = ["Access", "Pages", "RangeFile"]

_opening = threading.Lock()


class Access(enum.Enum):
    """How tensors come out of a file.

    ``READ`` them. ``MAP`` them where their bytes lie together: as long as a page was not written, it shows what the
    file holds, so one that is overwritten in place changes the tensors. ``OWN`` maps them too, until they are used
    (:class:`~autopar.storage.takeover.Takeover`): then they are the process's own. A file system in user
    space (FUSE) may hang when several threads wait for its pages: of such a one ``OWN`` reads.
    """

    READ = "read"
    MAP = "map"
    OWN = "own"

    @classmethod
    def of(cls, disable_mmap: bool | None) -> Access:
        """Return what transformers' argument asks for: True reads, False maps, None (its default) is up to us."""
        if disable_mmap is None:
            return cls.OWN if pages_can_be_replaced() else cls.READ
        return cls.READ if disable_mmap else cls.MAP


class Pages(NamedTuple):
    """The pages that a tensor lies in: their address, bytes, and the map, which lives as long as its tensors."""

    map: weakref.ref[Any]
    address: int
    length: int


class _Stamp(NamedTuple):
    size: int
    modified: int  # ns
    changed: int  # ns; also when it gets another name, owner or mode
    known: tuple[int, ...]  # what else changes then

    def is_of(self, other: _Stamp) -> bool:
        """Whether nobody has written into the file between them; a copy may set back when it was modified."""
        same = self[:2] == other[:2]
        return same and (self.changed == other.changed or self.known != other.known)


class RangeFile:
    """A file that is read by byte ranges, by any number of threads; opened at the first read. A context manager.

    Args:
        path: the file.
        access: whether tensors may lie in a private map of it, instead of being read. A write into such a tensor copies
            the page, and never reaches the file.

    Attributes:
        maps: with ``Access.OWN`` the pages of all tensors that lie in maps.
    """

    def __init__(self, path: Path, access: Access = Access.READ) -> None:
        self.path = path
        self.access = Access.READ if access is Access.OWN and _lies_in_user_space(path) else access
        self.maps: list[Pages] = []
        self._handle: int | None = None
        self._stamp: _Stamp | None = None

    @property
    def mapped(self) -> bool:
        """Whether tensors may lie in maps."""
        return self.access is not Access.READ

    def view(self, offset: int, dtype: torch.dtype, shape: Sequence[int], kept: bool = True) -> torch.Tensor | None:
        """Return the mapped memory from byte ``offset`` on as a contiguous tensor, which keeps its map alive.

        None where the system has no map to give: too many of them, no memory, or a file system without.

        Args:
            kept: the tensor stays, so that its pages belong to :attr:`maps`.

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
        if kept and self.access is Access.OWN:
            self.maps.append(Pages(weakref.ref(pages), ctypes.addressof(pages), offset - start + length))
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
            if self._stamp is None:
                self._stamp = _stamp(self._handle)
        return self._handle

    def check_unchanged(self) -> None:
        """Check that nothing has written into the file since it was opened first, or put another one in its place.

        Raises:
            CheckpointError: something has, or the file is gone.
        """
        if self._stamp is None:
            return
        try:
            now = _stamp(self._opened())
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        if not now.is_of(self._stamp):
            grown = f" (it had {self._stamp.size} bytes, now {now.size})" if now.size != self._stamp.size else ""
            raise CheckpointError(
                f"{self.path} was written to while it was being loaded{grown}: the weights may be of both files.\n"
                "  Load it again once nothing writes to it; write checkpoints to another file, and rename that."
            )

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


def _stamp(handle: int) -> _Stamp:
    found = os.fstat(handle)
    known = (found.st_nlink, found.st_mode, found.st_uid, found.st_gid)
    return _Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, known)


def _lies_in_user_space(path: Path) -> bool:
    """Tell whether a program serves the file system (FUSE); False where Linux does not say."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return False  # said when it is opened
    return _file_systems().get(f"{os.major(device)}:{os.minor(device)}", "").startswith("fuse")


@functools.lru_cache(maxsize=1)
def _mounts(text: str) -> dict[str, str]:
    """Return device -> type of the file system, of ``/proc/self/mountinfo`` (proc(5))."""
    found = {}
    for line in text.splitlines():
        mount, _, system = line.partition(" - ")
        found[mount.split()[2]] = system.split()[0]
    return found


def _file_systems() -> dict[str, str]:
    try:
        return _mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    except (OSError, IndexError):
        return {}

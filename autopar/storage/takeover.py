"""Weights that lie in maps of files when a model is loaded move into memory of the process's own at their first use.

A map is there at once, where reading has to wait for fresh memory and fill it. But a map shows what the file holds, and
files are overwritten. So before the model runs, is saved or is forked, memory takes the place of its pages
(:func:`~autopar.storage.private_map.replace_pages`), in pieces, so that hardly anything is held twice; and no
file may have changed since it was opened. What the program has written into the weights stays; what it has moved
elsewhere by then (to a GPU, to another dtype) need not be copied at all.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from autopar.errors import CheckpointError
from autopar.storage.private_map import HUGE, replace_pages
from autopar.storage.range_file import Pages, RangeFile
from autopar.storage.threads import in_threads

__all__ = ["Takeover"]

_PIECE = 2 * HUGE  # bytes that each thread holds twice, or an eighth of a large weight
_PIECES = 8  # of one map at most: each is an area of memory of its own, of which a process may have 65,530
_pending: weakref.WeakSet[Takeover] = weakref.WeakSet()


class Takeover:
    """What is left to do for the weights that lie in maps of these files.

    Args:
        files: that have been mapped, and read; their ``maps`` are taken.
        threads: how many copy at a time.

    Attributes:
        copies: whether there are any maps.
        at_end: called once after it is done without an error.
    """

    def __init__(self, files: Iterable[RangeFile] = (), threads: int = 1) -> None:
        files = list(dict.fromkeys(files))
        self._maps = [_Map(file, pages) for file in files for pages in file.maps]
        self.copies = bool(self._maps)
        self._files = files if self.copies else []
        self._threads = threads
        self.at_end: Callable[[], None] | None = None
        self._error: str | None = None
        self._ended = not self.copies
        self._working = threading.RLock()  # of threads that wait the first does it; a signal's handler does it again
        for file in files:
            file.maps = []
        if self.copies:
            _pending.add(self)

    def wait(self, *, traced: bool = False) -> None:
        """Return when the weights lie in the process's own memory. Nobody may write into them meanwhile.

        Args:
            traced: a graph is being traced, which is guarded by what there is: :attr:`at_end` comes later.

        Raises:
            CheckpointError: a file was written to meanwhile, or the memory did not suffice; at every call.
        """
        if not self._ended:
            with self._working:
                self._finish()
        if self._error is not None:
            raise CheckpointError(self._error)
        if self.at_end is not None and not traced:
            done, self.at_end = self.at_end, None
            done()

    def _finish(self) -> None:
        if self._ended:
            return
        maps = [one for one in self._maps if one.pages.map() is not None]  # the others' weights lie elsewhere by now
        threads, self._threads = self._threads, 1  # a handler meanwhile starts none
        error = next((failed for failed in in_threads(_replace, maps, threads) if failed), None)
        if self._ended:  # done by a signal's handler
            return
        try:
            for file in dict.fromkeys(one.file for one in maps):
                file.check_unchanged()  # says more than that pages are gone
        except CheckpointError as changed:
            error = str(changed)
        for file in self._files:
            file.close()
        self._error, self._ended, self._maps, self._files = error, True, [], []
        _pending.discard(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Takeover:
        """Share it: a copy of the model has copies of what it was loaded with."""
        return self


class _Map(NamedTuple):
    file: RangeFile
    pages: Pages


def _replace(one: _Map) -> str | None:
    """Replace all pages of a map; return what keeps it from that."""
    held = one.pages.map()  # not unmapped meanwhile
    if held is None:
        return None
    for address, length in _pieces(one.pages.address, one.pages.length):
        failed = replace_pages(address, length)
        if failed:
            reason = "it ends before" if failed == errno.EFAULT else os.strerror(failed)
            return f"{one.file.path}: weights that lie in a map of it cannot be copied: {reason}"
    return None


def _pieces(address: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield addresses and bytes that end where huge pages do."""
    stop = address + length
    piece = max(_PIECE, -(-length // _PIECES // HUGE) * HUGE)
    while address < stop:
        end = min(stop, (address // piece + 1) * piece)
        yield address, end - address
        address = end


def _finish_all() -> None:
    """Before a fork: the child reads the same files later."""
    for takeover in list(_pending):
        with takeover._working:
            takeover._finish()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_finish_all)

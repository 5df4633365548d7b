"""Weights that lie in maps of files when a model is loaded move into memory of the process's own at their first use.

A map is there at once, where reading has to wait for fresh memory and fill it. But a map shows what the file holds, and
files are overwritten; and it lies where the file has it, where MKL's products with one row of float32 round otherwise
than at a multiple of 16 bytes (measured). So before the model runs, is saved or is forked, its weights get storage as
torch gives it, in pieces, so that hardly anything is held twice; and no file may have changed since it was opened. A
storage that somebody else looks at, too (a view, an array), stays where it is: memory takes the place of its pages
(:func:`~autopar.storage.private_map.replace_pages`).

What the program has written into the weights stays; what it has moved elsewhere by then (to a GPU, to another dtype)
need not be copied at all.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autopar.errors import CheckpointError
from autopar.storage.huge_pages import empty
from autopar.storage.private_map import HUGE, copy_pages, drop_clean_pages, replace_pages
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
        model: has the weights; what is not found in it by then stays at its address.

    Attributes:
        copies: whether there are any maps.
        at_end: called once after it is done without an error.
    """

    def __init__(self, files: Iterable[RangeFile] = (), threads: int = 1, model: nn.Module | None = None) -> None:
        files = list(dict.fromkeys(files))
        self._maps = [_Map(file, pages) for file in files for pages in file.maps]
        self.copies = bool(self._maps)
        self._files = files if self.copies else []
        self._threads = threads
        self._model = weakref.ref(model) if model is not None else lambda: None
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
        weights = _by_address(self._model())
        error = next((failed for failed in in_threads(lambda one: _own(one, weights), maps, threads) if failed), None)
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


def _by_address(model: nn.Module | None) -> dict[int, nn.Parameter]:
    """Return the plain parameters of a model by the address of their storage."""
    plain = [each for each in model.parameters() if type(each) is nn.Parameter] if model is not None else []
    return {each.untyped_storage().data_ptr(): each for each in plain if each.device.type == "cpu"}


def _own(one: _Map, weights: dict[int, nn.Parameter]) -> str | None:
    """Make what lies in a map the process's own; return what keeps it from that."""
    held = one.pages.map()  # not unmapped meanwhile
    if held is None:
        return None
    weight = weights.get(one.pages.data)
    failed = _replace(one.pages) if weight is None or _shares(weight) else _move(one.pages, weight)
    if not failed:
        return None
    reason = "it ends before" if failed == errno.EFAULT else os.strerror(failed)
    return f"{one.file.path}: weights that lie in a map of it cannot be copied: {reason}"


def _shares(weight: nn.Parameter) -> bool:
    """Tell whether another tensor, or an array, lies in the same storage."""
    storage = weight.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # of the weight, and of the object here


def _replace(pages: Pages) -> int:
    return next(filter(None, (replace_pages(*piece) for piece in _pieces(pages.address, pages.length))), 0)


def _move(pages: Pages, weight: nn.Parameter) -> int:
    """Give a weight other storage. Nothing is lost if it is interrupted, and done again."""
    with _disable_current_modes(), torch.inference_mode(False):  # whoever uses it first
        stop = pages.address + pages.length
        fresh = empty((stop - pages.data,), torch.uint8, torch.device("cpu"))
        for address, length in _pieces(pages.address, pages.length):
            start = max(address, pages.data)
            failed = copy_pages(start, fresh.data_ptr() + start - pages.data, address + length - start)
            if failed:
                return failed
            drop_clean_pages(address, length)
        if weight.untyped_storage().data_ptr() == pages.data:  # a signal's handler has not done it meanwhile
            place = weight.size(), weight.stride(), weight.storage_offset()
            weight.data = fresh.view(weight.dtype).as_strided(*place)
    return 0


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

"""Maps of files that hold no file descriptor, and memory of the process's own in the place of their pages.

Python's ``mmap`` keeps a descriptor for each map as long as it lives; a thousand weights would use up what a process
may have (``ulimit -n``).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["HUGE", "ask_for_huge_pages", "pages_can_be_replaced", "private_map", "replace_pages"]

HUGE = 1 << 21
"""Bytes of a huge page; where memory begins at a multiple of it, Linux can give some."""

_FAILED = ctypes.c_void_p(-1).value
_MOVE_ONTO = 1 | 2 | 4  # MREMAP_MAYMOVE, _FIXED, _DONTUNMAP of mremap(2), Linux 5.7
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE


def private_map(handle: int, start: int, length: int) -> Any:
    """Map ``length`` bytes of an open file from a page on: a writable buffer whose writes never reach the file.

    The map lives as long as the buffer. None where the system gives none.
    """
    system = _system()
    if system is None:
        return None
    address = system.mmap(None, length, _WRITABLE, mmap.MAP_PRIVATE, handle, start)
    if address in (None, _FAILED):
        return None
    buffer = (ctypes.c_char * length).from_address(address)
    weakref.finalize(buffer, system.munmap, address, length).atexit = False
    return buffer


def replace_pages(address: int, length: int) -> int:
    """Put memory of the process's own in the place of pages of a private map, with what is in them.

    Copied pages of a map would not do: where a file is cut off, Linux takes those away as well. The kernel copies: it
    says so where a file is cut off meanwhile, which would end the process (SIGBUS). The place changes hands in one
    call, so nothing is lost if the program is interrupted; but what another thread writes there meanwhile is. Without
    Python's lock.

    Args:
        address: of the first page.
        length: bytes.

    Returns:
        0, or the system's error: ``EFAULT`` where the file ends before, ``ENOMEM`` without memory.
    """
    system = _system()
    assert system is not None, "asked only where pages_can_be_replaced"
    room = length + HUGE
    found = system.mmap(None, room, _WRITABLE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if found in (None, _FAILED):
        return ctypes.get_errno()
    try:
        fresh = found + (address - found) % HUGE  # as far into a huge page
        ask_for_huge_pages(fresh, length)
        done = 0
        while done < length:  # one call copies at most 2 GiB
            there, here = _Piece(address + done, length - done), _Piece(fresh + done, length - done)
            copied = system.readv(os.getpid(), here, 1, there, 1, 0)
            if copied <= 0:
                return ctypes.get_errno() or errno.EFAULT
            done += copied
        moved = system.mremap(fresh, length, length, _MOVE_ONTO, address)
        return ctypes.get_errno() if moved in (None, _FAILED) else 0
    finally:
        system.munmap(found, room)


def ask_for_huge_pages(address: int, length: int) -> None:
    """Advise the system to give memory in huge pages, where it has some; whether it does matters to nobody.

    Args:
        address: of the first page.
        length: bytes.
    """
    system = _system()
    if system is not None:
        system.madvise(address, length, mmap.MADV_HUGEPAGE)


@functools.cache
def pages_can_be_replaced() -> bool:
    """Tell whether the system has :func:`replace_pages`: Linux since 5.7."""
    system = _system()
    if system is None:
        return False
    page = system.mmap(None, mmap.PAGESIZE, _WRITABLE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if page in (None, _FAILED):
        return False
    try:
        return replace_pages(page, mmap.PAGESIZE) == 0
    finally:
        system.munmap(page, mmap.PAGESIZE)


class _Piece(ctypes.Structure):
    """``struct iovec``: an address and a number of bytes."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _System(NamedTuple):
    """Functions of the C library."""

    mmap: Callable[..., Any]
    munmap: Callable[[int, int], int]
    mremap: Callable[..., Any]
    madvise: Callable[[int, int, int], int]
    readv: Callable[..., int]


@functools.cache
def _system() -> _System | None:
    """None where the functions are not known to be these."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    pointer, word, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = (pointer, word, number, number, number, ctypes.c_ssize_t), pointer
    library.munmap.argtypes, library.munmap.restype = (pointer, word), number
    library.mremap.argtypes, library.mremap.restype = (pointer, word, word, number, pointer), pointer
    library.madvise.argtypes, library.madvise.restype = (pointer, word, number), number
    readv, piece = library.process_vm_readv, ctypes.POINTER(_Piece)
    readv.argtypes, readv.restype = (number, piece, word, piece, word, word), ctypes.c_ssize_t
    return _System(library.mmap, library.munmap, library.mremap, library.madvise, readv)

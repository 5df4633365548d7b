"""Maps of files that hold no file descriptor.

Python's ``mmap`` keeps a descriptor for each map as long as it lives; a thousand weights would use up what a process
may have (``ulimit -n``).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["private_map"]

_FAILED = ctypes.c_void_p(-1).value


def private_map(handle: int, start: int, length: int) -> Any:
    """Map ``length`` bytes of an open file from a page on: a writable buffer whose writes never reach the file.

    The map lives as long as the buffer. None where the system gives none.
    """
    functions = _functions()
    if functions is None:
        return None
    map_, unmap = functions
    address = map_(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, handle, start)
    if address in (None, _FAILED):
        return None
    buffer = (ctypes.c_char * length).from_address(address)
    weakref.finalize(buffer, unmap, address, length).atexit = False
    return buffer


@functools.cache
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The C library's ``mmap`` and ``munmap``; None where they are not known to be these."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    map_, unmap = library.mmap, library.munmap
    word, number = ctypes.c_size_t, ctypes.c_int
    map_.argtypes, map_.restype = (ctypes.c_void_p, word, number, number, number, ctypes.c_ssize_t), ctypes.c_void_p
    unmap.argtypes, unmap.restype = (ctypes.c_void_p, word), number
    return map_, unmap

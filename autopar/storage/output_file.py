"""A file that is written from its beginning to its end and then lies on the disk.

The disk gets work while the rest is still being copied, not only at the fsync (measured: 1 GB in 0.6 s, else 0.9 s).
Calls are small: the kernel holds what it is given in blocks of memory as large as one call. A virtual machine may first
have to get large ones from its host (measured: a copy of 1 GB in 0.3 s in calls of 128 KiB, 1.2 s in those of 2 MiB).
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["OutputFile"]

_PIECE = 1 << 17  # bytes in one call
_EARLY = 1 << 23  # bytes after which the disk is given work
_SYNC_FILE_RANGE_WRITE = 2


class OutputFile:
    """Opened at once, for writing; what was there before is lost. Every method raises ``OSError`` as the system does.

    Args:
        path: the file to make.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (closed by close)
        self._written = 0
        self._begun = 0

    def append(self, data: bytes | memoryview) -> None:
        """Write these bytes at the end."""
        view = memoryview(data)
        while view:
            done = self._file.write(view[:_PIECE])
            view = view[done:]
            self._written += done
            if self._written - self._begun >= _EARLY:
                until = self._written // _PIECE * _PIECE  # a page that is not full would be written twice
                _begin(self._file.fileno(), self._begun, until - self._begun)
                self._begun = until

    def sync(self) -> None:
        """Return when everything is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _begin(handle: int, offset: int, count: int) -> None:
    """Send bytes of a file to the disk from now on, without waiting; no more than a hint, and only on Linux."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if function is not None:
        function(handle, ctypes.c_int64(offset), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)

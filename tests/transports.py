"""What carries the tensor-parallel collectives on the CPU, for tests of collectives: they run over both."""

import gc
import os
from pathlib import Path

import pytest

both_transports = pytest.mark.parametrize("transport", ["gloo", "shm"])
"""Parametrize a test with ``transport``, for ``MPU(..., cpu_transport=transport)`` or the config."""


def segments() -> tuple[int, int]:
    """How many shared segments of transports this process has open, and how many it has mapped."""
    gc.collect()  # autograd's graphs, in which the collector cannot look
    gc.collect()  # what they have held
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    maps = Path("/proc/self/maps").read_text()
    return sum("/memfd:autopar" in file for file in files), maps.count("/memfd:autopar")

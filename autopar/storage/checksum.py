"""The checksum of everything in a checkpoint: XXH3, 64 bits, as 16 hexadecimal digits.

It runs at the speed of memory (measured: 20 GB/s on one core, CRC-32 4 GB/s), so that nobody has a reason to turn it
off. It finds accidents, not forgers. https://xxhash.com
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

from autopar.errors import CheckpointError

__all__ = ["NAME", "checksum", "checksum_of", "file_checksum"]

NAME = "xxh3"
_CHUNK = 1 << 22


def checksum(data: bytes | memoryview) -> str:
    """Return the XXH3-64 of a buffer."""
    return xxhash.xxh3_64(data).hexdigest()


def checksum_of(chunks: Iterable[bytes | memoryview]) -> str:
    """Return the XXH3-64 of an iterable of chunks."""
    state = xxhash.xxh3_64()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def file_checksum(path: Path) -> str:
    """Return the XXH3-64 of a file. Raises CheckpointError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return checksum_of(iter(lambda: file.read(_CHUNK), b""))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

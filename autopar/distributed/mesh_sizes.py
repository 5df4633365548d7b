"""The sizes of a mesh, which also checkpoints without a process group tell."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MeshSizes"]


class MeshSizes(NamedTuple):
    """Sizes of the axes."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1

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

    def as_saved(self) -> MeshSizes:
        """Return the sizes of the mesh without cp whose ranks hold the same: to weights, cp is more dp."""
        return MeshSizes(self.tp, self.pp, self.dp * self.cp)

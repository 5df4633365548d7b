"""The sizes of a mesh, which also checkpoints without a process group tell."""

from __future__ import annotations

from typing import NamedTuple


class MeshSizes(NamedTuple):
    """Sizes of the axes."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1

    def in_words(self) -> str:
        """Return the sizes by the names that they have in a config, that of context parallelism if there is any."""
        cp = f"context_parallel_size={self.cp}, " if self.cp > 1 else ""
        return f"tensor_parallel_size={self.tp}, {cp}pipeline_parallel_size={self.pp}, data-parallel size {self.dp}"

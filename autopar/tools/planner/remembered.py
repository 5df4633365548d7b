"""Count what a recomputed block keeps of its forward: ``activation_checkpointing.save``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from autopar.activation_checkpoint import saved_operators
from autopar.distributed.recompute_tape import Tape
from autopar.tools.planner.storages import Operation, SavedStorages, Storages


class Remembered:
    """Number and bytes of the storages that ``activation_checkpointing.save`` keeps of a block's forward."""

    def __init__(self, storages: Storages, saved_storages: SavedStorages, save: tuple[str, ...]) -> None:
        self.sizes: dict[int, int] = {}
        self._storages, self._saved = storages, saved_storages
        self._tape = Tape()
        self._operators = saved_operators(save)
        if "attention" in save:
            self._operators |= {F.scaled_dot_product_attention}
        self._playing = self._tape.kept() if "collectives" in save else nullcontext()

    def __enter__(self) -> Remembered:
        self._storages.keep = self._keep if self._operators else None
        self._playing.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._storages.keep = None
        self._playing.__exit__(*error)
        self.sizes |= self._saved.numbered(self._tape.results)

    def _keep(self, operator: Any, made: Sequence[torch.Tensor]) -> None:
        if operator in self._operators:
            self.sizes |= self._saved.numbered(made)


def is_kept(operation: Operation, save: tuple[str, ...]) -> bool:
    """Return whether a recomputation finds its result."""
    return ("attention" if operation.attention else "matmuls" if operation.flops else "") in save

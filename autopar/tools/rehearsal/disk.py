"""Saving and loading without a disk: ranks say to each other what they would; nothing is written, read or uploaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autopar.checkpoint import adapters, hf_weights, load, save
from autopar.checkpoint.format import QuantizedBase
from autopar.checkpoint.save import Snapshot
from autopar.checkpoint.state import state_of


def without_disk(note: Callable[[int], None]) -> None:
    """Have this process, which is a rehearsed rank for the rest of its life, save and load without files.

    Args:
        note: called with the bytes that this rank would write, at each save.
    """

    class Writer(save.Writer):
        def make_folder(self) -> list[str]:
            return [self.request.directory, "0" * 16]

        def write_shards(self, local: Snapshot, folder: Path, save_id: str) -> dict[str, Any]:
            note(sum(_bytes(tensor) for part in local.tensors.values() for tensor in part.values()))
            return {}

        def finish(self, folder: Path, save_id: str, reports: list[dict[str, Any]]) -> None:
            """Leave the manifest unwritten: it lists files."""

    save.Writer, load.Loader = Writer, _Loader  # type: ignore[misc, assignment]
    # Rank 0's part behind the last exchange: PEFT's files, and the upload, which has no address then.
    adapters.Adapters.write_files = lambda self, whole, target: None  # type: ignore[method-assign]
    hf_weights.MergedModel.push_to_hub = lambda self, *args, **options: ""  # type: ignore[method-assign]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Loader:
    """A rank's part in loading a checkpoint that fits the model: there is nothing to read."""

    def __init__(self, model: nn.Module, folder: Path, training: Any) -> None:
        manifest = SimpleNamespace(save_id="", order=0, base=QuantizedBase(), parts={}, tensors={})
        self.shards = SimpleNamespace(folder=folder, manifest=manifest, close=lambda: None)
        self.state, self.weights = state_of(model), None
        self.tensors: dict[str, torch.Tensor] = {}

    def verify(self) -> None:
        """Compare no checksums."""

    def fill(self) -> None:
        """Leave the model as it is."""

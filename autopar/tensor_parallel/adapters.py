"""Modules of PEFT in a tensor-parallel model that are no parallel layers: dropout in front of adapters, embeddings.

Dropout in front of an adapter zeroes elements of the base layer's input. Where that is replicated (a column-parallel
base layer, which has begun a region by then) all ranks must draw the same mask; where it is sharded (a row-parallel
one, which has ended the region by then) each rank must draw its own.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.layout import Layout
from autopar.tensor_parallel.embeddings import look_up
from autopar.tensor_parallel.region_modules import RegionModule

__all__ = ["AdapterOfRows", "DropoutAlike", "DropoutApart"]


class DropoutAlike(RegionModule):
    """Dropout of a replicated activation inside a region: the same mask on all tp ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.region.outside():
            return super().forward(*args, **kwargs)


class DropoutApart(RegionModule):
    """Dropout of a sharded activation behind a region: a mask of its own on each tp rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.region.draw_per_rank(self.training)  # type: ignore[attr-defined]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.region.draw_alike()


class AdapterOfRows(RegionModule):
    """PEFT's LoRA on a vocabulary-parallel embedding: ``A`` [r, vocabulary/tp], ``B`` [hidden, r] replicated."""

    def _embed(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        layout = self.autopar.layout
        assert isinstance(layout, Layout)
        padding: int | None = self.get_base_layer().padding_idx  # type: ignore[attr-defined]
        return self.region.mark_replicated(look_up(input, weight, layout, self.tp, padding))  # [..., r]

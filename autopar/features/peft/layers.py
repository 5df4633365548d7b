"""Modules of PEFT in a tensor-parallel model that are not parallel layers: dropout, magnitudes, embeddings.

Dropout before an adapter zeroes elements of the base layer's input. If the input is replicated (column-parallel base
layer, inside its region), all ranks must draw the same mask. If it is sharded (row-parallel base layer, after its
region), each rank must draw a different mask.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.distributed.collectives import all_reduce
from autopar.layout import Layout
from autopar.tensor_parallel.layers import look_up
from autopar.tensor_parallel.region_modules import RegionModule


class DropoutAlike(RegionModule):
    """Dropout of a replicated activation inside a region: one mask on all tp ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.region.outside():
            return super().forward(*args, **kwargs)


class DropoutApart(RegionModule):
    """Dropout of a sharded activation after a region: a different mask on each tp rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.region.draw_per_rank(self.training)  # type: ignore[attr-defined]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.region.leave()


class Magnitude(RegionModule):
    """The magnitudes of DoRA for outputs with all inputs on this rank.

    PEFT treats the weight and its norms as constants, so a dry run must not track them.
    """

    def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> torch.Tensor:
        """Return the product that an adapter adds to the local weight, ``[out, in]``."""
        a, b = lora_A.weight.detach(), lora_B.weight.detach()
        return b @ a if not a.is_meta else b.new_empty(b.shape[0], a.shape[1])

    def get_weight_norm(
        self, weight: torch.Tensor, lora_weight: torch.Tensor, scaling: float, adapter_name: str | None = None
    ) -> torch.Tensor:
        """Return the norm of the weights of each output, ``[out]``."""
        if weight.is_meta:
            return lora_weight.new_empty(lora_weight.shape[0])
        weight = weight.detach().T if self.fan_in_fan_out else weight.detach()  # type: ignore[attr-defined]
        return self._norm(weight[:, : lora_weight.shape[1]] + scaling * lora_weight.detach())

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(weight, dim=1)


class MagnitudeOfParts(Magnitude):
    """The magnitudes of DoRA for outputs with sharded inputs: squares are summed over tp."""

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        return all_reduce(weight.float().square().sum(1), self.tp).sqrt().to(weight.dtype)


class AdapterOfRows(RegionModule):
    """PEFT's LoRA on a vocabulary-parallel embedding: ``A`` [r, vocabulary/tp], ``B`` [hidden, r] replicated."""

    def _embed(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        layout = self.autopar.layout
        assert isinstance(layout, Layout)
        padding: int | None = self.get_base_layer().padding_idx  # type: ignore[attr-defined]
        return self.region.mark_replicated(look_up(input, weight, layout, self.tp, padding))  # [..., r]

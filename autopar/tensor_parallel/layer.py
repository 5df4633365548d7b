"""What all parallel layers carry."""

from __future__ import annotations

from typing import Any

import torch

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import sum_replicas
from autopar.layout import Layout
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.regions import Region

__all__ = ["ParallelLayer"]


class ParallelLayer:
    """What all parallel layers carry."""

    tp: Axis
    region: Region
    autopar: ModulePlan
    autopar_layouts: dict[str, Layout]
    keeps_local = False  # a language model's head, whose loss is taken from the local logits
    skip_bias_add = False  # a layer that returns its bias beside its output
    weight: Any
    bias: Any

    def _used(self, name: str) -> torch.Tensor:
        """A parameter for use in forward: where several ranks hold the same units, their gradients are summed."""
        parameter: torch.Tensor = getattr(self, name)
        layout = self.autopar_layouts.get(name)
        return sum_replicas(parameter, self.tp, layout) if layout is not None and layout.replicated else parameter

"""The product of a parallel layer whose weight is quantized: the layer's own forward multiplies."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.distributed.gloo_collectives import all_reduce
from autopar.layout import Layout
from autopar.quantized.layers import stored_weight
from autopar.quantized.stored import Part
from autopar.tensor_parallel.overlap import WeightGradient
from autopar.tensor_parallel.parallel_layer import ParallelLayer


class StoredProduct(ParallelLayer):
    """A mixin before the column- or row-parallel layer, which is before the class of the weight's library."""

    _weight_gradient: WeightGradient | None = None  # the weight is frozen

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        stored = stored_weight(self) if self.autopar.rule == "row" else None  # type: ignore[arg-type]
        if stored is not None and stored.whole_rows is not None:
            x = stored.whole_rows(x, self._largest)
        own, kept = self._parameters, self._parameters["bias"]
        own["bias"] = bias
        try:
            y: torch.Tensor = super(ParallelLayer, self).forward(x)  # type: ignore[misc]
        finally:
            own["bias"] = kept
        # In 8 bit on a GPU it is a view out of bitsandbytes' autograd function, which nobody may sum in place.
        return y.clone() if stored is not None and stored.whole_rows is not None and y.requires_grad else y

    def _largest(self, x: torch.Tensor) -> torch.Tensor:
        return part_on(self.tp).largest(x)


def part_on(axis: Axis, layout: Layout | None = None) -> Part:
    """Return what the ranks of an axis, which hold parts of one quantized weight, do together."""

    def largest(x: torch.Tensor) -> torch.Tensor:
        all_reduce(x, op=dist.ReduceOp.MAX, group=axis.group)
        return x

    return Part(layout, axis.rank, lambda shard, of: all_gather(shard, axis, of), largest)

"""Embeddings whose table is sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.distributed.axis import Group
from autopar.distributed.collectives import gather, reduce_
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.construction import (
    InitMethod,
    layout_of,
    make_layer,
    shared_axis,
    whole_embedding,
)
from autopar.tensor_parallel.layer import ParallelLayer
from autopar.tensor_parallel.vocabulary_rows import own_rows

__all__ = ["HiddenParallelEmbedding", "VocabParallelEmbedding"]


class VocabParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding with its rows sharded: mask, look up, sum. ``[...] -> [..., hidden]``, weight Shard(0).

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: of the whole table, as for ``nn.Embedding``.
        init_method: what fills the whole table, ``init_method(weight)``; None: as ``nn.Embedding`` does.
        group: a process group or an MPU.

    Raises:
        IndexError: an id outside the whole table, on every rank (on CUDA a device-side assertion, as in torch).
    """

    weight = own_rows

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod | None = None,
        group: Group | None = None,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        axis = shared_axis(group, type(self).__name__)
        weight = whole_embedding(num_embeddings, embedding_dim, padding_idx, init_method, device, dtype)
        layout = layout_of(type(self).__name__, "num_embeddings", num_embeddings, 0, axis)
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = layout.local_size(axis.rank), embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        make_layer(self, axis, ModulePlan("", "embedding", "", layout, {"weight": layout}), {"weight": weight})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layout = self.autopar_layouts["weight"]
        (start, stop) = next(iter(layout.ranges(self.tp.rank)), (0, 0))
        _check_ids(input, layout.size)
        if start == stop:  # no rows here: zeros that still belong to the graph
            y: torch.Tensor = self.weight.new_zeros(*input.shape, self.weight.shape[1]) + self.weight.sum()
            return self.region.close(reduce_(y, self.tp))
        local = input - start
        outside = (local < 0) | (local >= stop - start)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < stop else None
        y = F.embedding(local.masked_fill(outside, 0), self.weight, padding)
        return self.region.close(reduce_(y.masked_fill(outside.unsqueeze(-1), 0), self.tp))


class HiddenParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding with its columns sharded: look up, gather. ``[...] -> [..., hidden]``, weight Shard(1)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = F.embedding(input, self.weight, self.padding_idx)
        return self.region.close(gather(y, self.tp, self.autopar_layouts["weight"]))  # [..., hidden]


def _check_ids(ids: torch.Tensor, size: int) -> None:
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < size)).all())
    elif ids.numel() and not ids.is_meta:
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= size:
            raise IndexError(f"index out of range in an embedding of {size} rows: ids run from {low} to {high}")

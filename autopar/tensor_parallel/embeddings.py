"""Embeddings whose table is sharded."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.distributed.axis import Axis, Group
from autopar.distributed.collectives import gather, reduce_
from autopar.errors import ConfigError
from autopar.foreign.tensors import assert_soon
from autopar.layout import Layout
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.parallel_layer import (
    FullWeight,
    InitMethod,
    ParallelLayer,
    layout_of,
    make_layer,
    seeded_axis,
)


class VocabParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding with its rows sharded: mask, look up, sum. ``[...] -> [..., hidden]``, weight Shard(0).

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: of the full table, as for ``nn.Embedding``.
        init_method: what fills the full table, ``init_method(weight)``; None: as ``nn.Embedding`` does.
        group: a process group or an MPU.

    Raises:
        IndexError: an id outside the full table, on every rank (on CUDA a device-side assertion, as in torch).
    """

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
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ConfigError(f"padding_idx={padding_idx} lies outside of num_embeddings={num_embeddings}")
        axis = seeded_axis(group, type(self).__name__)
        layout = layout_of(type(self).__name__, "num_embeddings", num_embeddings, 0, axis)
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        plan = ModulePlan("", "embedding", "", layout, {"weight": layout})
        plain = functools.partial(nn.Embedding, num_embeddings, embedding_dim, padding_idx)
        make_layer(self, axis, plan, plain, FullWeight(init_method, device=device, dtype=dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = look_up(input, self.weight, self.autopar_layouts["weight"], self.tp, self.padding_idx)
        return self.region.mark_replicated(y)


def look_up(
    ids: torch.Tensor, weight: torch.Tensor, layout: Layout, axis: Axis, padding: int | None = None
) -> torch.Tensor:
    """Look up ``ids`` in a table of which ``weight`` is this rank's rows: mask, look up, sum. ``[..., features]``.

    Raises:
        IndexError: an id outside the full table, on every rank (on CUDA a device-side assertion, as in torch).
    """
    (start, stop) = next(iter(layout.ranges(axis.rank)), (0, 0))
    _check_ids(ids, layout.size)
    elsewhere = weight.stride() == (0, 0)  # one number stands for a table that another stage has: nobody needs the sum
    if start == stop:  # no rows here: zeros that are part of the graph
        y: torch.Tensor = weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()
        return y if elsewhere else reduce_(y, axis)
    local = ids - start
    outside = (local < 0) | (local >= stop - start)
    if padding is not None:
        padding = padding - start if start <= padding < stop else None
    y = F.embedding(local.masked_fill(outside, 0), weight, padding)
    return y if elsewhere else reduce_(y.masked_fill(outside.unsqueeze(-1), 0), axis)


class HiddenParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding with its columns sharded: look up, gather. ``[...] -> [..., hidden]``, weight Shard(1)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = F.embedding(input, self.weight, self.padding_idx)
        return self.region.mark_replicated(gather(y, self.tp, self.autopar_layouts["weight"]))  # [..., hidden]


def _check_ids(ids: torch.Tensor, size: int) -> None:
    if ids.is_meta:
        return
    if not ids.is_cpu or torch.compiler.is_compiling():  # looking at them would make the host wait
        assert_soon(((ids >= 0) & (ids < size)).all(), f"index out of range in an embedding of {size} rows")
    elif ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= size:
            raise IndexError(f"index out of range in an embedding of {size} rows: ids run from {low} to {high}")

"""Expert parallelism: tokens go to the ranks that hold the experts they chose, and back, by all-to-all.

Lepikhin et al., "GShard" (2020), section 3; Megatron-LM, core/transformer/moe/token_dispatcher.py. Every tp rank holds
the same tokens, so each takes an equal part of them, sends every (token, chosen expert) pair to the expert's rank, and
gets the weighted output back; then the parts are gathered. The experts' own forward computes: it sees
one chosen expert per row, counted from this rank's first one.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.distributed.collectives import all_to_all, even_layout, gather, scatter
from autopar.distributed.gloo_collectives import all_to_all_single
from autopar.layout import even_shards
from autopar.tensor_parallel.region_modules import RegionModule

__all__ = ["ExpertParallel"]


class ExpertParallel(RegionModule):
    """Experts, of which this rank holds some: ``[tokens, hidden] -> [tokens, hidden]``. Parameters Shard(0)."""

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        """Compute the output; ``chosen``, ``weights``: ``[tokens, k]``, the experts of each token and their weights."""
        axis, experts = self.tp, self.autopar.layout
        assert experts is not None
        if hidden.is_meta and not torch.is_grad_enabled():  # a dry run: the routes depend on data
            return torch.empty_like(hidden)
        tokens, k = chosen.shape
        layout = even_layout(tokens, axis.size)
        x = scatter(hidden.reshape(tokens, -1), axis, layout, 0)  # [tokens/tp, hidden]
        w = scatter(weights, axis, layout, 0).reshape(-1)  # [tokens/tp * k]
        ids = layout.shard(chosen, axis.rank, 0).reshape(-1)
        ends = torch.tensor([experts.ranges(rank)[-1][1] for rank in range(axis.size)], device=ids.device)
        starts = torch.tensor([experts.ranges(rank)[0][0] for rank in range(axis.size)], device=ids.device)
        owner = torch.bucketize(ids, ends, right=True)
        known = ids < experts.size  # a router may say "none" with an index behind the last
        owner = torch.where(known, owner, axis.rank)
        w = w.masked_fill(~known, 0)
        order = torch.argsort(owner, stable=True)
        out_splits, in_splits = _splits(owner, axis)
        rows = all_to_all(x[order // k], axis, out_splits, in_splits)  # [received, hidden]
        local = torch.where(known, ids - starts[owner], 0)[order]
        local = all_to_all(local, axis, out_splits, in_splits)
        y = self._compute(super().forward, rows, local)
        back = all_to_all(y, axis, in_splits, out_splits)  # [tokens/tp * k, hidden], in the order of sending
        weighted = back * w[order].unsqueeze(-1)  # here, so that only rows are sent
        y = torch.zeros_like(x).index_add(0, order // k, weighted.to(x.dtype))
        return gather(y, axis, layout, 0).view_as(hidden)

    def _compute(self, forward: Any, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if rows.shape[0]:
            y: torch.Tensor = forward(rows, local.unsqueeze(-1), torch.ones_like(rows[:, :1]))
            return y
        # No token for this rank: the output is empty, and the parameters are part of the graph.
        return rows + sum(p.sum() for p in self._parameters.values() if p is not None) * 0  # type: ignore[attr-defined]


def _splits(owner: torch.Tensor, axis: Any) -> tuple[list[int], list[int]]:
    """Return how many rows come from each rank, and go to it; where a planner counts without data: even routes."""
    if owner.is_meta:
        even = [stop - start for start, stop in even_shards(owner.numel(), axis.size)]
        return even, even
    sent = torch.bincount(owner, minlength=axis.size)
    return _exchange_counts(sent, axis).tolist(), sent.tolist()


def _exchange_counts(sent: torch.Tensor, axis: Any) -> torch.Tensor:
    received = torch.empty_like(sent)
    all_to_all_single(received, sent, group=axis.group)
    return received

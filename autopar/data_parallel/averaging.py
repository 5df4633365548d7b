"""Noticing that nobody has averaged the gradients of the replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.collectives import Axis

__all__ = ["first_difference"]


@torch.no_grad()
def first_difference(tensors: Sequence[torch.Tensor | None], axis: Axis, device: torch.device) -> int | None:
    """The index of the first tensor that ranks of ``axis`` hold differently (None counts as zeros), or None.

    Sums over the bits are compared, which do not depend on the order: equal tensors have equal sums on any device,
    others practically never.
    """
    if axis.size == 1 or not tensors:
        return None
    sums = torch.tensor([0 if t is None else _sum_of_bits(t) for t in tensors], dtype=torch.int64, device=device)
    extremes = torch.stack([sums, -sums])  # the largest, and minus the smallest
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=axis.group)
    different = torch.nonzero(extremes[0] != -extremes[1])
    return int(different[0]) if different.numel() else None


def _sum_of_bits(tensor: torch.Tensor) -> int:
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).detach().reshape(-1).contiguous()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size(), torch.uint8)
    return int(flat.view(width).sum(dtype=torch.int64))

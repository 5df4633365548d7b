"""The mean of gradients over data parallel without DistributedDataParallel, and noticing that nobody took it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from autopar.collectives import Axis
from autopar.data_parallel.owners import buckets

__all__ = ["average_gradients", "first_difference"]

_BUCKET = 2**23  # elements


@torch.no_grad()
def average_gradients(parameters: Iterable[torch.Tensor], axis: Axis) -> None:
    """Replace every gradient by its mean over ``axis``, in place; all ranks get the same bits.

    Call it once, after the last micro-batch: until then gradients add up on each rank by themselves, without
    communication. A gradient that some ranks lack counts as zero there; one that all lack stays None.

    Args:
        parameters: the same ones, in the same order, on every rank of the axis; their gradients are dense.
    """
    if axis.size == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    present = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=axis.group)
    gradients = []
    for parameter, anywhere in zip(trained, present.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for kind in {(gradient.dtype, gradient.device): None for gradient in gradients}:
        for bucket in buckets([g for g in gradients if (g.dtype, g.device) == kind], _BUCKET):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(axis.size)  # before: fp16 may overflow
            dist.all_reduce(flat, group=axis.group)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view(gradient.shape))


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

"""Which data-parallel rank keeps the optimizer's state of which parameter, and how the others get its updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.data_parallel.grad_sync import buckets
from autopar.distributed.axis import Axis

__all__ = ["assign", "broadcast_from_owners"]


def assign(sizes: Sequence[int], ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """The owner, a rank in ``[0, ranks)``, of each of ``sizes`` elements: largest first, to the least loaded rank.

    Deterministic: of equal sizes the first one comes first, of equally loaded ranks the lowest is taken. No rank gets
    more than the mean load plus the largest size.

    Args:
        loads: what the ranks own already.

    >>> assign([4, 1, 3, 2], 2)
    [0, 0, 1, 1]
    """
    owned = list(loads) or [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = owned.index(min(owned))
        owned[owners[index]] += sizes[index]
    return owners


@torch.no_grad()
def broadcast_from_owners(tensors: Sequence[torch.Tensor], owners: Sequence[int], axis: Axis) -> None:
    """Give every rank of ``axis`` each tensor as its owner has it, in place. Every rank passes the same list.

    What one rank owns of one dtype travels flat, in pieces of at most 32 MiB (or one tensor).
    """
    if axis.size == 1:
        return
    kinds = {(owner, t.dtype, t.device): None for owner, t in zip(owners, tensors, strict=True)}
    for owner, dtype, device in kinds:
        mine = [t for o, t in zip(owners, tensors, strict=True) if (o, t.dtype, t.device) == (owner, dtype, device)]
        for bucket in buckets(mine):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.broadcast(flat, src=axis.ranks[owner], group=axis.group)
            if axis.rank != owner:
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

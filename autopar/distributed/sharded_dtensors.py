"""DTensors of ZeRO 2 and 3 that are read as if they were whole, where tensor parallelism or stages hold but a part.

torch's DTensor knows the replicas that share a parameter, and gives the norm of all their rows. It knows nothing of
tensor-parallel shards and of other stages' weights: these reads are noticed as those of plain shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.distributed.shard_reads import NOTICING, LikePlain, Part, aside, become, take_kind

__all__ = ["ShardedDTensor", "notice_dtensors"]


class ShardedDTensor(LikePlain, DTensor):  # type: ignore[misc]
    """A DTensor of a part of a parameter, or made of one."""

    __slots__ = ()
    __torch_function__ = NOTICING

    def full_tensor(self, **how: Any) -> torch.Tensor:
        """Return the rows of all replicas: still a part."""
        with aside():
            joined = super().full_tensor(**how)
        if self.autopar_shard is not None and type(joined) is torch.Tensor:
            become(joined, Part, self.autopar_shard)
        return joined

    def _plain(self) -> Any:
        """Return one of torch's class, of the same memory."""
        with aside():
            plain = super().detach().requires_grad_(self.requires_grad)
        vars(plain).update({name: value for name, value in vars(self).items() if name != "autopar_shard"})
        return plain


def notice_dtensors() -> None:
    """Let :func:`autopar.distributed.shard_reads.watch` take parameters that are DTensors."""
    take_kind(DTensor, ShardedDTensor)

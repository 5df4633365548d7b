"""Tensors that are sharded over the data-parallel replicas too (``zero.stage: 3``, torch's ``fully_shard``).

A DTensor of this kind is one tensor-parallel rank's shard, split over dp x cp into runs of equally many rows, the last
ones shorter. A checkpoint does not record it: its rank 0 writes the tensor-parallel shard, and any rank reads its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.layout import Layout
from autopar.storage.lazy_tensor import Joined, LazyTensor, read_shard, whole_box
from autopar.storage.views import narrowed

__all__ = ["check_fsdp_shard", "gather", "read"]


def check_fsdp_shard(name: str, tensor: torch.Tensor, replicas: int) -> None:
    """Raise CheckpointError if ``tensor`` is a DTensor that ``fully_shard`` would shard otherwise."""
    if not isinstance(tensor, DTensor):
        return
    mesh = tensor.device_mesh
    if mesh.ndim != 1 or mesh.size() != replicas or tuple(tensor.placements) != (Shard(0),):
        raise CheckpointError(
            f"{name} is a DTensor with placements {tuple(tensor.placements)} over a mesh of {tuple(mesh.shape)}; a "
            f"checkpoint can hold those that zero.stage 3 makes: Shard(0) over the {replicas} data-parallel replicas"
        )


def _rows(tensor: DTensor, replica: int, replicas: int) -> tuple[int, int]:
    """Return the rows ``[start, stop)`` of a replica."""
    size = tensor.shape[0]
    each = -(-size // replicas)
    return min(replica * each, size), min((replica + 1) * each, size)


@torch.no_grad()
def gather(tensors: Mapping[str, torch.Tensor], mpu: MPU) -> dict[str, torch.Tensor]:
    """Gather DTensors over dp x cp: full on the CPU of its rank 0, none on other ranks; other tensors stay as they are.

    Collective: all ranks give the same DTensors in the same order.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            result[name] = tensor
            continue
        full = _gather(tensor, mpu)
        if full is not None:
            result[name] = full
    return result


def _gather(tensor: DTensor, mpu: MPU) -> torch.Tensor | None:
    axis, local = mpu.dp_cp, tensor.to_local()
    rows = [_rows(tensor, replica, axis.size) for replica in range(axis.size)]
    sent = torch.zeros((rows[0][1], *tensor.shape[1:]), dtype=tensor.dtype, device=mpu.device)  # all equally large
    sent[: local.shape[0]].copy_(local)
    parts = [torch.empty_like(sent) for _ in rows] if axis.rank == 0 else []
    if axis.size == 1 or sent.numel() == 0:
        parts = [sent for _ in parts]
    else:
        dist.gather(_raw(sent), [_raw(part) for part in parts] or None, dst=axis.ranks[0], group=axis.group)
    if axis.rank != 0:
        return None
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    for part, (start, stop) in zip(parts, rows, strict=True):
        full[start:stop].copy_(part[: stop - start])
    return full


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """View its memory as bytes: not every backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def read(lazy: LazyTensor, layout: Layout | None, mpu: MPU, out: torch.Tensor) -> None:
    """Read what this rank holds of ``lazy`` by ``layout`` into ``out``; of a DTensor its own rows only."""
    if not isinstance(out, DTensor):
        read_shard(lazy, layout, mpu.tp.rank, out)
        return
    local, shard = out.to_local(), lazy
    if local.numel() == 0:
        return
    if layout is not None:
        ranges = layout.ranges(mpu.tp.rank)
        shard = Joined([narrowed(lazy, layout.dim, *wanted) for wanted in ranges], layout.dim)
    if shard.shape != tuple(out.shape):
        raise ValueError(f"a tensor of shape {list(out.shape)} cannot take a shard of shape {list(shard.shape)}")
    shard.read_into(local, (_rows(out, mpu.dp_cp.rank, mpu.dp_cp.size), *whole_box(shard.shape[1:])))

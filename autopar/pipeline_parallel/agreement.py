"""Check that all stages of a model replica are fed the same batch: each reads masks and labels from its own copy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.collectives import Axis
from autopar.errors import ConsistencyError
from autopar.pipeline_parallel.messages import map_tensors

__all__ = ["check_batch"]


def check_batch(batch: Mapping[str, Any], axis: Axis) -> None:
    """Compare the tensors of a batch over the pipeline-parallel axis; one object exchange.

    Raises:
        ConsistencyError: on every rank of the axis, naming the entries that differ.
    """
    if axis.size == 1:
        return
    mine = {name: _digests(value) for name, value in batch.items()}
    everyone: list[dict[str, str]] = [mine] * axis.size
    dist.all_gather_object(everyone, mine, group=axis.group)
    lines = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        seen = [theirs.get(name, "missing") for theirs in everyone]
        if len(set(seen)) > 1:
            lines.append(f"  {name}: " + ", ".join(f"rank {r}: {s}" for r, s in zip(axis.ranks, seen, strict=True)))
    if lines:
        raise ConsistencyError(
            f"the stages of one model replica (ranks {list(axis.ranks)}) got different batches ({len(lines)} "
            f"argument{'s' if len(lines) > 1 else ''}):\n"
            + "\n".join(lines)
            + "\n  Every stage needs the whole batch: "
            "shard the data by mpu.get_data_parallel_rank(), or use\n  autopar.prepare_dataloader(dataset, ..., "
            "mpu=model.mpu). consistency_check: {enable: false} turns this check off."
        )


def _digests(value: Any) -> str:
    found: list[str] = []

    def note(tensor: torch.Tensor) -> None:
        data = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).view(-1)
        digest = hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=6).hexdigest()
        found.append(f"{list(tensor.shape)} {digest}")

    map_tensors(value, note)
    return ", ".join(found) or repr(value)

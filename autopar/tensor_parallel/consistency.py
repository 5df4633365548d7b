"""Checks that the tp ranks of a model replica are fed the same: inputs and random state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import ConsistencyError
from autopar.layout import Layout
from autopar.mesh import MPU

__all__ = ["check_inputs", "shard_digest", "share_random_state"]


def check_inputs(arguments: Mapping[str, Any], mpu: MPU, *, random_state: bool, shard: str | None = None) -> None:
    """Compare the tensors among ``arguments`` over the tp group; one object exchange.

    Args:
        arguments: argument name -> value, nested lists, tuples and dicts included.
        random_state: compare the state of the default generators too (dropout is on).
        shard: :func:`shard_digest` of a weight that is cut, which must *differ* between the ranks.

    Raises:
        ConsistencyError: on every rank of the group, naming the arguments that differ.
    """
    axis = mpu.tp
    if axis.size == 1:
        return
    mine: dict[str, str] = {}
    for name, value in arguments.items():
        _fingerprint(name, value, mine)
    if random_state:
        mine["random state"] = _digest(torch.get_rng_state())
        if mpu.device.type == "cuda":
            mine["random state (CUDA)"] = _digest(torch.cuda.get_rng_state())
    gathered: list[tuple[dict[str, str], str | None]] = [(mine, shard)] * axis.size
    dist.all_gather_object(gathered, (mine, shard), group=axis.group)
    everyone = [theirs for theirs, _ in gathered]
    shards = {digest for _, digest in gathered}
    if len(shards) == 1 and None not in shards:
        raise ConsistencyError(
            f"the ranks {list(axis.ranks)} of one tensor-parallel group hold the same shard of the weights.\n"
            "  DistributedDataParallel over all ranks copies rank 0's shard over the others: give it\n"
            "  process_group=model.mpu.get_data_parallel_group(), and initialize the model again."
        )
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    lines = []
    for name in names:
        seen = [theirs.get(name, "missing") for theirs in everyone]
        if len(set(seen)) > 1:
            lines.append(f"  {name}: " + ", ".join(f"rank {r}: {s}" for r, s in zip(axis.ranks, seen, strict=True)))
    if lines:
        count = f"{len(lines)} argument{'s' if len(lines) > 1 else ''}"
        raise ConsistencyError(
            f"the ranks {list(axis.ranks)} of one tensor-parallel group got different inputs ({count}):\n"
            + "\n".join(lines)
            + "\n  They share one model replica and need the same batch: shard the data by mpu.get_data_parallel_rank()"
            "\n  or use autopar.prepare_dataloader(dataset, ..., mpu=model.mpu). A random state that differs comes from"
            "\n  seeding by rank: seed all ranks of a group alike."
            "\n  consistency_check: {enable: false} turns this check off."
        )


def shard_digest(model: nn.Module) -> str | None:
    """Digest of the first weight that is cut and is no constant; None if there is none, or it has no data."""
    for module in model.modules():
        layout: Layout | None = getattr(module, "autopar_layouts", {}).get("weight")
        weight = module._parameters.get("weight")
        if weight is None or layout is None or layout.replicated or type(weight) is not nn.Parameter or weight.is_meta:
            continue
        if weight.numel() and (weight != weight.flatten()[0]).any():
            return _digest(weight)
    return None


def share_random_state(mpu: MPU) -> None:
    """Give every rank of a model replica (tp x pp) the first one's default generators (CPU, and CUDA under nccl)."""
    axis = mpu.model
    if axis.size == 1:
        return
    state = torch.get_rng_state()
    staged = state.to(mpu.device)
    dist.broadcast(staged, src=axis.ranks[0], group=axis.group)
    torch.set_rng_state(staged.cpu())
    if mpu.device.type == "cuda":
        staged = torch.cuda.get_rng_state().to(mpu.device)
        dist.broadcast(staged, src=axis.ranks[0], group=axis.group)
        torch.cuda.set_rng_state(staged.cpu())


def _fingerprint(name: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            into[name] = f"{list(value.shape)} {_digest(value)}"
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _fingerprint(f"{name}.{key}", entry, into)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            _fingerprint(f"{name}[{index}]", entry, into)
    elif isinstance(value, (bool, int, float, str)):
        into[name] = repr(value)


def _digest(tensor: torch.Tensor) -> str:
    # A copy: a storage that numpy has seen can no longer be resized, which FSDP does to its parameters.
    data = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).view(-1)
    return hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=6).hexdigest()

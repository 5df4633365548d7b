"""Checks that the tp ranks of a model replica are fed the same: inputs and random state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import ConsistencyError
from autopar.mesh import MPU

__all__ = ["check_inputs", "share_random_state"]


def check_inputs(arguments: Mapping[str, Any], mpu: MPU, *, random_state: bool) -> None:
    """Compare the tensors among ``arguments`` over the tp group; one object exchange.

    Args:
        arguments: argument name -> value, nested lists, tuples and dicts included.
        random_state: compare the state of the default generators too (dropout is on).

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
    everyone: list[dict[str, str]] = [{}] * axis.size
    dist.all_gather_object(everyone, mine, group=axis.group)
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


def share_random_state(mpu: MPU) -> None:
    """Give every tp rank the state of the first one's default generators (CPU, and CUDA under nccl)."""
    axis = mpu.tp
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
    data = tensor.detach().cpu().contiguous().view(-1)
    raw = data.view(torch.uint8) if data.dtype != torch.bool else data.to(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=6).hexdigest()

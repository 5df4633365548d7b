"""Digest tensors, text and bytes to small numbers, which ranks compare instead of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.c10d import number_of_next_group
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.process import device_of_numbers
from autopar.stored import stored_weights, without_memory

if TYPE_CHECKING:
    from autopar.distributed.mesh import MPU

_SMALL = 1 << 16  # bytes on the CPU up to which hashing costs less than summing
_BITS = 62  # fits into an int64, also when negated


def of_text(text: str | bytes) -> int:
    """Hash text or bytes to a number of 62 bits that is equal in every process."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> (64 - _BITS)


def of_tensor(tensor: torch.Tensor) -> int:
    """Digest a tensor's bits to a number of 62 bits that ignores shape and dtype."""
    if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _SMALL:
        return of_text(_bytes(tensor))
    plain, placed = checksum(tensor).tolist()
    return (plain * 1_000_003 + placed) & ((1 << _BITS) - 1)


def of_values(value: Any) -> int:
    """Digest the bits of all tensors in nested mappings, lists and tuples, in order."""
    digests = [
        of_tensor(entry.to_local() if isinstance(entry, DTensor) else entry)  # inlined, because it runs for each tensor
        for _, entry in leaves(value)
        if isinstance(entry, torch.Tensor) and not entry.is_meta
    ]
    return of_text(repr(digests))


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested arguments, by names such as ``images[0].mask``."""
    if isinstance(value, Mapping):
        entries = [(f"{name}.{key}" if name else str(key), entry) for key, entry in value.items()]
    elif isinstance(value, list | tuple):
        entries = [(f"{name}[{index}]", entry) for index, entry in enumerate(value)]
    else:
        yield name, value
        return
    for inside, entry in entries:
        if isinstance(entry, Mapping | list | tuple):
            yield from leaves(entry, inside)
        else:
            yield inside, entry


def hexdigest(tensor: torch.Tensor) -> str:
    """Hash a tensor's bits to 12 characters, for messages."""
    return hashlib.blake2b(_bytes(tensor), digest_size=6).hexdigest()


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's bits as integers, unweighted and weighted by their place. ``[2]`` on its device."""
    bits = _bits(tensor)
    rows = bits[: bits.numel() // 257 * 257].view(-1, 257).sum(0, dtype=torch.int64)  # 257 interleaved sums
    weights = torch.arange(1, 258, device=rows.device)
    rest = bits[bits.numel() // 257 * 257 :].to(torch.int64)
    plain = rows.sum() + rest.sum()
    placed = (rows * weights).sum() + (rest * weights[: rest.numel()]).sum()
    return torch.stack([plain, placed])


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's bits as integers. The sum (``[]`` int64) is equal on any device and almost surely unique."""
    return _bits(tensor).sum(dtype=torch.int64)


def sums_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return :func:`sum_of_bits` of each tensor, read from the device at once."""
    sums = [sum_of_bits(tensor) for tensor in tensors]
    return torch.stack(sums).tolist() if sums else []


def extremes(numbers: Sequence[int], group: Any) -> tuple[list[int], list[int]]:
    """Return the largest and the smallest of each number over a group. If they are equal, all ranks agree."""
    pair = torch.tensor([list(numbers), [-number for number in numbers]], device=device_of_numbers(group))
    all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = pair.tolist()
    return largest, [-number for number in smallest]


def number_groups_alike(group: Any) -> None:
    """Make the ranks of a group choose the same name for the next process group; otherwise they would time out.

    Since torch 2.14 the number in the name includes groups that only some ranks make (``use_local_synchronization``).
    """
    number_of_next_group(extremes([number_of_next_group()], group)[0][0])


def sync_parameters(model: nn.Module, mpu: MPU) -> list[str]:
    """Broadcast rank 0's weights where they differ, and return their names. A collective of the world.

    Ranks compare one checksum per tensor. Tensors are sorted by name, because some models register buffers in the
    order of a set, which differs between processes.
    """
    hollow = without_memory(model)
    tensors = {
        name: tensor.data
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=itemgetter(0))
        if not tensor.is_meta and id(tensor) not in hollow
    }
    for path, stored in sorted(stored_weights(model).items()):
        tensors |= {f"{path}.weight.{name}": tensor for name, tensor in stored.beside().items()}
    if mpu.world_size == 1 or not tensors:
        return []
    sums = torch.stack([checksum(tensor).to(mpu.device) for tensor in tensors.values()])  # [tensors, 2]
    first = sums.clone()
    dist.broadcast(first, src=0)
    differs = (first != sums).any(dim=1).to(torch.int32)
    all_reduce(differs, op=dist.ReduceOp.MAX)
    different = [name for name, flag in zip(tensors, differs.tolist(), strict=True) if flag]
    for name in different:
        tensor = tensors[name][tuple(slice(0, 1) if step == 0 else slice(None) for step in tensors[name].stride())]
        staged = tensor.to(mpu.device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(staged.view(-1).view(torch.uint8), src=0)  # as bytes: gloo does not support every dtype
        tensor.copy_(staged)  # an expanded buffer has one element where its stride is 0
    return different


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as a flat integer tensor, with 64 bits if possible, because these sums are fastest."""
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).detach().reshape(-1).contiguous()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    size = flat.element_size()
    if flat.numel() * size % 8 == 0:
        aligned = flat if flat.storage_offset() * size % 8 == 0 else flat.clone()
        return aligned.view(torch.int64)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64))


def _bytes(tensor: torch.Tensor) -> bytes:
    # A copy: FSDP resizes the storage of its parameters, which fails after numpy has seen it.
    data = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).view(-1)
    return data.view(torch.uint8).numpy().tobytes()

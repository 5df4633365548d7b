"""Digests of gradients, weights and optimizer state at a step: of all, or of a sample that moves on with the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.distributed.digest import checksum, of_checksum, of_tensor, sum_of_bits

__all__ = ["OVERFLOW", "Digests", "digest_shard", "digest_step", "plain_settings"]

OVERFLOW = -1  # the digest of a gradient that is not finite
_SAMPLE = 16384  # elements of a sample

Digests = dict[str, tuple[int, int]]
"""Name -> digests of (part of) a gradient and a weight."""


@torch.no_grad()
def digest_shard(
    sharded: list[tuple[str, nn.Parameter]], turn: int, optimizer: Optimizer, apart: int
) -> tuple[str, int, int] | None:
    """Digest some elements of the gradient and of the state of one weight, ``apart`` for none; with its name."""
    if not sharded:
        return None
    name, parameter = sharded[turn % len(sharded)]
    state = optimizer.state.get(parameter, {})
    moments = next((x for x in state.values() if isinstance(x, torch.Tensor) and x.shape == parameter.shape), None)
    return name, _digest_of(parameter.grad, apart), _digest_of(moments, apart)


def _digest_of(tensor: torch.Tensor | None, apart: int) -> int:
    """Digest of some rows; ``apart`` if they are all the same number, or not numbers."""
    if tensor is None or tensor.is_sparse or isinstance(tensor, DTensor) or tensor.numel() < 2:
        return apart
    part = tensor[: max(1, 2048 * len(tensor) // tensor.numel())]
    known = (part != part.flatten()[0]).any() & torch.isfinite(part).all()
    if part.is_cpu:
        return of_tensor(part) if known else apart
    *sums, usable = torch.cat([checksum(part), known.view(1).long()]).tolist()  # elsewhere: wait for it once
    return of_checksum(*sums) if usable else apart


@torch.no_grad()
def digest_step(held: list[tuple[str, nn.Parameter]], turn: int | None, closure: bool, scaled: bool) -> Digests:
    """Digest all gradients and weights, or with ``turn`` a sample that moves on with it.

    Args:
        scaled: of a loss with a scale: gradients that are not finite make the step one to skip, and cannot be compared.
    """
    names, sums = [], []
    for name, parameter, start, rows in _windows(held, turn):
        gradient = None if closure else parameter.grad
        names.append(name)
        sums.append(_sum(gradient, parameter.device, start, rows))
        if scaled and gradient is not None:
            sums[-1] = torch.where(torch.isfinite(gradient).all(), sums[-1], OVERFLOW)
        sums.append(_sum(parameter, parameter.device, start, rows))
    numbers = torch.stack(sums).tolist() if sums else []
    return {name: (numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(names)}


def _windows(
    held: list[tuple[str, nn.Parameter]], turn: int | None
) -> Iterator[tuple[str, nn.Parameter, int, int | None]]:
    """Name, parameter, first row, rows (None: all)."""
    if turn is None:
        for name, parameter in held:
            yield name, parameter, 0, None
        return
    left = _SAMPLE
    for number in range(min(4, len(held))):
        name, parameter = held[(4 * turn + number) % len(held)]
        if parameter.ndim == 0 or parameter.numel() <= left:
            yield name, parameter, 0, None
            left -= parameter.numel()
        elif left > 0:
            rows = max(1, left * len(parameter) // parameter.numel())
            yield name, parameter, turn * rows % (len(parameter) - rows + 1), rows
            left = 0


def _sum(tensor: torch.Tensor | None, device: torch.device, start: int, rows: int | None) -> torch.Tensor:
    if tensor is None or isinstance(tensor, DTensor):
        return torch.zeros((), dtype=torch.int64, device=device)
    if tensor.is_sparse or rows is None:
        return sum_of_bits(tensor)
    return sum_of_bits(tensor.narrow(0, start, rows))


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is plain data in a param group."""
    plain = (bool, int, float, str, tuple, type(None))
    return {name: value for name, value in group.items() if name != "params" and isinstance(value, plain)}

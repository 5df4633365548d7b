"""Gradients that several ranks have parts of: of tensors on several stages, and of data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.mesh import MPU, rank_groups
from autopar.policy.stages import StagePlan

__all__ = ["Shared", "average_gradients", "sum_gradients"]

_BUCKET = 32 * 1024 * 1024  # bytes of one all-reduce


class Shared:
    """The parameters that several ranks of the pipeline hold (tied weights), by who holds them.

    Their gradient is the sum over these ranks. It is summed apart from what earlier steps left there, so that gradients
    may accumulate.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, mpu: MPU) -> None:
        self._sets: list[tuple[Any, list[nn.Parameter]]] = []
        by_holders: dict[tuple[int, ...], list[nn.Parameter]] = {}
        own = dict(model.named_parameters())
        names: dict[tuple[int, ...], None] = {}
        for name in plan.tensors:
            holders = plan.holders(name)
            if len(holders) > 1:
                names[holders] = None
                if name in own and mpu.pp.rank in holders:
                    by_holders.setdefault(holders, []).append(own[name])
        for holders in names:  # the same on every rank: all of them take part in the making of a group
            group = _group(holders, mpu)
            if holders in by_holders:
                self._sets.append((group, by_holders[holders]))
        self._earlier: list[torch.Tensor | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        copied = Shared.__new__(Shared)
        memo[id(self)] = copied
        copied._sets = [(group, [memo.get(id(p), p) for p in parameters]) for group, parameters in self._sets]
        copied._earlier = []
        return copied

    def _parameters(self) -> Iterator[nn.Parameter]:
        for _, parameters in self._sets:
            yield from parameters

    def set_aside(self) -> None:
        """Before a step: put the gradients of earlier steps, which are summed already, aside."""
        self._earlier = [parameter.grad for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None

    def sum(self) -> None:
        """After a step: sum this step's gradients over the holders, and add what was put aside."""
        for group, parameters in self._sets:
            sum_gradients(parameters, group)
        for parameter, earlier in zip(self._parameters(), self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = []


def _group(holders: tuple[int, ...], mpu: MPU) -> Any:
    if len(holders) == mpu.pp.size:
        return mpu.pp.group
    mine = None
    for column in rank_groups(mpu.sizes)["pp"]:
        ranks = [column[holder] for holder in holders]
        group = dist.new_group(ranks, group_desc="shared by stages")
        if mpu.rank in ranks:
            mine = group
            mpu._owned.append(group)  # destroyed with the mesh
    return mine


def average_gradients(model: nn.Module, mpu: MPU) -> None:
    """Average all gradients over the data-parallel replicas, as ``DistributedDataParallel`` does.

    A parameter without gradient on one replica counts as zero there. DTensors (FSDP) are averaged already.
    """
    if mpu.dp.size > 1:
        sum_gradients([p for p in model.parameters() if not isinstance(p, DTensor)], mpu.dp.group, 1 / mpu.dp.size)


@torch.no_grad()
def sum_gradients(parameters: list[nn.Parameter], group: Any, scale: float = 1.0) -> None:
    """Sum gradients over a group in buckets, then scale them. Every rank gives the same parameters in the same order.

    A parameter that has a gradient on no rank gets none.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        return
    device = parameters[0].device
    present = torch.tensor([int(parameter.grad is not None) for parameter in parameters], device=device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    used = [parameter for parameter, flag in zip(parameters, present.tolist(), strict=True) if flag]
    for bucket in _buckets(used):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in bucket if parameter.grad is not None])
        dist.all_reduce(flat, group=group)
        if scale != 1.0:
            flat.mul_(scale)
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(part.view(parameter.shape))


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    by_dtype: Mapping[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)  # type: ignore[attr-defined]
    for same in by_dtype.values():
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in same:
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= _BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

"""Gradients that several ranks have parts of: of tensors on several stages, and of data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.mesh import MPU, rank_groups
from autopar.policy.plan import Plan
from autopar.policy.stages import StagePlan

__all__ = ["Alike", "Shared", "average_gradients", "held_alike", "sum_gradients"]

Alike = Mapping[int, tuple[int, ...]]
"""``id(parameter)`` -> the tensor-parallel ranks that hold the same part of it."""

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

    def sets(self) -> list[list[nn.Parameter]]:
        """The parameters of each set of holders, in the same order on all of them."""
        return [parameters for _, parameters in self._sets]

    def _parameters(self) -> Iterator[nn.Parameter]:
        for _, parameters in self._sets:
            yield from parameters

    def set_aside(self) -> None:
        """Before a step: put the gradients of earlier steps, which are summed already, aside."""
        self._earlier = [parameter.grad for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None

    def put_back(self) -> None:
        """After a step that failed: what was put aside, without anything of that step."""
        for parameter, earlier in zip(self._parameters(), self._earlier, strict=False):  # none: nothing is put aside
            parameter.grad = earlier
        self._earlier = []

    def sum(self, alike: Alike) -> None:
        """After a step: sum this step's gradients over the holders, and add what was put aside."""
        for group, parameters in self._sets:
            sum_gradients(_runs([parameters], alike), group)
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


def held_alike(model: nn.Module, plan: Plan, mpu: MPU) -> Alike:
    """``id(parameter)`` -> the tensor-parallel ranks that hold the same part of it as this one, of all parameters."""
    rank, size = mpu.tp.rank, mpu.tp.size
    layouts = {name: tensor.layout for tensor in plan.tensors.values() for name in (tensor.name, *tensor.aliases)}
    alike: dict[int, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        if size == 1 or name not in layouts:  # added after initialize: of this rank alone, as far as is known
            alike[id(parameter)] = (rank,)
            continue
        layout = layouts[name]
        alike[id(parameter)] = tuple(
            other for other in range(size) if layout is None or layout.ranges(other) == layout.ranges(rank)
        )
    return alike


def _runs(lists: list[list[nn.Parameter]], alike: Alike) -> list[list[nn.Parameter]]:
    """Each list by who holds the same: such a run has the same content and order on all of these ranks.

    An all-reduce over three ranks or more adds in an order that depends on the place in the buffer. Ranks that hold the
    same would drift apart by rounding if it lay at another place there.
    """
    runs: dict[tuple[int, tuple[int, ...]], list[nn.Parameter]] = {}
    for number, parameters in enumerate(lists):
        for parameter in parameters:
            runs.setdefault((number, alike[id(parameter)]), []).append(parameter)
    return list(runs.values())


def average_gradients(model: nn.Module, mpu: MPU, shared: Shared, alike: Alike) -> None:
    """Average all gradients over the data-parallel replicas, as ``DistributedDataParallel`` does.

    A parameter without gradient on one replica counts as zero there. DTensors (FSDP) are averaged already. What several
    ranks of a replica hold gets the same bits on all of them.

    Args:
        alike: of :func:`held_alike`.
    """
    if mpu.dp.size == 1:
        return
    apart = shared.sets()
    elsewhere = {id(parameter) for parameters in apart for parameter in parameters}
    lists = [*apart, [p for p in model.parameters() if id(p) not in elsewhere]]
    plain = [[p for p in parameters if not isinstance(p, DTensor)] for parameters in lists]
    sum_gradients(_runs(plain, alike), mpu.dp.group, 1 / mpu.dp.size)


@torch.no_grad()
def sum_gradients(runs: list[list[nn.Parameter]], group: Any, scale: float = 1.0) -> None:
    """Scale gradients, then sum them over a group. Every rank gives the same parameters in the same order.

    A parameter that has a gradient on no rank gets none.

    Args:
        runs: what may travel together in one buffer.
        scale: before the sum, which might be too large for fp16.
    """
    runs = [[parameter for parameter in run if parameter.requires_grad] for run in runs]
    parameters = [parameter for run in runs for parameter in run]
    if not parameters:
        return
    device = parameters[0].device
    present = torch.tensor([int(parameter.grad is not None) for parameter in parameters], device=device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    used = {id(parameter) for parameter, flag in zip(parameters, present.tolist(), strict=True) if flag}
    for bucket in (bucket for run in runs for bucket in _buckets([p for p in run if id(p) in used])):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in bucket if parameter.grad is not None])
        if scale != 1.0:
            flat.mul_(scale)
        dist.all_reduce(flat, group=group)
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

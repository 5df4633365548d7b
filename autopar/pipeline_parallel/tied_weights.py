"""Gradients of tensors that several stages hold (tied weights)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.data_parallel.grad_sync import Alike, runs_of, sum_gradients
from autopar.distributed.mesh import MPU, rank_groups
from autopar.plan.stages import StagePlan

__all__ = ["Shared"]


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

    def put_back(self) -> None:
        """After a step that failed: what was put aside, without anything of that step."""
        for parameter, earlier in zip(self._parameters(), self._earlier, strict=False):  # none: nothing is put aside
            parameter.grad = earlier
        self._earlier = []

    def sum(self, alike: Alike) -> None:
        """After a step: sum this step's gradients over the holders, and add what was put aside."""
        for group, parameters in self._sets:
            sum_gradients(runs_of([parameters], alike), group)
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

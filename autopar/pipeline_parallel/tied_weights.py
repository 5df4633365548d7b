"""Tied weights: the sum of their gradients over the stages that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.data_parallel.grad_sync import Alike, runs_of, sum_gradients
from autopar.distributed.mesh import MPU
from autopar.pipeline_parallel.p2p import group_of_stages
from autopar.plan.stages import StagePlan

__all__ = ["TiedWeights"]


class TiedWeights:
    """Parameters that several ranks of the pipeline hold, by their holders.

    Their gradient is the sum over these ranks. It is summed apart from what earlier steps left there, so that gradients
    accumulate.
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
            everywhere = len(holders) == mpu.pp.size
            group = mpu.pp.group if everywhere else group_of_stages(mpu, "tied weights", holders)
            if holders in by_holders:
                self._sets.append((group, by_holders[holders]))
        self._earlier: list[torch.Tensor | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TiedWeights:
        copied = TiedWeights.__new__(TiedWeights)
        memo[id(self)] = copied
        copied._sets = [(group, [memo.get(id(p), p) for p in parameters]) for group, parameters in self._sets]
        copied._earlier = []
        return copied

    def _parameters(self) -> Iterator[nn.Parameter]:
        for _, parameters in self._sets:
            yield from parameters

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep earlier gradients, which are summed already, apart from those of a step; restore them on an error."""
        self._earlier = [parameter.grad for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, earlier in zip(self._parameters(), self._earlier, strict=False):  # none: it is summed
                parameter.grad = earlier
            raise
        finally:
            self._earlier = []

    def sum(self, alike: Alike) -> None:
        """Sum the step's gradients over the holders, and add the earlier ones; at the end of :meth:`apart`."""
        for group, parameters in self._sets:
            sum_gradients(runs_of([parameters], alike), group)
        for parameter, earlier in zip(self._parameters(), self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = []

"""Replicas that share experts take part in the same forwards: checked before tokens travel between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.distributed.collectives import extremes_over
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError

__all__ = ["SharedExperts"]


class SharedExperts:
    """Compare, when the model is called, whether all ranks with other experts of its layers do the same.

    A replica that has no batch left, or evaluates while others train, would otherwise let them wait inside a layer.
    """

    def __init__(self, model: nn.Module, mpu: MPU, failures: FailureLog) -> None:
        self.mpu, self.failures = mpu, failures
        self._handle = model.register_forward_pre_hook(self._on_forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedExperts:
        return self

    def _on_forward(self, model: nn.Module, _: Any) -> None:
        if self.failures.in_deadline or torch.compiler.is_compiling():
            return  # inside of generate, whose replicas go on together
        axis, mine = self.mpu.shards, [int(model.training), int(torch.is_grad_enabled())]
        with self.failures.wait("the forward of replicas that share experts", axis.ranks):
            largest, smallest = extremes_over(axis, mine)
            if largest == smallest:
                return
            everyone: list[Any] = [mine] * axis.size
            dist.all_gather_object(everyone, mine, group=axis.group)
        told = {rank: _in_words(*theirs) for rank, theirs in zip(axis.ranks, everyone, strict=True)}
        other = next(rank for rank, text in told.items() if text != told[axis.ranks[0]])
        raise ConsistencyError(
            f"replicas share the experts of {type(model).__name__}, and do different things with it: rank "
            f"{axis.ranks[0]} {told[axis.ranks[0]]},\n  rank {other} {told[other]}. Tokens of all of ranks "
            f"{list(axis.ranks)} meet in each layer: train and evaluate\n  on all of them at the same time, with as "
            "many batches each."
        )

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def _in_words(training: int, with_grad: int) -> str:
    return f"{'trains' if training else 'evaluates'} {'with' if with_grad else 'without'} gradients"

"""Replicas that share experts take part in the same forwards: checked before a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.distributed.autograd_functions import refuse_transforms
from autopar.distributed.collectives import all_gather, even_layout
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError


class SharedExperts:
    """Compare, when the model is called, whether all ranks with other experts of its layers do the same.

    A replica that has no batch left, or evaluates while others train, would otherwise let them wait inside a layer.
    """

    def __init__(self, inner: nn.Module, mpu: MPU, failures: FailureLog) -> None:
        self.mpu, self.failures = mpu, failures
        self._handle = inner.register_forward_pre_hook(self._on_forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedExperts:
        return self

    def _on_forward(self, model: nn.Module, _: Any) -> None:
        refuse_transforms(lambda: list(model.parameters()))
        if self.failures.in_deadline or torch.compiler.is_compiling():
            return  # inside of generate, whose replicas continue together
        axis = self.mpu.shards
        with self.failures.wait("the forward of replicas that share experts", axis.ranks):
            mine = torch.tensor([model.training, torch.is_grad_enabled()], dtype=torch.int64, device=self.mpu.device)
            everyone = all_gather(mine, axis, even_layout(2 * axis.size, axis.size)).view(-1, 2).tolist()
        told = {
            rank: f"{'trains' if training else 'evaluates'} {'with' if with_grad else 'without'} gradients"
            for rank, (training, with_grad) in zip(axis.ranks, everyone, strict=True)
        }
        other = next((rank for rank, text in told.items() if text != told[axis.ranks[0]]), None)
        if other is not None:
            raise ConsistencyError(
                f"replicas share the experts of {type(model).__name__}, and do different things with it: rank "
                f"{axis.ranks[0]} {told[axis.ranks[0]]},\n  rank {other} {told[other]}. Tokens of all of ranks "
                f"{list(axis.ranks)} meet in each layer: train and evaluate\n  on all of them at the same time, with "
                "as many batches each."
            )

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

"""Gradients of experts that are sharded over replicas, beside ``DistributedDataParallel``.

DDP averages over all replicas, of which each group holds other experts: it is told to leave these out. Ranks that hold
the same experts average them here, in a backward pass in which DDP averages the other gradients. Where no two ranks do,
nothing is left to average (:mod:`autopar.tensor_parallel.experts`, note on gradients).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autopar.distributed.failures import FailureLog
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.foreign.c10d import leave_out_of_ddp
from autopar.plan.plan import Plan


class ExpertGradients:
    """The experts' parameters of a model, and the DDP around it, if there is one."""

    def __init__(self, model: nn.Module, plan: Plan, mpu: MPU, failures: FailureLog) -> None:
        self.axis, self.failures = mpu.copies, failures
        self._averages = False  # whether the forward was one after which DDP averages
        self._handles: list[Any] = []
        self.parameters = {p: name for name, p in model.named_parameters() if name in plan.experts}
        leave_out_of_ddp(model, self.parameters.values())
        self._hooked: set[torch.Tensor] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGradients:
        """Return that of the copied model, which no wrapper is around yet."""
        copied = memo[id(self)] = copy.copy(self)
        copied.parameters = {memo.get(id(p), p): name for p, name in self.parameters.items()}
        copied._averages, copied._handles, copied._hooked = False, [], set()
        return copied

    def rebind(self, model: nn.Module) -> None:
        """Take the parameters that the model has now, by name: ``fully_shard`` made new ones."""
        names = set(self.parameters.values())
        self.parameters = {p: name for name, p in model.named_parameters() if name in names}

    def inside(self, ddp: DistributedDataParallel) -> None:
        """Average from now on when ``ddp`` does."""
        self._handles.append(ddp.register_forward_pre_hook(self._on_forward))

    def _on_forward(self, ddp: nn.Module, _: Any) -> None:
        self._averages = torch.is_grad_enabled() and bool(ddp.require_backward_grad_sync)
        for parameter in self.parameters if self.axis.size > 1 else ():
            if parameter.requires_grad and parameter not in self._hooked:  # it may have been frozen until now
                self._hooked.add(parameter)
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._average))

    @torch.no_grad()
    def _average(self, parameter: torch.Tensor) -> None:
        if self._averages and parameter.grad is not None:
            gradient = parameter.grad.div_(self.axis.size)
            with self.failures.blame("averaging the gradients of experts", self.axis.ranks):
                all_reduce(gradient, group=self.axis.group)

    def remove(self, model: nn.Module) -> None:
        """Remove the hooks."""
        leave_out_of_ddp(model, ())
        for handle in self._handles:
            handle.remove()

"""Replicas that share experts take part in the same forwards, and hold different experts: checked before a forward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from autopar.distributed.autograd_functions import refuse_transforms
from autopar.distributed.collectives import all_gather, even_layout
from autopar.distributed.digest import of_tensor
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError
from autopar.foreign.tensors import local_part, no_overrides
from autopar.guards.forward import first_elements
from autopar.guards.messages import group_call, same_experts
from autopar.guards.step import StepCheck
from autopar.plan.plan import Plan


class SharedExperts:
    """Compare, when the model is called, whether all ranks with other experts of its layers do the same.

    A replica that has no batch left, or evaluates while others train, would otherwise let them wait inside a layer.
    Code that averages all gradients over the replicas, or copies weights to them, makes different experts alike: some
    elements of one expert's weight, and of its gradient and state in the last step, have to differ.

    Args:
        steps: Check that keeps the gradient and the state of the last step.
    """

    def __init__(self, model: nn.Module, plan: Plan, mpu: MPU, failures: FailureLog, steps: StepCheck) -> None:
        self.mpu, self.failures, self.steps, self._plan = mpu, failures, steps, plan
        self._model = weakref.ref(model)
        self._apart: list[tuple[str, nn.Parameter]] | None = None  # weights that differ at first
        self._forwards = 0

    def attach(self, inner: nn.Module) -> SharedExperts:
        """Look at the forwards of ``inner``."""
        self._handle = inner.register_forward_pre_hook(self._on_forward)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedExperts:
        return self

    def _on_forward(self, model: nn.Module, _: Any) -> None:
        refuse_transforms(lambda: list(model.parameters()))
        if self.failures.in_deadline or torch.compiler.is_compiling():
            return  # inside of generate, whose replicas continue together
        axis, apart = self.mpu.shards, -1 - self.mpu.shards.rank
        with self.failures.wait("the forward of replicas that share experts", axis.ranks):
            if self._apart is None:
                self._apart = self._that_differ(apart)
            name, weight = self._apart[self._forwards % len(self._apart)] if self._apart else ("", None)
            self._forwards += 1
            last = self.steps.last_experts
            mine = [int(model.training), int(torch.is_grad_enabled()), _digest(weight, apart)]
            everyone = self._gathered([*mine, *([apart, apart] if last is None else last.digests(apart))])
        told = {rank: _in_words(*theirs[:2]) for rank, theirs in zip(axis.ranks, everyone, strict=True)}
        other = next((rank for rank, text in told.items() if text != told[axis.ranks[0]]), None)
        if other is not None:
            raise ConsistencyError(
                f"replicas share the experts of {type(model).__name__}, and do different things with it: rank "
                f"{axis.ranks[0]} {told[axis.ranks[0]]},\n  rank {other} {told[other]}. Tokens of all of ranks "
                f"{list(axis.ranks)} meet in each layer: train and evaluate\n  on all of them at the same time, with "
                "as many batches each."
            )
        weights, *of_step = zip(*(theirs[2:] for theirs in everyone), strict=True)
        alike = name if _repeats(weights) else last.name if last is not None and any(map(_repeats, of_step)) else ""
        if alike:
            raise ConsistencyError(same_experts(axis.ranks, alike, group_call(self.mpu)))

    def _that_differ(self, apart: int) -> list[tuple[str, nn.Parameter]]:
        """Return the weights that differ between all ranks now. A collective of the ranks with other experts."""
        model = self._model()
        every = () if model is None else model.named_parameters()
        own = [(name, weight) for name, weight in every if name in self._plan.experts]
        columns = zip(*self._gathered([_digest(weight, apart) for _, weight in own]), strict=True)
        return [named for named, column in zip(own, columns, strict=True) if not _repeats(column)]

    def _gathered(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of each rank."""
        axis = self.mpu.shards
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.mpu.device)
        found = all_gather(mine, axis, even_layout(axis.size * len(numbers), axis.size))
        rows: list[list[int]] = found.view(axis.size, -1).tolist()
        return rows

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def _digest(weight: nn.Parameter | None, apart: int) -> int:
    """Digest a weight's first elements; ``apart`` where its experts are alike, as copies of one layer are at first."""
    if weight is None or weight.is_meta or len(own := local_part(weight)) < 2:
        return apart
    with no_overrides():
        part, second = first_elements(own[:1]), first_elements(own[1:2])
    if part is None or second is None or torch.equal(part, second):
        return apart
    return of_tensor(part)


def _repeats(numbers: Any) -> bool:
    return len(set(numbers)) < len(numbers)


def _in_words(training: int, with_grad: int) -> str:
    return f"{'trains' if training else 'evaluates'} {'with' if with_grad else 'without'} gradients"

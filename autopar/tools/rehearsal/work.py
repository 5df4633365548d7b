"""Work and memory of a rehearsed rank: what it computes between its calls, and the most bytes that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from autopar.distributed.autograd_functions import listening
from autopar.foreign.tensors import local_part
from autopar.tensor_tracking import storage_key
from autopar.tools.planner.hardware import Gpu
from autopar.tools.planner.stage_costs import seconds_of
from autopar.tools.planner.storages import FusedKernels, Storages


class Work(NamedTuple):
    """Work of a rank before one of its calls.

    Attributes:
        seconds: of its operations, under the planner's costs.
        action: of the pipeline that it belongs to; "" outside of them.
    """

    seconds: float = 0.0
    action: str = ""


class Held(NamedTuple):
    """Bytes of a rank in the training step.

    Attributes:
        weights: parameters and buffers; ``gradients``, ``optimizer``: behind the backward, and behind the step.
        peak: the most that is held at one time in a later step, which finds the optimizer's states.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    peak: int = 0


class WorkCount:
    """Counts the operations of a rank.

    Args:
        gpu: of the planner, whose speeds give the seconds; ``precision``: of the products.

    Attributes:
        held: what has been seen of the states.
        after: work behind the last call of the step; None before its end.
    """

    def __init__(self, gpu: Gpu, precision: str) -> None:
        self._gpu, self._precision = gpu, precision
        self._storages = Storages()
        self._name = self._ended = ""  # of the action that runs, of one whose last work has no call behind it
        self._uncounted = 0  # bytes of weights that lived before it counted
        self._before_step = 0
        self.held = Held()
        self.after: Work | None = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what runs inside."""
        self._storages.start_operations()
        with self._storages, FusedKernels(self._storages), listening(self._action):
            yield

    @contextmanager
    def _action(self, name: str) -> Iterator[None]:
        outer, self._name = self._name, self._name or name
        try:
            yield
        finally:
            self._ended = self._name if not outer else ""
            self._name = outer

    def resized(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory anew, which torch has freed or given back."""
        self._storages.resized(tensor)

    def take(self) -> Work:
        """Return the work since the last call."""
        operations = self._storages.operations or []
        seconds = sum(seconds_of(operation, self._gpu, self._precision) for operation in operations)
        self._storages.start_operations()
        action, self._ended = self._name or self._ended, ""
        return Work(seconds, action)

    def see(self, moment: str, model: Any, optimizer: Any) -> None:
        """Look at the states when the model is ``ready``, behind the ``backward``, and behind the ``step``."""
        if moment == "ready":
            weights = _storages_of([*model.parameters(), *model.buffers()])
            self._uncounted = sum(size for key, size in weights.items() if not self._storages.knows(key))
            masters = self._storages.reset_peak() + self._uncounted - sum(weights.values())  # of half precision
            self.held = Held(weights=sum(weights.values()), optimizer=masters)
        elif moment == "backward":
            gradients = sum(_storages_of(p.grad for p in model.parameters()).values())
            self.held = self.held._replace(gradients=gradients, peak=self._storages.peak + self._uncounted)
            self._before_step = self._storages.reset_peak()
        elif moment == "step":
            made = self._storages.live - self._before_step  # by the first step
            peak = max(self.held.peak + made, self._storages.peak + self._uncounted)
            self.held = self.held._replace(optimizer=self.held.optimizer + made, peak=peak)
            self.after = self.take()


@torch.no_grad()
def _storages_of(tensors: Iterable[Any]) -> dict[int | None, int]:
    held = [local_part(each) for each in tensors if isinstance(each, torch.Tensor)]
    return {storage_key(each): each.untyped_storage().nbytes() for each in held}

"""Loss scaling for fp16: the scale, and one verdict of all ranks on whether the gradients overflowed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.config import ParallelConfig
from autopar.distributed.axis import Axis
from autopar.distributed.failures import waiting
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU

__all__ = ["GradScaler", "LossScale", "agree_on_found", "agree_on_overflow"]


class LossScale:
    """The factor of a loss before backward, so that small gradients survive in fp16: the config's ``precision``.

    An overflow uses up one of ``hysteresis`` chances; when none is left it multiplies the scale by ``backoff_factor``,
    down to ``min_scale``, and so does each further one. ``growth_interval`` steps in a row without an overflow multiply
    it by ``growth_factor``, up to ``max_scale``, and give the chances back.
    """

    def __init__(self, config: ParallelConfig) -> None:
        self._config = config
        self.scale, self.min_scale, self.max_scale = config.initial_scale, config.min_scale, config.max_scale
        self.steps, self.chances = 0, config.hysteresis  # steps in a row without an overflow
        self.skipped = 0  # steps in all

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step, or after one that was skipped because of an ``overflow``."""
        if overflow:
            self.steps, self.skipped = 0, self.skipped + 1
            self.chances = max(self.chances - 1, 0)
            if self.chances == 0:
                self.scale = max(self.scale * self._config.backoff_factor, self.min_scale)
            return
        self.steps += 1
        if self.steps == self._config.growth_interval:
            self.steps, self.chances = 0, self._config.hysteresis
            self.scale = min(self.scale * self._config.growth_factor, self.max_scale)

    def limit(self, largest: float) -> None:
        """Keep the scale at or below ``largest`` from now on."""
        self.scale, self.min_scale, self.max_scale = (
            min(value, largest) for value in (self.scale, self.min_scale, self.max_scale)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "steps": self.steps, "chances": self.chances, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.scale, self.steps, self.chances = float(state["scale"]), int(state["steps"]), int(state["chances"])
        self.skipped = int(state.get("skipped", 0))  # earlier checkpoints did not count them


def agree_on_overflow(flags: torch.Tensor, size: int, group: Any = None) -> None:
    """Replace flags by the largest of all ranks of a group of ``size``, in place: what one rank found counts for all.

    Args:
        group: the world without one.
    """
    if size > 1:
        all_reduce(flags, op=dist.ReduceOp.MAX, group=group)


def agree_on_found(found: dict[torch.device, torch.Tensor], axis: Axis, device: torch.device) -> None:
    """Make what one rank of the axis found that of all, in place: ``found`` is what torch's scalers keep.

    Args:
        found: device -> 1.0 if gradients there are not finite, else 0.0.
        device: of collectives.
    """
    flags = [value.to(device).view(1) for value in found.values()]
    flag = torch.stack(flags).amax(0) if flags else torch.zeros(1, device=device)
    agree_on_overflow(flag, axis.size, axis.group)
    for value in found.values():
        value.copy_(flag.view(value.shape))


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a parallelized model: an overflow on one rank skips the step on all of them.

    It asks the ranks of ``mpu`` whatever the optimizer holds; of what ``initialize`` has made torch's own does so as
    well. Use it as torch's: ``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``.

    Args:
        mpu: ``model.mpu``; the ranks of one model replica agree.
        device: ``cuda`` or ``cpu``; by default where the mpu computes.
        kwargs: what ``torch.amp.GradScaler`` takes.
    """

    def __init__(self, mpu: MPU, device: str | None = None, **kwargs: Any) -> None:
        super().__init__(device or mpu.device.type, **kwargs)
        self._mpu = mpu

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._unscale_grads_(*args, **kwargs)  # device -> 1.0 if its gradients are not finite
        with waiting(self._mpu, "autopar.GradScaler", self._mpu.model.ranks):
            agree_on_found(found, self._mpu.model, self._mpu.device)
        return found

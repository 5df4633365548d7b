"""Flags of ``TrainerControl``: where a callback sets one on some ranks, all ranks follow it at the same step.

A rank that stops, evaluates or saves alone would wait for collectives that the other ranks never start.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerControl

from autopar.distributed.failures import waiting
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.integrations.trainer.steps import ParallelBase
from autopar.swap import swap

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class CallbackFlagsMixin(ParallelBase):
    """Agreement before the trainer reads the flags, once for each step."""

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        mpu: MPU = self.model.mpu
        _agree(self.control, mpu)
        control = self.control
        calls_more = control.should_log or control.should_evaluate or control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if calls_more:  # on_log, on_evaluate or on_save
            _agree(self.control, mpu)


def agree_in_events(handler: Any, mpu: MPU) -> None:
    """Let the trainer's ``CallbackHandler`` agree after the other events whose flags the trainer reads at once."""
    swap(handler, _AgreedEvents, autopar_mpu=mpu)


class _AgreedEvents:
    """Class before that of a ``CallbackHandler``."""

    autopar_mpu: MPU

    def on_substep_end(self, *args: Any, **kwargs: Any) -> Any:
        return _agree(super().on_substep_end(*args, **kwargs), self.autopar_mpu)  # type: ignore[misc]

    def on_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return _agree(super().on_evaluate(*args, **kwargs), self.autopar_mpu)  # type: ignore[misc]


def _agree(control: TrainerControl, mpu: MPU) -> TrainerControl:
    """Set each flag that some rank has set, on all ranks. One small collective on the CPU, over the world."""
    if mpu.world_size > 1:
        flags = torch.tensor([getattr(control, flag) for flag in _FLAGS], dtype=torch.int32, device="cpu")
        with waiting(mpu, "the flags that callbacks set", range(mpu.world_size)):
            all_reduce(flags, dist.ReduceOp.MAX, group=mpu.control)
        for flag, value in zip(_FLAGS, flags.tolist(), strict=True):
            setattr(control, flag, bool(value))
    return control

"""A signal that asks a job to stop, such as the SIGTERM that torchrun and SLURM send before they kill it.

It reaches the ranks at different moments, and some of them not at all. So each notes what it got, and all ask at the
same place of their loop whether any of them did. Megatron-LM has the same idea (training/dist_signal_handler.py).
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError


class StopSignal:
    """Note signals, so that all ranks can save at the same step and end by themselves::

        with autopar.StopSignal(model.mpu) as stop:
            for step, batch in enumerate(loader):
                ...
                if stop.requested():
                    model.save_parallelized(f"run/step-{step}", optimizer=optimizer)
                    break

    A second signal of the same kind does what it did before: it ends the process, if nobody handled it.

    Args:
        mpu: ``model.mpu``.
        signals: numbers, by default ``signal.SIGTERM``. SLURM sends another one some time before the end of a job, if
            asked to: ``--signal=USR1@120``.

    Raises:
        ConfigError: not in the main thread, where alone Python handles signals.
    """

    def __init__(self, mpu: MPU, *signals: int) -> None:
        self._group = mpu.control if mpu.world_size > 1 else None
        self._got = 0
        self._before: dict[int, Any] = {}
        for number in signals or (signal.SIGTERM,):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError as error:
                self.close()
                raise ConfigError(f"StopSignal: {error}\n  Make it where the training loop is started.") from error

    def requested(self) -> bool:
        """Tell whether any rank has got a signal: the same answer on every rank. Every rank calls it, once a step.

        It takes one number over gloo, a fraction of a millisecond on one machine.
        """
        flag = torch.tensor([self._got])
        if self._group is not None:
            all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def close(self) -> None:
        """Handle the signals as before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._got = number
        signal.signal(number, self._before.pop(number))

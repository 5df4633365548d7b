"""What a process says to the others when an exception ends it, and learns of them if it waited for one in vain.

``execute_pipeline``, ``generate`` and ``optimizer.step()`` tell their errors themselves. In a loop of the user's own
nothing of ours is on the way out but Python's hook for exceptions that nobody caught. It belongs to the process, so
this module keeps the roll calls of all models that live.
"""

from __future__ import annotations

import sys
import weakref
from types import TracebackType

from autopar.distributed.failures import RollCall
from autopar.errors import PipelineError

__all__ = ["tell_uncaught"]

_rolls: weakref.WeakSet[RollCall] = weakref.WeakSet()


def tell_uncaught(roll: RollCall) -> None:
    """From now on, tell the other ranks of ``roll`` which exception ends this process."""
    if roll.mpu.world_size == 1:
        return
    _rolls.add(roll)
    if not getattr(sys.excepthook, "_autopar", False):
        _install()


def _install() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for roll in list(_rolls):
                _tell(roll, error)
        finally:
            before(kind, error, trace)

    hook._autopar = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _tell(roll: RollCall, error: BaseException) -> None:
    others = [rank for rank in range(roll.mpu.world_size) if rank != roll.mpu.rank]
    if isinstance(error, RuntimeError) and (lost := roll.translated(error, "a collective", others)) is not None:
        error.add_note(f"autopar: {lost}")
    elif not isinstance(error, PipelineError):
        roll.explain(error)

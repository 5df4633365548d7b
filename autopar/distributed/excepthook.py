"""The exception hook: publish the exception that ends this process, and name the rank that it waited for in vain.

``execute_pipeline``, ``generate`` and ``optimizer.step()`` publish their errors themselves. In a loop of the user's own
nothing of ours is on the way out but Python's hook for uncaught exceptions. It belongs to the process, so this module
keeps the failure logs of all models that live.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType

from autopar.distributed.failures import FailureLog
from autopar.errors import PipelineError

__all__ = ["publish_uncaught"]

Explain = Callable[[BaseException], str | None]
_logs: weakref.WeakKeyDictionary[FailureLog, Explain] = weakref.WeakKeyDictionary()


def publish_uncaught(failures: FailureLog, explain: Explain) -> None:
    """Publish in this failure log, from now on, the exception that ends this process.

    Args:
        explain: returns what to add to the exception's own words, or None.
    """
    if failures.mpu.world_size == 1:
        return
    _logs[failures] = explain
    if not getattr(sys.excepthook, "_autopar", False):
        _install()


def _install() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for failures, explain in list(_logs.items()):
                _publish(failures, error)
                note = explain(error)
                if note is not None:
                    error.add_note(note)
        finally:
            before(kind, error, trace)

    hook._autopar = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _publish(failures: FailureLog, error: BaseException) -> None:
    others = [rank for rank in range(failures.mpu.world_size) if rank != failures.mpu.rank]
    if isinstance(error, RuntimeError) and (failure := failures.failure_of(error, "a collective", others)) is not None:
        error.add_note(f"autopar: {failure}")
    elif not isinstance(error, PipelineError):
        failures.publish_error(error)

"""The exception that ends a process: what it prints, and what it leaves for others.

An error of autopar ends in its sentence: frames of autopar and torch are hidden (``AUTOPAR_TRACEBACK=full`` shows
them), and where every rank raises the same, rank 0 alone prints all of it. The sentence goes to torchrun's error file
too, so that its "Root Cause" shows it, and to the failure logs of all models, where the other ranks read it.

Python's hook for uncaught exceptions belongs to the process, so this module keeps the logs of all models.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from autopar.call_site import is_installed
from autopar.distributed.failures import FailureLog
from autopar.distributed.process import end_after_gloo
from autopar.errors import AutoparError, PipelineError, first_line

_HIDDEN = ("autopar", "torch")  # packages whose frames an error of autopar does not show
_HEAD_START = 1.0  # seconds: torchrun ends all ranks with the first, and rank 0 has the most to print

Explain = Callable[[BaseException], str | None]
_logs: weakref.WeakKeyDictionary[FailureLog, Explain] = weakref.WeakKeyDictionary()


def publish_uncaught(failures: FailureLog, explain: Explain) -> None:
    """Publish in this failure log, from now on, the exception that ends this process.

    Args:
        explain: returns what to add to the exception's own words, or None.
    """
    if failures.mpu.world_size > 1:
        _logs[failures] = explain
        shorten_uncaught()
        end_after_gloo()


def shorten_uncaught() -> None:
    """Let errors of autopar that end this process end in a sentence, from now on."""
    if not getattr(sys.excepthook, "_autopar", False):
        _install()


def _install() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for failures, explain in list(_logs.items()):
                _publish(failures, error)
                note = explain(error)
                told = any(each.startswith("autopar: ") for each in getattr(error, "__notes__", ()))
                if note is not None and not told:
                    error.add_note(note)
            if isinstance(error, AutoparError) and os.environ.get("AUTOPAR_TRACEBACK") != "full":
                trace = _shorten(error, trace)
            _tell_torchrun(error, trace)
        finally:
            before(kind, error, trace)
            if isinstance(error, AutoparError) and error.told_by_rank_0:
                time.sleep(_HEAD_START)

    hook._autopar = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _publish(failures: FailureLog, error: BaseException) -> None:
    others = [rank for rank in range(failures.mpu.world_size) if rank != failures.mpu.rank]
    if isinstance(error, RuntimeError) and (failure := failures.failure_of(error, "a collective", others)) is not None:
        error.add_note(f"autopar: {failure}")
    elif not isinstance(error, PipelineError):
        failures.publish_error(error)


def _shorten(error: AutoparError, trace: TracebackType | None) -> TracebackType | None:
    """Take from an error that ends the process what only developers of autopar read, and return its traceback."""
    cause = error.__cause__
    if error.told_by_rank_0:
        error.args, error.__notes__, trace = (f"{first_line(error)} (rank 0 prints all of it)",), [], None
    elif cause is not None and str(getattr(cause, "strerror", None) or first_line(cause)) not in str(error):
        error.add_note(f"  Caused by {type(cause).__name__}: {first_line(cause)}")
    trace = _of_the_user(trace)
    error.__cause__, error.__suppress_context__ = None, True
    error.__traceback__ = trace
    return trace


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of autopar and torch."""
    if trace is None:
        return None
    rest = _of_the_user(trace.tb_next)
    package = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
    return rest if package in _HIDDEN else TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _tell_torchrun(error: BaseException, trace: TracebackType | None) -> None:
    """Write the sentence of an error to where torchrun looks, unless the script's own ``@record`` has."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or not isinstance(error, Exception) or Path(file).exists():
        return
    text = f"{type(error).__name__}: {error}"
    if trace is not None:
        frames = traceback.extract_tb(trace)
        own = [frame for frame in frames if not is_installed(frame.filename)]
        last = (own or frames)[-1] if isinstance(error, AutoparError) else frames[-1]
        text += f"\n  {last.filename}:{last.lineno}, in {last.name}"
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": message}))

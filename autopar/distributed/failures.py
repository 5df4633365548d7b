"""The failure log: reports of failed ranks, for the ranks that wait for them.

The error of a failed collective, "connection closed by peer" or a timeout, names neither the failed rank nor the
reason. So every rank registers its process at the start, and a failed rank publishes the reason in torch.distributed's
key-value store, which torchrun's launcher keeps alive. A rank that times out looks for processes that have ended
(reliable only on its machine) and reads the reports of the other ranks.

``execute_pipeline``, ``generate`` and ``optimizer.step()`` publish their errors. In the user's loop Python's hook for
uncaught exceptions does it. There is one hook per process, so this module keeps the logs of all models. An uncaught
error of autopar is printed as its message, also in torchrun's error file. Frames of autopar and torch are hidden
(``AUTOPAR_TRACEBACK=full`` shows them). If every rank raises the same error, only rank 0 prints the full message.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from autopar.call_site import is_installed
from autopar.compat.c10d import PrefixStore, backends_of, default_group, default_store, has_timeout, set_timeout
from autopar.distributed.collectives import gathered
from autopar.distributed.mesh import MPU, destroy_dropped, dropped
from autopar.distributed.process import Process, end_after_gloo
from autopar.errors import AutoparError, PipelineError, first_line
from autopar.swap import NotCopied

GRACE = 3.0  # seconds to wait for the report of a failed rank
_GRACE_AFTER_DEATH = 1.0  # seconds to wait once a process is known to have ended; also for the store
_RECENT = 60.0  # seconds after which a report is quoted with its age
_LONGEST = 4000  # characters of a report
# The words in torch's errors for a lost peer.
_LOST = re.compile(
    r"gloo/|NCCL error|ncclUnhandled|ncclRemote|pair closure|Timed out waiting|Broken pipe|"
    r"Connection (closed|reset) by peer|Connection refused"
)


class FailureLog(NotCopied):
    """The failure reports of all ranks of one model. The constructor is a collective of the world.

    Args:
        timeout: The seconds that a collective inside of :meth:`deadline` waits.

    Attributes:
        name: The prefix of the model's keys in the store, identical on all ranks.
    """

    def __init__(self, mpu: MPU, timeout: float) -> None:
        self.mpu, self.timeout = mpu, timeout
        mine = (Process.current(), uuid.uuid4().hex, dropped())
        everyone = gathered(mine, mpu.control) if mpu.world_size > 1 else [mine]
        destroy_dropped([numbers for _, _, numbers in everyone])
        self._processes = [process for process, _, _ in everyone]
        self.name = everyone[0][1]  # unique for this log, identical on all ranks
        self._store = PrefixStore(f"autopar failures {self.name}", default_store())
        self._published = False
        self.in_deadline = False  # True while collectives are limited to ``timeout``
        self._found: tuple[int, list[Any]] = (-1, [])  # number of groups, and their backends
        self._store_lost = False  # True once the store no longer answers

    # -- reports ---------------------------------------------------------------------------------------------------

    def publish(self, text: str, *, pending: bool = False) -> None:
        """Publish the reason why this rank fails; ``pending``: True if it still reads other reports."""
        self._published = True
        report = f"{'?' if pending else '!'}{time.time():.0f} {text[:_LONGEST]}"
        self._ask(lambda: self._store.set(str(self.mpu.rank), report))

    def publish_error(self, error: BaseException) -> None:
        """Publish this error, unless a report was published since :meth:`clear`."""
        if not self._published and self.mpu.world_size > 1:
            self.publish(str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}")

    def clear(self) -> None:
        """Delete the report of this rank, because training continues."""
        if self._published:
            self._ask(lambda: self._store.set(str(self.mpu.rank), ""))
            self._published = False

    def read(self, rank: int) -> tuple[str, bool, float]:
        """Return a rank's last report (``""`` if none), whether it is pending, and its age in seconds."""
        key = str(rank)
        found = self._ask(lambda: self._store.get(key).decode(errors="replace") if self._store.check([key]) else "")
        if not found:
            return "", False, 0.0
        when, _, text = found[1:].partition(" ")
        return text, found[0] == "?", time.time() - float(when)

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has certainly ended."""
        return self._processes[rank].is_alive() is False

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Query the store; return None, now and in later calls, if its process has ended or does not answer."""
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        if not self._store_lost:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(_GRACE_AFTER_DEATH)
            self._store_lost = thread.is_alive()
        return answers[0] if answers else None

    def describe(self, ranks: Iterable[int]) -> str:
        """Describe the missing ``ranks``, and all ranks whose process has ended, in indented lines.

        Wait :data:`GRACE` seconds for ranks without a report, and a little longer for pending reports.
        """
        asked = [rank for rank in ranks if rank != self.mpu.rank]
        start = time.monotonic()
        while True:
            ended = [rank for rank in range(len(self._processes)) if self.has_ended(rank)]
            reports = {rank: self.read(rank) for rank in sorted({*asked, *ended})}
            silent = [rank for rank in asked if rank not in ended and not reports[rank][0]]
            pending = [rank for rank in asked if rank not in ended and reports[rank][1]]
            waited = time.monotonic() - start
            limit = _GRACE_AFTER_DEATH if ended else GRACE
            if (not silent or waited > limit) and (not pending or waited > limit + _GRACE_AFTER_DEATH):
                break
            time.sleep(0.05)
        lines = []
        for rank, (text, unfinished, age) in reports.items():
            if rank in ended:
                lines.append(f"rank {rank} has ended: its process {self._processes[rank].pid} is gone.")
            if text and not (unfinished and (ended or silent)):  # a pending report adds nothing
                ago = f" {age:.0f} s ago" if age > _RECENT else ""
                lines.append(f"rank {rank} said{ago}: " + text.replace("\n", "\n    "))
        if silent and not ended:
            names = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
            lines.append(f"{names} said nothing: hanging, late, or ended on another machine.")
        return "\n".join(f"  {line}" for line in lines) or "  See its log for the reason."

    # -- errors of collectives -------------------------------------------------------------------------------------

    def failure(self, text: str, ranks: Iterable[int], error: Exception) -> PipelineError:
        """Publish and return the error of this rank, which timed out waiting for ``ranks``."""
        self.publish(text, pending=True)
        text = f"{text}\n{self.describe(ranks)}\n  torch says: {first_line(error)}"
        self.publish(text)
        return PipelineError(text)

    def failure_of(self, error: RuntimeError, collective: str, ranks: Sequence[int]) -> PipelineError | None:
        """Return :meth:`failure` if ``error`` of a collective means that one of its ranks is lost, otherwise None."""
        if set(ranks) <= {self.mpu.rank} or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
            return None
        return self.failure(
            f"{collective} failed: one of the ranks {list(ranks)} ended, failed or hangs.", ranks, error
        )

    def failure_of_layer(self, error: RuntimeError, axis: str, ranks: Sequence[int]) -> PipelineError | None:
        """Return :meth:`failure_of` for a layer's collective, or None inside of a call with a better error."""
        names = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline", "ep": "expert"}
        kind = f"{names[axis]}-parallel" if axis in names else axis
        article = "an" if kind[0] in "aeiou" else "a"
        return None if self.in_deadline else self.failure_of(error, f"{article} {kind} collective", ranks)

    @contextlib.contextmanager
    def blame(self, collective: str, ranks: Sequence[int]) -> Iterator[None]:
        """Raise a PipelineError that names the collective and the failed rank if one of ``ranks`` fails."""
        try:
            yield
        except PipelineError:
            raise
        except RuntimeError as error:
            failure = self.failure_of(error, collective, ranks)
            if failure is None:
                raise
            raise failure from error

    @contextlib.contextmanager
    def wait(self, collective: str, ranks: Sequence[int]) -> Iterator[None]:
        """Combine :meth:`deadline` and :meth:`blame` for a collective."""
        with self.deadline(), self.blame(collective, ranks):
            yield

    @contextlib.contextmanager
    def deadline(self) -> Iterator[None]:
        """Limit the collectives in the block to ``timeout`` seconds instead of torch's timeout, and publish errors.

        ``StopIteration`` is not an error. Only one thread may use it at a time, because process groups have the
        timeouts.
        """
        if self.in_deadline or self.mpu.world_size == 1:
            yield
            return
        before = [(backend, backend.options._timeout) for backend in self._backends()]
        self.clear()
        self.in_deadline = True
        try:
            for backend, _ in before:
                set_timeout(backend, timedelta(seconds=self.timeout))
            yield
        except StopIteration:
            raise
        except Exception as error:
            self.publish_error(error)
            raise
        finally:
            self.in_deadline = False
            for backend, timeout in before:
                set_timeout(backend, timeout)

    def _backends(self) -> list[Any]:
        """Return the backends of the mesh's groups, of groups of stages that share weights, and of the world."""
        if self._found[0] != len(self.mpu._owned):
            backends = (each for group in (default_group(), *self.mpu._owned) for each in backends_of(group))
            inner = [getattr(each, "wrapped_pg", each) for each in backends]  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            self._found = len(self.mpu._owned), list({id(each): each for each in inner if has_timeout(each)}.values())
        return self._found[1]


@contextlib.contextmanager
def waiting(mpu: MPU, collective: str, ranks: Sequence[int]) -> Iterator[None]:
    """Limit and name a collective by the failure log of ``mpu`` (:meth:`FailureLog.wait`), if it has one."""
    with contextlib.nullcontext() if mpu.failures is None else mpu.failures.wait(collective, ranks):
        yield


_HIDDEN = ("autopar", "torch")  # packages whose frames are hidden in an error of autopar
_HEAD_START = 1.0  # seconds for rank 0 to print first, because torchrun ends all ranks when the first one ends

_logs: weakref.WeakSet[FailureLog] = weakref.WeakSet()


def publish_uncaught(failures: FailureLog) -> None:
    """Publish the exception that ends this process in this failure log."""
    if failures.mpu.world_size > 1:
        _logs.add(failures)
        shorten_uncaught()
        end_after_gloo()


def shorten_uncaught() -> None:
    """Print only the message of an error of autopar that ends this process."""
    if getattr(sys.excepthook, "_autopar", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for failures in list(_logs):
                _publish(failures, error)
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
    """Strip details for developers of autopar from an error that ends the process; return its traceback."""
    cause = error.__cause__
    if error.told_by_rank_0:
        error.args, error.__notes__, trace = (f"{first_line(error)} (rank 0 prints the full message)",), [], None
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
    """Write the message of an error to torchrun's error file, unless the script uses ``@record``."""
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

"""Who is still there: what a rank says when it fails, and what those learn who waited for it in vain.

A collective that fails says "connection closed by peer" or that time ran out: neither who, nor why. So every rank tells
the others at the start in which process it runs, and a rank that fails lays down why in torch.distributed's key-value
store, which under torchrun lives in the launcher and outlives every rank. Who waited in vain looks for processes that
are gone (on its own machine that is certain) and reads what the others have said.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from autopar.distributed.mesh import MPU
from autopar.errors import PipelineError

__all__ = ["PATIENCE", "Process", "RollCall", "Word"]

PATIENCE = 3.0  # seconds that a rank is given to say why it failed
_CERTAIN = 1.0  # seconds for the others, once some process is known to be gone
_LONGEST = 4000  # characters of what a rank says
# In torch's words for a lost peer.
_LOST = re.compile(
    r"gloo/|NCCL error|ncclUnhandled|ncclRemote|pair closure|Timed out waiting|Broken pipe|"
    r"Connection (closed|reset) by peer|Connection refused"
)


class Process(NamedTuple):
    """A process, so that another one can tell whether it is still there.

    Attributes:
        place: the machine, since it was started, and the namespace in which ``pid`` counts.
        started: when, in the kernel's ticks; empty where the kernel does not tell.
    """

    place: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Process:
        """This one."""
        return cls(_place(), os.getpid(), _status(os.getpid())[1])

    def is_there(self) -> bool | None:
        """Whether it runs; None if that cannot be told, because it runs on another machine."""
        if self.place != _place():
            return None
        if not self.started:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except OSError:
                return None
            return True
        state, started = _status(self.pid)
        return None if state == "?" else state not in "ZX" and started == self.started


class Word(NamedTuple):
    """What a rank said.

    Attributes:
        text: empty if it said nothing.
        asking: whether it is still asking others, so that more may come.
        age: seconds since then.
    """

    text: str
    asking: bool
    age: int


def _place() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _status(pid: int) -> tuple[str, str]:
    """State and start time of a process (proc(5), /proc/pid/stat); X if there is none, ? if that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    except OSError:
        return "?", ""
    return fields[0], fields[19]


class RollCall:
    """What the ranks of the world say of themselves; every rank makes it, one object exchange.

    Args:
        timeout: seconds that a collective inside of :meth:`patience` waits.

    Attributes:
        name: what keys of its ranks in the store begin with.
    """

    def __init__(self, mpu: MPU, timeout: float) -> None:
        self.mpu, self.timeout = mpu, timeout
        mine = (Process.here(), uuid.uuid4().hex)
        everyone: list[tuple[Process, str]] = [mine] * mpu.world_size
        if mpu.world_size > 1:
            dist.all_gather_object(everyone, mine, group=mpu.control)
        self._processes = [process for process, _ in everyone]
        self.name = everyone[0][1]  # of this call, the same on all ranks and on no other
        self._store = PrefixStore(f"autopar roll call {self.name}", _get_default_store())
        self._spoke = False
        self._patient = False
        self._deaf = False  # the store no longer answers

    def __deepcopy__(self, memo: dict[int, Any]) -> RollCall:
        return self

    # -- saying and hearing ----------------------------------------------------------------------------------------

    def say(self, text: str, *, asking: bool = False) -> None:
        """Lay down why this rank fails; ``asking``: as far as it knows, it still finds out what others say."""
        self._spoke = True
        word = f"{'?' if asking else '!'}{time.time():.0f} {text[:_LONGEST]}"
        self._ask(lambda: self._store.set(str(self.mpu.rank), word))

    def explain(self, error: BaseException) -> None:
        """Say this error, if nothing was said since :meth:`withdraw`."""
        if not self._spoke and self.mpu.world_size > 1:
            self.say(str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}")

    def withdraw(self) -> None:
        """Things go on: what this rank said holds no longer."""
        if self._spoke:
            self._ask(lambda: self._store.set(str(self.mpu.rank), ""))
            self._spoke = False

    def heard(self, rank: int) -> Word:
        """What that rank said last."""
        key = str(rank)
        said = self._ask(lambda: self._store.get(key).decode(errors="replace") if self._store.check([key]) else "")
        if not said:
            return Word("", False, 0)
        when, _, text = said[1:].partition(" ")
        return Word(text, said[0] == "?", max(0, round(time.time() - float(when))))

    def has_ended(self, rank: int) -> bool:
        """Whether that rank's process is certainly gone."""
        return self._processes[rank].is_there() is False

    def _ask(self, question: Callable[[], Any]) -> Any:
        """What the store says; None if who keeps it is gone, or does not answer: then it is not asked again."""
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        if not self._deaf:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(_CERTAIN)
            self._deaf = thread.is_alive()
        return answers[0] if answers else None

    def about(self, ranks: Iterable[int]) -> str:
        """What is known of these ranks, for which this one waited in vain, and of all whose process is gone.

        Gives those that have said nothing :data:`PATIENCE` seconds to do so, and those that are asking others
        themselves a little more. Lines, indented by two.
        """
        asked = [rank for rank in ranks if rank != self.mpu.rank]
        start = time.monotonic()
        while True:
            gone = [rank for rank, process in enumerate(self._processes) if process.is_there() is False]
            said = {rank: self.heard(rank) for rank in sorted({*asked, *gone})}
            silent = [rank for rank in asked if rank not in gone and not said[rank].text]
            asking = [rank for rank in asked if rank not in gone and said[rank].asking]
            waited = time.monotonic() - start
            limit = _CERTAIN if gone else PATIENCE
            if (not silent or waited > limit) and (not asking or waited > limit + _CERTAIN):
                break
            time.sleep(0.05)
        lines = []
        for rank, (text, unfinished, age) in said.items():
            if rank in gone:
                lines.append(f"rank {rank} has ended: its process {self._processes[rank].pid} is gone.")
            if text and not (unfinished and (gone or silent)):  # they know no more than this one
                ago = f" {age} s ago" if age > 1 else ""
                lines.append(f"rank {rank} said{ago}: " + text.replace("\n", "\n    "))
        if silent and not gone:
            names = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
            lines.append(f"{names} said nothing: hanging, late, or ended on another machine.")
        return "\n".join(f"  {line}" for line in lines) or "  Its own log tells why."

    def lost(self, text: str, ranks: Iterable[int], error: Exception) -> PipelineError:
        """The error of this rank, which waited in vain for ``ranks``; it is said, too."""
        self.say(text, asking=True)
        said = f"{text}\n{self.about(ranks)}\n  torch says: {_first_line(error)}"
        self.say(said)
        return PipelineError(said)

    @contextlib.contextmanager
    def naming(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """A collective of ``ranks`` inside that fails raises a PipelineError that says what it was and who failed."""
        try:
            yield
        except PipelineError:
            raise
        except RuntimeError as error:
            lost = self.translated(error, what, ranks)
            if lost is None:
                raise
            raise lost from error

    def translated(self, error: RuntimeError, what: str, ranks: Sequence[int]) -> PipelineError | None:
        """The error of this rank if ``error`` means that one of ``ranks`` was waited for in vain; else None.

        Args:
            what: the collective that failed.
        """
        if set(ranks) <= {self.mpu.rank} or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
            return None
        return self.lost(f"{what} failed: one of the ranks {list(ranks)} ended, failed or hangs.", ranks, error)

    def in_collective(self, error: RuntimeError, axis: str, ranks: Sequence[int]) -> PipelineError | None:
        """:meth:`translated` for a collective of the layers, unless a call around it will say more."""
        names = {"tp": "tensor-parallel", "dp": "data-parallel", "pp": "pipeline-parallel"}
        return None if self._patient else self.translated(error, f"a {names.get(axis, axis)} collective", ranks)

    # -- waiting ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Collectives inside wait no longer than ``timeout`` seconds, outside as torch was told; errors are said.

        ``StopIteration`` is none. Of one thread at a time: the timeouts are those of the process groups.
        """
        if self._patient or self.mpu.world_size == 1:
            yield
            return
        before = [(backend, backend.options._timeout) for backend in self._backends()]
        self.withdraw()
        self._patient = True
        try:
            for backend, _ in before:
                backend._set_default_timeout(timedelta(seconds=self.timeout))
            yield
        except StopIteration:
            raise
        except Exception as error:
            self.explain(error)
            raise
        finally:
            self._patient = False
            for backend, timeout in before:
                backend._set_default_timeout(timeout)

    def _backends(self) -> list[Any]:
        """Of the mesh's groups, of those made for stages that share weights, and of the world's."""
        found: dict[int, Any] = {}
        for group in (dist.distributed_c10d._get_default_group(), *self.mpu._owned):
            for device in group._device_types:
                backend = group._get_backend(device)
                backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
                if hasattr(backend, "_set_default_timeout") and hasattr(backend, "options"):
                    found[id(backend)] = backend
        return list(found.values())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

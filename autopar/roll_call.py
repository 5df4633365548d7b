"""Who is still there: what a rank says when it fails, and what those learn who waited for it in vain.

A collective that fails says "connection closed by peer" or that time ran out: neither who, nor why. So every rank tells
the others at the start in which process it runs, and a rank that fails lays down why in torch.distributed's key-value
store, which under torchrun lives in the launcher and outlives every rank. Who waited in vain looks for processes that
are gone (on its own machine that is certain) and reads what the others have said.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, _set_pg_timeout

from autopar.errors import PipelineError
from autopar.mesh import MPU

__all__ = ["PATIENCE", "Process", "RollCall"]

PATIENCE = 3.0  # seconds that a rank is given to say why it failed
_CERTAIN = 1.0  # seconds for the others, once some process is known to be gone
_LONGEST = 4000  # characters of what a rank says
_LOST = ("gloo", "nccl", "timed out", "connection", "broken pipe")  # in torch's words for a lost peer


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
        return cls(_place(), os.getpid(), (_status(os.getpid()) or ("", ""))[1])

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
        state, started = _status(self.pid) or ("X", "")
        return state not in "ZX" and started == self.started


def _place() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _status(pid: int) -> tuple[str, str] | None:
    """State and start time of a process (proc(5), /proc/pid/stat); None if there is none, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


class RollCall:
    """What the ranks of the world say of themselves; every rank makes it, one object exchange.

    Args:
        timeout: seconds that a collective inside of :meth:`patience` waits.
    """

    def __init__(self, mpu: MPU, timeout: float) -> None:
        self.mpu, self.timeout = mpu, timeout
        mine = (Process.here(), uuid.uuid4().hex)
        everyone: list[tuple[Process, str]] = [mine] * mpu.world_size
        if mpu.world_size > 1:
            dist.all_gather_object(everyone, mine, group=mpu.control)
        self._processes = [process for process, _ in everyone]
        self._store = PrefixStore(f"autopar roll call {everyone[0][1]}", _get_default_store())
        self._spoke = False
        self._patient = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RollCall:
        return self

    # -- saying and hearing ----------------------------------------------------------------------------------------

    def say(self, text: str, *, asking: bool = False) -> None:
        """Lay down why this rank fails; ``asking``: as far as it knows, it still finds out what others say."""
        self._spoke = True
        with contextlib.suppress(RuntimeError):  # who kept the store may be gone
            self._store.set(str(self.mpu.rank), ("?" if asking else "!") + text[:_LONGEST])

    def withdraw(self) -> None:
        """Things go on: what this rank said holds no longer."""
        if self._spoke:
            with contextlib.suppress(RuntimeError):
                self._store.set(str(self.mpu.rank), "")
            self._spoke = False

    def heard(self, rank: int) -> tuple[str, bool]:
        """What that rank said last (empty if nothing), and whether it is still asking others."""
        key = str(rank)
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                said: str = self._store.get(key).decode(errors="replace")
                return said[1:], said[:1] == "?"
        return "", False

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
            silent = [rank for rank in asked if rank not in gone and not said[rank][0]]
            asking = [rank for rank in asked if rank not in gone and said[rank][1]]
            waited = time.monotonic() - start
            limit = _CERTAIN if gone else PATIENCE
            if (not silent or waited > limit) and (not asking or waited > limit + _CERTAIN):
                break
            time.sleep(0.05)
        lines = []
        for rank, (text, unfinished) in said.items():
            if rank in gone:
                lines.append(f"rank {rank} has ended: its process {self._processes[rank].pid} is gone.")
            if text and not (unfinished and (gone or silent)):  # they know no more than this one
                lines.append(f"rank {rank} said: " + text.replace("\n", "\n    "))
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
            if not isinstance(error, dist.DistError) and not any(sign in str(error).lower() for sign in _LOST):
                raise
            text = f"{what} failed: one of the ranks {list(ranks)} ended, failed or hangs."
            raise self.lost(text, ranks, error) from error

    # -- waiting ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Collectives of the mesh inside wait no longer than ``timeout`` seconds; outside as torch was told."""
        if self._patient or self.mpu.world_size == 1:
            yield
            return
        before = [(group, _timeout_of(group)) for group in self._groups()]
        self._patient = True
        try:
            for group, _ in before:
                _set_pg_timeout(timedelta(seconds=self.timeout), group)
            yield
        finally:
            self._patient = False
            for group, timeout in before:
                _set_pg_timeout(timeout, group)

    def _groups(self) -> list[Any]:
        """The mesh's groups, those made for stages that share weights, and the world's."""
        return list({id(group): group for group in (dist.group.WORLD, *self.mpu._owned)}.values())


def _timeout_of(group: Any) -> timedelta:
    device = group._device_types[0] if torch.device("cpu") not in group._device_types else torch.device("cpu")
    found: timedelta = group._get_backend(device).options._timeout
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

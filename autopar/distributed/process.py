"""Identity of a process: on which machine it runs, and whether it is still alive."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

__all__ = ["Process"]


class Process(NamedTuple):
    """Identity of a process, from which another process can tell whether it is still alive.

    Attributes:
        place: the machine, since it was started, and the namespace in which ``pid`` counts.
        started: start time in the kernel's ticks; empty where the kernel does not tell.
    """

    place: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Process:
        """Return the identity of this process."""
        return cls(_place(), os.getpid(), _status(os.getpid())[1])

    def is_alive(self) -> bool | None:
        """Check whether the process runs; None if that cannot be told, because it runs on another machine."""
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

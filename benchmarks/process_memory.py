"""Memory and bytes read of this process, as the kernel counts them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def status(key: str, process: str = "self") -> int:
    """Return a line of /proc/PID/status in bytes; 0 if the process has ended."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def high_water(process: str = "self") -> int:
    """Return the highest resident set so far."""
    return status("VmHWM", process)


def forget_high_water() -> int:
    """Make the resident set of now the highest one; returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()


def bytes_read() -> int:
    """Return the bytes of all read calls; pages of a mapped file are not among them."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@contextmanager
def anonymous_peak() -> Iterator[list[int]]:
    """Yield a list that has one number at the end: how far the memory of no file rose inside of ``with``, in bytes."""
    before, over, most = status("RssAnon"), threading.Event(), 0

    def sample() -> None:
        nonlocal most
        while not over.wait(0.001):
            most = max(most, status("RssAnon") - before)

    found, thread = list[int](), threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.append(max(most, status("RssAnon") - before))

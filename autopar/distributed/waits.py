"""What a rank waits in, for the error of another one that waits for it in vain.

Who sits in a collective cannot say so. A rank notes what it begins; a thread looks once a second, and tells what takes
longer than that, with the line of the user's code. So a step costs nothing, and a rank that waits elsewhere is found.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from autopar.call_site import line_of_user

__all__ = ["Waits"]

_LOOK = 1.0  # seconds between two looks
_known: weakref.WeakSet[Waits] = weakref.WeakSet()
_thread: list[threading.Thread] = []


class _Wait(NamedTuple):
    what: str
    since: float
    thread: int


class Waits:
    """The waits of this rank, as those of one model: innermost first.

    Args:
        tell: publishes a text; empty: nothing takes long. Called from another thread.
    """

    def __init__(self, tell: Callable[[str], Any]) -> None:
        self._tell = tell
        self._now: _Wait | None = None
        self._told: _Wait | None = None

    @contextlib.contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Note what this rank does inside, where it may wait for others."""
        before, self._now = self._now, _Wait(what, time.time(), threading.get_ident())
        try:
            yield
        finally:
            self._now = before

    def watch(self) -> None:
        """Tell what takes long, from now on, as long as this object lives."""
        _known.add(self)
        if not _thread or not _thread[0].is_alive():  # it does not live on in a fork
            _thread[:] = [threading.Thread(target=_look, daemon=True, name="autopar waits")]
            _thread[0].start()

    def look(self) -> None:
        """Tell what has taken long, if that has not been told; and when it has come to its end."""
        now = self._now
        if now is None or time.time() - now.since < _LOOK:
            now = None
        if now is self._told:
            return
        frame = None if now is None else sys._current_frames().get(now.thread)
        where = "" if frame is None else f" ({line_of_user(frame)})"
        with contextlib.suppress(RuntimeError):
            self._tell("" if now is None else f"{now.since:.0f} {now.what}{where}")
        self._told = now


def _look() -> None:
    while True:
        time.sleep(_LOOK)
        for waits in list(_known):
            waits.look()

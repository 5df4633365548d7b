"""Messages between the processes of a cast. A sender does not wait for its receiver."""

from __future__ import annotations

import pickle
import select
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from autopar.tools.rehearsal.standstill import Standstill

_WAIT = 180.0  # seconds for another process
_LOOK = 0.5  # seconds until a process that waits looks whether all do
_PART = 1 << 15  # bytes; a socket that takes something takes that at once
_END = "end"


class LeftAloneError(BaseException):
    """The rank waits for one whose program has ended, or that waits for it; no part of the program may catch it."""


class Links:
    """A process's connections to the others of its cast.

    While it waits, to send or to receive, it takes whatever comes from any of them. So those go on that send to it.

    Args:
        rank: this one.
        links: a connection to each of the others.
        standstill: of the cast.
    """

    def __init__(self, rank: int, links: Mapping[int, Connection], standstill: Standstill) -> None:
        self._rank, self._links, self._standstill = rank, links, standstill
        self._early: dict[tuple[int, Any], list[Any]] = {}
        self._parts: dict[int, list[bytes]] = {other: [] for other in links}
        self._ended: set[int] = set()
        self._readable, self._of = select.poll(), {link.fileno(): other for other, link in links.items()}
        for number in self._of:
            self._readable.register(number, select.POLLIN)

    def send(self, to: int, key: Any, value: Any) -> None:
        """Send a value, which the other one receives by the same key; also to this process itself."""
        if to == self._rank:
            self._early.setdefault((to, key), []).append(pickle.loads(pickle.dumps(packed(value))))
            return
        self._standstill.sends(self._rank, to)
        data = pickle.dumps((key, packed(value)))
        for start in range(0, len(data), _PART):
            self._until_writable(to)
            last = start + _PART >= len(data)
            self._links[to].send_bytes((b"." if last else b"-") + data[start : start + _PART])

    def receive(self, origin: int, key: Any) -> Any:
        """Return what was sent by this key, the first of several first.

        Raises:
            LeftAloneError: it never comes.
        """
        waiting, until = self._early.setdefault((origin, key), []), time.monotonic() + _WAIT
        while not waiting:
            if origin in self._ended or origin == self._rank:
                raise LeftAloneError
            with self._standstill.waits(self._rank, origin):
                ready = self._readable.poll(1000 * _LOOK)
                if not ready and self._standstill.holds(self._rank):
                    raise LeftAloneError
            self._take(ready)
            if not ready and time.monotonic() > until:
                raise RuntimeError(f"Timed out waiting: rank {origin} sends nothing for {key} in {_WAIT:g} s")
        return unpacked(waiting.pop(0))

    def tell_end(self) -> None:
        """Tell the others that this rank's program has ended."""
        for rank in self._links:
            self.send(rank, _END, None)

    def drain(self) -> None:
        """Take what the others send until their programs have ended, too."""
        while self._ended < {*self._links}:
            ready = self._readable.poll(1000 * _WAIT)
            if not ready:
                return
            self._take(ready)

    def _until_writable(self, to: int) -> None:
        """Wait until a connection takes a part."""
        number, both = self._links[to].fileno(), select.poll()
        both.register(number, select.POLLOUT)
        if both.poll(0):
            return
        for other in self._of:
            both.register(other, select.POLLIN | (select.POLLOUT if other == number else 0))
        while True:
            ready = both.poll()
            self._take(ready)
            if any(event & select.POLLOUT for _, event in ready):
                return

    def _take(self, ready: list[tuple[int, int]]) -> None:
        """Read one part from each connection that has something."""
        for number, event in ready:
            if not event & select.POLLIN:
                continue
            origin = self._of[number]
            part = self._links[origin].recv_bytes()
            self._parts[origin].append(part[1:])
            if part[:1] == b".":
                key, value = pickle.loads(b"".join(self._parts[origin]))
                self._parts[origin] = []
                self._early.setdefault((origin, key), []).append(value)
                self._standstill.takes(self._rank, origin)
                if key == _END:
                    self._ended.add(origin)
                    self._readable.unregister(number)


def packed(value: Any) -> Any:
    """Return plain data as it is, an array as its bytes, a tensor without memory as its shape."""
    if isinstance(value, list):
        return [packed(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        return (tuple(value.shape), value.dtype)
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tuple(value.shape), value.dtype


def unpacked(value: Any) -> Any:
    """Undo :func:`packed`."""
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if not isinstance(value, tuple):
        return value
    if len(value) == 2:
        return torch.empty(value[0], dtype=value[1], device="meta")
    data, shape, dtype = value
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)

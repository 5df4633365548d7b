"""Messages between the processes of a cast, and how one finds out that they wait for each other for ever."""

from __future__ import annotations

import pickle
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch

_NOBODY = -1


class Standstill:
    """How many messages processes have sent to each other and taken, and whose each waits for.

    It lies in memory that forks share. Each process writes what is its own: what it sends before it does, what it
    takes afterwards.

    Args:
        ranks: one for each process.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._sent, self._taken = (RawArray("q", len(ranks) ** 2) for _ in range(2))
        self._awaited = RawArray("q", [_NOBODY] * len(ranks))

    def sends(self, rank: int, to: int) -> None:
        """Count a message before it is sent."""
        self._sent[self._link(self._places[rank], self._places[to])] += 1

    def takes(self, rank: int, origin: int) -> None:
        """Count a message behind its arrival."""
        self._taken[self._link(self._places[origin], self._places[rank])] += 1

    @contextmanager
    def waits(self, rank: int, origin: int) -> Iterator[None]:
        """Wait inside for a message of ``origin``, with nothing else to do."""
        self._awaited[self._places[rank]] = self._places[origin]
        try:
            yield
        finally:
            self._awaited[self._places[rank]] = _NOBODY

    def holds(self, rank: int) -> bool:
        """Return whether a process that waits is in a ring of those that wait for each other.

        The ring is read again from its end: the last one waits for this process, and so cannot have moved since, nor
        can the one before it.
        """
        start = self._places[rank]
        ring, at = [start], self._still(start)
        while at not in (_NOBODY, *ring):
            ring.append(at)
            at = self._still(at)
        following = [*zip(ring, [*ring[1:], start], strict=True)]
        return at == start and all(self._still(one) == other for one, other in reversed(following))

    def _still(self, place: int) -> int:
        """Return whom a process waits for that has nothing on its way to it; ``_NOBODY``: it goes on.

        If that one stands, equal counts say that all has been taken, and the process has then begun to wait anew.
        """
        origin = self._awaited[place]
        if origin == _NOBODY:
            return _NOBODY
        link = self._link(origin, place)
        taken, sent = self._taken[link], self._sent[link]
        return origin if taken == sent and self._awaited[place] == origin else _NOBODY

    def _link(self, origin: int, to: int) -> int:
        return origin * len(self._places) + to


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

"""Messages between the processes of a cast, and how one finds out that they wait for each other for ever."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import RawArray
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch


class Standstill:
    """Counts of messages, and who waits, in memory that forks share: whether all processes wait for each other.

    Each process writes its own numbers: a message that it sends before it does, one that it takes once it goes on.

    Args:
        ranks: one for each process.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._sent, self._taken, self._waiting = (RawArray("q", len(ranks)) for _ in range(3))

    def sends(self, rank: int) -> None:
        """Count a message before it is sent."""
        self._sent[self._places[rank]] += 1

    def takes(self, rank: int) -> None:
        """Count a message after its arrival."""
        self._taken[self._places[rank]] += 1

    @contextmanager
    def waits(self, rank: int) -> Iterator[None]:
        """Wait inside for a message, or for the end of the others, with nothing else to do."""
        self._waiting[self._places[rank]] = True
        try:
            yield
        finally:
            self._waiting[self._places[rank]] = False

    def holds(self) -> bool:
        """Return whether all wait and no message is on its way: the counts are equal, and stay what they were.

        A process that began to work in between would have taken a message (Mattern, "Algorithms for distributed
        termination detection", 1987).
        """
        before = [*self._sent, *self._taken]
        still = all(self._waiting) and sum(self._sent) == sum(self._taken)
        return still and before == [*self._sent, *self._taken]


_WAIT = 180.0  # seconds for another process
_LOOK = 0.5  # seconds until a process that waits looks whether all do
_END = "end"


class LeftAloneError(BaseException):
    """The rank waits for one whose program has ended, or that waits for it; no part of the program may catch it."""


class Links:
    """A process's connections to the others of its cast, from which a thread takes all that comes: no sender waits.

    Args:
        rank: this one.
        links: a connection to each of the others.
        standstill: of the cast.
    """

    def __init__(self, rank: int, links: Mapping[int, Connection], standstill: Standstill) -> None:
        self._rank, self._links, self._standstill = rank, links, standstill
        self._early: dict[tuple[int, Any], list[Any]] = {}
        self._ended: set[int] = set()
        self._arrived: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        if links:
            Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        origins = {link: rank for rank, link in self._links.items()}
        while True:
            for link in wait([*origins]):
                self._arrived.put((origins[link], link.recv_bytes()))  # type: ignore[index, union-attr]

    def send(self, to: int, key: Any, value: Any) -> None:
        """Send a value, which the other one receives by the same key; also to this process itself."""
        if to == self._rank:
            self._early.setdefault((to, key), []).append(pickle.loads(pickle.dumps(packed(value))))
            return
        self._standstill.sends(self._rank)
        self._links[to].send_bytes(pickle.dumps((key, packed(value))))

    def receive(self, origin: int, key: Any) -> Any:
        """Return what was sent by this key, the first of several first.

        Raises:
            LeftAloneError: it never comes.
        """
        waiting, until = self._early.setdefault((origin, key), []), time.monotonic() + _WAIT
        while not waiting:
            if origin in self._ended or origin == self._rank:
                raise LeftAloneError
            with self._standstill.waits(self._rank):
                arrived = self._next(_LOOK)
                if arrived is None and self._standstill.holds():
                    raise LeftAloneError
            if arrived is not None:
                self._take(*arrived)
            elif time.monotonic() > until:
                raise RuntimeError(f"Timed out waiting: rank {origin} sends nothing for {key} in {_WAIT:g} s")
        return unpacked(waiting.pop(0))

    def tell_end(self) -> None:
        """Tell the others that this rank's program has ended."""
        for rank in self._links:
            self.send(rank, _END, None)

    def drain(self) -> None:
        """Take what the others send until their programs have ended, too."""
        with self._standstill.waits(self._rank):
            while self._ended < {*self._links} and (arrived := self._next(_WAIT)):
                self._take(*arrived)

    def _next(self, seconds: float) -> tuple[int, bytes] | None:
        try:
            return self._arrived.get(timeout=seconds)
        except Empty:
            return None

    def _take(self, origin: int, data: bytes) -> None:
        key, value = pickle.loads(data)
        self._early.setdefault((origin, key), []).append(value)
        self._standstill.takes(self._rank)
        if key == _END:
            self._ended.add(origin)


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

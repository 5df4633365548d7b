"""Find out that ranks which are rehearsed at a time wait for each other for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray

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

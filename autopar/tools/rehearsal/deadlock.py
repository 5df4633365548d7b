"""Play the calls of ranks against each other: whether all come to an end, over gloo and over nccl. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.distributed.agree import names_of
from autopar.distributed.trace import Call
from autopar.tools.rehearsal.matching import MESSAGES, OF_THE_HOST, Traces

Waited = Mapping[int, int]
"""The number of a message that is received -> of the call before which it is waited for."""


def where_awaited(calls: Sequence[Call], waited: Waited) -> Iterator[int]:
    """Yield the numbers of calls as they are played: a message is taken where its receiver waits for it."""
    later: dict[int, list[int]] = defaultdict(list)
    for number, before in waited.items():
        if before > number + 1:
            later[before].append(number)
    moved = {number for numbers in later.values() for number in numbers}
    for number in range(len(calls) + 1):
        yield from later.get(number, ())
        if number < len(calls) and number not in moved:
            yield number


def latest(calls: Sequence[Call]) -> dict[int, int]:
    """Return where messages of a real trace, which does not say it, are waited for at the latest: next collectives."""
    found: dict[int, int] = {}
    before = len(calls)
    for number in reversed(range(len(calls))):
        if calls[number].kind not in MESSAGES:
            before = number
        elif calls[number].kind == "recv":
            found[number] = before
    return found


def waiting(
    traces: Traces, *, in_order: bool = False, waited: Mapping[int, Mapping[int, int]] | None = None
) -> dict[int, Call]:
    """Play the calls of all ranks against each other; return where each waits that does not come to an end.

    A collective waits until all traced members of its group are at it, a receiver for its message; a sender does not
    wait, as over gloo.

    Args:
        in_order: as over nccl, a group carries one message of a rank after the other: none goes before the one that
            was issued first has been received. Those of a batch go at the same time; numbers of the CPU go over gloo.
        waited: of each rank; without, a receiver waits at once.
    """
    played = {}
    for rank, calls in traces.items():
        awaited = (waited or {}).get(rank, {})
        if in_order:
            awaited = {number: before for number, before in awaited.items() if _beside(calls[number])}
        ordered = (calls[number] for number in where_awaited(calls, awaited))
        played[rank] = deque(call for call in ordered if call.kind != "new_group")
    return _Play(played, in_order).run()


def stuck(
    traces: Traces, *, in_order: bool = False, waited: Mapping[int, Mapping[int, int]] | None = None
) -> list[str]:
    """Say where ranks are :func:`waiting`."""
    over = "over nccl, where a group carries one message after the other, " if in_order else ""
    left = waiting(traces, in_order=in_order, waited=waited)
    return [f"{over}rank {rank} waits in {call}\n    {call.where}" for rank, call in left.items()]


def standing(calls: Mapping[int, Call]) -> list[str]:
    """Say in which calls ranks wait for ever, those first in which fewest do."""
    at: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, call in calls.items():
        at[str(call), call.where].append(rank)
    fewest = sorted(at.items(), key=lambda one: len(one[1]))
    return [
        f"{names_of(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {call}\n    {where}"
        for (call, where), ranks in fewest
    ]


def _beside(call: Call) -> bool:
    """Return whether a message goes beside others of its group, over nccl: of a batch, or over gloo, from the CPU."""
    return call.batched or call.control or call.group.name == OF_THE_HOST


@dataclass
class _Play:
    """Calls that are left of each rank, and messages on their way."""

    left: Mapping[int, deque[Call]]
    in_order: bool
    sent: dict[tuple[str, int, int, int], int] = field(default_factory=lambda: defaultdict(int))
    lines: dict[tuple[str, int], deque[int]] = field(default_factory=lambda: defaultdict(deque))

    def run(self) -> dict[int, Call]:
        """Return where each rank waits at the end, if it is not through."""
        moved = True
        while moved:
            moved = False
            for rank, calls in self.left.items():
                while calls and self._goes(calls[0], rank):
                    moved = True
        return {rank: calls[0] for rank, calls in self.left.items() if calls}

    def _goes(self, call: Call, rank: int) -> bool:
        if call.kind in MESSAGES:
            if call.peer >= 0 and not (self._send if call.kind == "send" else self._receive)(call, rank):
                return False
            self.left[rank].popleft()
            return True
        members = [member for member in call.group.ranks if member in self.left]
        heads = [self.left[member][0] if self.left[member] else None for member in members]
        if any(head is None or head.group != call.group or head.kind in MESSAGES for head in heads):
            return False
        for member in members:
            self.left[member].popleft()
        return True

    def _send(self, call: Call, rank: int) -> bool:
        to = call.group.ranks[call.peer]
        if self._one_by_one(call) and to in self.left:
            self.lines[call.group.name, rank].append(to)
        else:
            self.sent[call.group.name, rank, to, call.tag] += 1
        return True

    def _receive(self, call: Call, rank: int) -> bool:
        origin = call.group.ranks[call.peer]
        key = (call.group.name, origin, rank, call.tag)
        if self.sent[key] > 0 or origin not in self.left:
            self.sent[key] -= 1
            return True
        line = self.lines[call.group.name, origin]
        if list(line)[:1] != [rank] or (self._one_by_one(call) and self.lines[call.group.name, rank]):
            return False
        line.popleft()
        return True

    def _one_by_one(self, call: Call) -> bool:
        return self.in_order and not _beside(call)

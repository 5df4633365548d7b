"""When things happen in a training step: calls of ranks played against each other under the planner's costs. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.distributed.trace import Call
from autopar.tools.planner.hardware import Gpu
from autopar.tools.rehearsal.traffic import sent, speed_of
from autopar.tools.rehearsal.work import Work

_MESSAGES = ("send", "recv")


class Slot(NamedTuple):
    """A time of a rank that it works, waits or communicates; seconds.

    Attributes:
        lane: ``compute``, the name of the group that communicates, or ``wait``: for others of the group, or a message.
        name: of the pipeline's action, or of the call.
        where: the line that issues the call.
    """

    start: float
    end: float
    lane: str
    name: str
    where: str = ""


@dataclass(frozen=True)
class Timeline:
    """A training step: slots by rank, in their order."""

    slots: Mapping[int, Sequence[Slot]]

    @property
    def time(self) -> float:
        """Seconds of the step."""
        return max((row[-1].end for row in self.slots.values() if row), default=0.0)

    def spent(self, rank: int) -> dict[str, float]:
        """Return the seconds of a rank by lane, ``wait`` until the last rank's end among them."""
        found: dict[str, float] = defaultdict(float)
        for slot in self.slots[rank]:
            found[slot.lane] += slot.end - slot.start
        found["wait"] += self.time - (self.slots[rank][-1].end if self.slots[rank] else 0.0)
        return dict(found)


@dataclass
class _Player:
    """The state of a play: what each rank has left, its clock, and messages on their way."""

    gpu: Gpu
    gpus_per_node: int
    left: dict[int, deque[tuple[Call, Work]]]
    clocks: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    mail: dict[tuple[str, int, int, int], deque[float]] = field(default_factory=lambda: defaultdict(deque))
    slots: dict[int, list[Slot]] = field(default_factory=lambda: defaultdict(list))
    begun: set[int] = field(default_factory=set)  # ranks whose work before their next call is done

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank, calls in self.left.items():
                while calls and self._goes(rank):
                    moved = True

    def _goes(self, rank: int) -> bool:
        call, work = self.left[rank][0]
        self._work(rank, work)
        if call.kind in _MESSAGES:
            return self._message(rank, call, work)
        members = [member for member in call.group.ranks if member in self.left]
        heads = [self.left[member][0] if self.left[member] else None for member in members]
        if any(head is None or head[0].group != call.group or head[0].kind in _MESSAGES for head in heads):
            return False
        for member in members:
            self._work(member, self.left[member][0][1])
        start = max(self.clocks[member] for member in members)
        end = start + self._seconds(rank, call)
        for member in members:
            own, its = self.left[member][0]
            self._communicates(member, own, its, start, end)
        return True

    def _work(self, rank: int, work: Work) -> None:
        """Do what comes before a rank's next call, once."""
        if rank not in self.begun:
            self.begun.add(rank)
            self._add(rank, self.clocks[rank] + work.seconds, "compute", work.action)

    def _message(self, rank: int, call: Call, work: Work) -> bool:
        ranks = call.group.ranks
        peer = ranks[call.peer] if call.peer >= 0 else rank
        if call.kind == "send":
            self.mail[call.group.name, rank, peer, call.tag].append(self.clocks[rank] + self._seconds(rank, call))
            self._communicates(rank, call, work, self.clocks[rank], self.clocks[rank])
            return True
        waiting = self.mail[call.group.name, peer, rank, call.tag]
        if not waiting and peer in self.left:
            return False
        came = waiting.popleft() if waiting else self.clocks[rank]
        self._communicates(rank, call, work, max(came, self.clocks[rank]), max(came, self.clocks[rank]))
        return True

    def _communicates(self, rank: int, call: Call, work: Work, start: float, end: float) -> None:
        self._add(rank, start, "wait", str(call), call.where)
        self._add(rank, end, call.group.name, str(call), call.where)
        self.left[rank].popleft()
        self.begun.discard(rank)

    def _add(self, rank: int, end: float, lane: str, name: str, where: str = "") -> None:
        if end > self.clocks[rank]:
            self.slots[rank].append(Slot(self.clocks[rank], end, lane, name, where))
            self.clocks[rank] = end

    def _seconds(self, rank: int, call: Call) -> float:
        if call.control:  # numbers of the host
            return 0.0
        gpu = self.gpu
        ranks = (rank, call.group.ranks[call.peer]) if call.kind == "send" else call.group.ranks
        speed = speed_of(call.kind, ranks, gpu.within, gpu.between, self.gpus_per_node)
        return sent(call) / (speed * gpu.network) + gpu.latency


def play(
    traces: Mapping[int, Iterable[tuple[Call, Work]]],
    after: Mapping[int, Work],
    gpu: Gpu,
    gpus_per_node: int,
) -> Timeline:
    """Play the calls of the step, each waited for where it is issued; a sender does not wait.

    Only ranks that were rehearsed are played; others of a group are there when the first of them is.

    Args:
        traces: of each rank its calls, and its work before each.
        after: its work behind the last one.
        gpu: of the planner.
    """
    left = {rank: deque(pair for pair in pairs if pair[0].kind != "new_group") for rank, pairs in traces.items()}
    player = _Player(gpu, gpus_per_node, left)
    player.run()
    for rank, work in after.items():
        player.begun.discard(rank)
        player._work(rank, work)
    return Timeline({rank: player.slots[rank] for rank in traces})

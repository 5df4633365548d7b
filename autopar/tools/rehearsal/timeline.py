"""Time, memory and traffic of a rehearsed step, from the planner's costs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autopar.compat.tensors import local_part
from autopar.distributed.autograd_functions import listening
from autopar.tensor_tracking import storage_key
from autopar.tools.planner.hardware import Gpu, Node
from autopar.tools.planner.network import Group
from autopar.tools.planner.stage_costs import seconds_of
from autopar.tools.planner.storages import FusedKernels, Storages
from autopar.tools.rehearsal.matching import Play
from autopar.tools.rehearsal.trace import Call


class Work(NamedTuple):
    """Work of a rank before one of its calls; ``action``: the pipeline action of the work, or ""."""

    seconds: float = 0.0
    action: str = ""


class Held(NamedTuple):
    """Bytes that a rank allocates in the training step.

    Attributes:
        weights: The bytes of parameters and buffers.
        gradients, optimizer: The bytes of gradients after the backward, and of optimizer state after the step.
        peak: The peak bytes of a later step, in which the optimizer state exists from the start.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    peak: int = 0


class WorkCount:
    """Counter of a rank's operations at a GPU's speed, and of its bytes.

    Attributes:
        after: The work after the last call of the step; None until the step ends.
    """

    def __init__(self, gpu: Gpu, precision: str) -> None:
        self._gpu, self._precision = gpu, precision
        self.storages = Storages()
        self._name = self._ended = ""  # the running action, and the action that ended after the last call
        self._uncounted = 0  # bytes of weights allocated before counting started
        self._before_step = 0
        self.held = Held()
        self.after: Work | None = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the operations inside the block."""
        self.storages.operations = []
        with self.storages, FusedKernels(self.storages), listening(self._action):
            yield

    @contextmanager
    def _action(self, name: str) -> Iterator[None]:
        outer, self._name = self._name, self._name or name
        try:
            yield
        finally:
            self._ended = self._name if not outer else ""
            self._name = outer

    def take(self) -> Work:
        """Return the work since the last call."""
        operations, self.storages.operations = self.storages.operations or [], []
        action, self._ended = self._name or self._ended, ""
        return Work(sum(seconds_of(each, self._gpu, self._precision) for each in operations), action)

    def see(self, moment: str, model: Any) -> None:
        """Count the bytes at a moment: ``ready`` (before the step), ``backward`` or ``step`` (after it)."""
        if moment == "ready":
            weights = _storages_of([*model.parameters(), *model.buffers()])
            self._uncounted = sum(size for key, size in weights.items() if key not in self.storages.numbers)
            masters = self.storages.reset_peak() + self._uncounted - sum(weights.values())  # fp32 master weights
            self.held = Held(weights=sum(weights.values()), optimizer=masters)
        elif moment == "backward":
            gradients = sum(_storages_of(p.grad for p in model.parameters()).values())
            self.held = self.held._replace(gradients=gradients, peak=self.storages.peak + self._uncounted)
            self._before_step = self.storages.reset_peak()
        elif moment == "step":
            made = self.storages.live - self._before_step  # the optimizer state, created by the first step
            peak = max(self.held.peak + made, self.storages.peak + self._uncounted)
            self.held = self.held._replace(optimizer=self.held.optimizer + made, peak=peak)
            self.after = self.take()


@torch.no_grad()
def _storages_of(tensors: Iterable[Any]) -> dict[int | None, int]:
    held = [local_part(each) for each in tensors if isinstance(each, torch.Tensor)]
    return {storage_key(each): each.untyped_storage().nbytes() for each in held}


class Traffic(NamedTuple):
    """Traffic over one axis in a training step: the maximum over ranks of each number. Collectives use rings.

    Attributes:
        calls: The number of collectives and messages.
        bytes: The bytes that a rank sends.
        between: The bytes that a rank sends to other nodes.
    """

    calls: int
    bytes: int
    between: int


def traffic_of(
    traces: Mapping[int, Iterable[Call]], axes: Mapping[tuple[int, ...], str], gpus_per_node: int
) -> dict[str, Traffic]:
    """Return the traffic by axis, excluding integers (expert indices, token counts) and objects.

    Args:
        axes: The axis of each group's ranks; the default is the group's name.
    """
    found: dict[str, Traffic] = {}
    for rank, calls in traces.items():
        number, given, away = Counter[str](), Counter[str](), Counter[str]()
        counted = (call for call in calls if call.carries_tensors and call.kind not in ("new_group", "recv"))
        equal = Counter((call.group, call.kind, call.peer, call.bytes) for call in counted)
        for (group, kind, peer, size), times in equal.items():
            call = Call(kind, group, ((size,),), "uint8", peer=peer)
            axis, sent = axes.get(group.ranks, group.name), Group(len(group.ranks)).sent(kind, full_bytes(call)) * times
            number[axis] += times
            given[axis] += sent
            away[axis] += round(sent * _to_others(call, rank, gpus_per_node))
        for name, count in number.items():
            known = found.get(name, Traffic(0, 0, 0))
            found[name] = Traffic(*map(max, known, (count, given[name], away[name])))
    return found


def full_bytes(call: Call) -> int:
    """Return the bytes of a collective's full tensor, or of a message."""
    return call.bytes * (len(call.group.ranks) if call.kind in ("all_gather", "gather") else 1)


def _to_others(call: Call, rank: int, gpus_per_node: int) -> float:
    """Return the fraction of a call's bytes that this rank sends to other nodes."""
    ranks, node = call.group.ranks, rank // gpus_per_node
    if call.kind == "all_to_all":
        return sum(other // gpus_per_node != node for other in ranks) / max(len(ranks) - 1, 1)
    peer = call.peer if call.kind == "send" else (ranks.index(rank) + 1) % len(ranks)
    return float(ranks[peer] // gpus_per_node != node)


class Slot(NamedTuple):
    """A time interval of a rank, in seconds.

    Attributes:
        lane: ``compute``, ``wait``, or the axis or group of the communication.
        name: The pipeline action, or the call.
        where: The source line that issues the call.
    """

    start: float
    end: float
    lane: str
    name: str
    where: str = ""


@dataclass(frozen=True)
class Timeline:
    """A training step: the time slots of each rank in order."""

    slots: Mapping[int, Sequence[Slot]]

    @property
    def time(self) -> float:
        """Duration of the step in seconds."""
        return max((row[-1].end for row in self.slots.values() if row), default=0.0)

    def spent(self, rank: int) -> dict[str, float]:
        """Return a rank's seconds by lane. ``wait`` includes the time until the last rank ends."""
        found: dict[str, float] = defaultdict(float)
        for slot in self.slots[rank]:
            found[slot.lane] += slot.end - slot.start
        found["wait"] += self.time - (self.slots[rank][-1].end if self.slots[rank] else 0.0)
        return dict(found)


class _Player(Play):
    """A replay at a machine's costs that records time slots."""

    def __init__(
        self,
        pairs: Mapping[int, Sequence[tuple[Call, Work]]],
        after: Mapping[int, Work],
        node: Node,
        axes: Mapping[tuple[int, ...], str],
    ) -> None:
        super().__init__({rank: [call for call, _ in own] for rank, own in pairs.items()})
        self.slots: dict[int, list[Slot]] = {rank: [] for rank in pairs}
        self._works = {r: deque(work for call, work in own if call.kind != "new_group") for r, own in pairs.items()}
        self._node, self._axes = node, axes
        for rank, works in self._works.items():
            works.append(after[rank])
            self._work(rank)

    def _work(self, rank: int) -> None:
        """Add the work before a rank's next call, or before its end."""
        work = self._works[rank].popleft()
        self._add(rank, self.clocks[rank] + work.seconds, "compute", work.action)

    def through(self, rank: int, start: float, end: float) -> None:
        call = self.left[rank][0]
        self._add(rank, start, "wait", str(call), call.where)
        self._add(rank, end, self._axes.get(call.group.ranks, call.group.name), str(call), call.where)
        super().through(rank, start, end)
        self._work(rank)

    def seconds(self, rank: int, call: Call) -> float:
        if call.control:  # CPU tensors and objects cost no time
            return 0.0
        ranks = (rank, call.group.ranks[call.peer]) if call.kind == "send" else call.group.ranks
        nodes = len({each // self._node.gpus for each in ranks})
        return self._node.network.seconds(call.kind, full_bytes(call), Group(len(ranks), nodes))

    def _add(self, rank: int, end: float, lane: str, name: str, where: str = "") -> None:
        if end > self.clocks[rank]:
            self.slots[rank].append(Slot(self.clocks[rank], end, lane, name, where))
            self.clocks[rank] = end


def play(
    traces: Mapping[int, Iterable[tuple[Call, Work]]],
    after: Mapping[int, Work],
    node: Node,
    axes: Mapping[tuple[int, ...], str] | None = None,
) -> Timeline:
    """Replay the calls of a step with the work before each call, and the work ``after`` the last call.

    Every call except a send blocks where it is issued. Ranks that are not rehearsed arrive with the first other rank.
    """
    player = _Player({rank: [*pairs] for rank, pairs in traces.items()}, after, node, axes or {})
    player.run()
    return Timeline(player.slots)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return events for https://ui.perfetto.dev and chrome://tracing, with ranks as processes and lanes as threads."""
    events: list[dict[str, Any]] = []
    for rank, slots in timeline.slots.items():
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(slot.lane for slot in slots))}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, number in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
        for start, end, lane, name, where in slots:
            place = {"cat": lane, "pid": rank, "tid": lanes[lane], "ts": start * 1e6, "dur": (end - start) * 1e6}
            args = {"where": where} if where else {}
            events.append({"ph": "X", "name": name or "other work", **place, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}

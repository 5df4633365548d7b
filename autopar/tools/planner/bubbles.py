"""Play a schedule with the stages' own times: when actions run, how long ranks and micro-batches wait. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.pipeline_parallel.schedule import Action
from autopar.tools.planner.stage_costs import StageCost


class ActivationBytes(NamedTuple):
    """Bytes of a rank's micro-batches at its peak.

    Attributes:
        activations: with gradients that wait for the second half of a backward.
    """

    activations: int
    logits: int
    work: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class State(NamedTuple):
    """A moment of one rank's list: what runs, and what waits.

    Attributes:
        waiting: stage, how many of its micro-batches wait for a backward, and how many for its second half.
    """

    forward: bool
    stage: int
    waiting: tuple[tuple[int, int, int], ...]


def states_of(actions: Sequence[Action], recomputed: Sequence[bool]) -> list[State]:
    """Return the moments of one rank's list that may need most: in no other one the same runs and more waits.

    Args:
        recomputed: of each stage, whether the first half of a backward is all of it.
    """
    waiting: dict[int, int] = {}
    late: dict[int, int] = {}
    found: dict[tuple[bool, int], list[State]] = {}
    for kind, stage, _ in actions:
        if kind == "F":
            waiting[stage] = waiting.get(stage, 0) + 1
        whole = recomputed[stage]
        if not (kind == "W" and whole):
            row = tuple((s, number, late.get(s, 0)) for s, number in waiting.items())
            alike = found.setdefault((kind == "F", stage), [])
            if not any(_covers(other.waiting, row) for other in alike):
                alike[:] = [other for other in alike if not _covers(row, other.waiting)]
                alike.append(State(kind == "F", stage, row))
        if kind == "W":
            late[stage] = late.get(stage, 0) - (not whole)
        elif kind != "F":
            waiting[stage] -= 1
            late[stage] = late.get(stage, 0) + (kind == "I" and not whole)
    return [state for alike in found.values() for state in alike]


def _covers(row: Sequence[tuple[int, int, int]], other: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether of each stage as much waits in ``row``; both are of one list, so their stages have one order."""
    pairs = zip(row, other, strict=False)
    return len(row) >= len(other) and all(full >= f and late >= la for (_, full, late), (_, f, la) in pairs)


def peak_of(states: Sequence[State], costs: Sequence[StageCost]) -> ActivationBytes:
    """Return the most that the micro-batches of one rank need at one time."""
    most = ActivationBytes(0, 0, 0)
    for state in states:
        logits = sum(costs[s].logits * full + costs[s].late_logits * late for s, full, late in state.waiting)
        every = _kept(state, costs) + sum(costs[s].gradients * late for s, _, late in state.waiting)
        work = costs[state.stage].forward_work if state.forward else costs[state.stage].backward_work
        if every + work > most.total:
            most = ActivationBytes(every - logits, logits, work)
    return most


def most_kept(states: Sequence[State], costs: Sequence[StageCost]) -> int:
    """Return the most bytes that wait for backwards at one time."""
    return max((_kept(state, costs) for state in states), default=0)


def _kept(state: State, costs: Sequence[StageCost]) -> int:
    return sum(costs[s].kept * full + costs[s].late * late for s, full, late in state.waiting)


class Slot(NamedTuple):
    """An action, and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """A schedule with times: the slots of each rank, in order."""

    ranks: tuple[tuple[Slot, ...], ...]

    @property
    def time(self) -> float:
        """From the first action to the end of the last one."""
        return max((row[-1].end for row in self.ranks if row), default=0.0)


def play(
    lists: Sequence[Sequence[Action]],
    stages: int,
    time_of: Callable[[Action], float],
    message: float = 0.0,
) -> Played:
    """Run lists of actions as the engine does: in order, an action waits until what it receives is there.

    Args:
        lists: of :func:`~autopar.pipeline_parallel.schedule.make_schedule`, one a rank.
        time_of: how long an action takes.
        message: how long a message between two ranks takes.

    Raises:
        ValueError: the lists cannot be run: all ranks wait.
    """
    ends: dict[Action, float] = {}
    rank_of = {action.stage: rank for rank, row in enumerate(lists) for action in row}
    slots: list[list[Slot]] = [[] for _ in lists]
    free = [0.0] * len(lists)
    left = sum(map(len, lists))
    while left:
        before = left
        for rank, row in enumerate(lists):
            while len(slots[rank]) < len(row):
                action = row[len(slots[rank])]
                due = _due(action, ends, stages, rank_of, message)
                if due is None:
                    break
                start = max(free[rank], due)
                free[rank] = ends[action] = start + time_of(action)
                slots[rank].append(Slot(action, start, free[rank]))
                left -= 1
        if left == before:
            raise ValueError(f"the schedule cannot be run: {left} actions wait for each other")
    return Played(tuple(map(tuple, slots)))


def _due(
    action: Action, ends: dict[Action, float], stages: int, rank_of: dict[int, int], message: float
) -> float | None:
    """From when an action's inputs are there; None if one is not made yet."""
    kind, stage, m = action
    if kind == "F":
        if stage == 0:
            return 0.0
        return _arrival(ends.get(Action("F", stage - 1, m)), rank_of[stage - 1] != rank_of[stage], message)
    if kind == "W":
        return ends.get(Action("I", stage, m))
    forward = ends.get(Action("F", stage, m))
    if forward is None or stage == stages - 1:
        return forward
    sent = ends.get(Action("I", stage + 1, m), ends.get(Action("B", stage + 1, m)))
    gradient = _arrival(sent, rank_of[stage + 1] != rank_of[stage], message)
    return None if gradient is None else max(forward, gradient)


def _arrival(sent: float | None, travels: bool, message: float) -> float | None:
    return sent if sent is None or not travels else sent + message


def step_time(played_with: Callable[[int], Played], microbatches: int, ranks: int) -> tuple[float, Played]:
    """Return the time of a schedule with many micro-batches, and the schedule of as many as were played.

    From some number on each further round of ``ranks`` micro-batches takes as long as the last one: so many are played.

    Args:
        played_with: plays the schedule with a number of micro-batches.
    """
    few = 4 * ranks + microbatches % ranks
    if microbatches <= few + 2 * ranks:
        played = played_with(microbatches)
        return played.time, played
    short, longer = played_with(few), played_with(few + ranks)
    rounds = (microbatches - few) // ranks
    return short.time + rounds * (longer.time - short.time), longer

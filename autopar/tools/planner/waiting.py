"""Memory of a rank's micro-batches while a schedule runs: how many wait, and for what. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.pipeline_parallel.schedule import Action
from autopar.tools.planner.stage_costs import StageCost

__all__ = ["ActivationBytes", "State", "most_kept", "peak_of", "states_of"]


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


def states_of(actions: Sequence[Action], *, recomputed: bool) -> list[State]:
    """Return the distinct moments of one rank's list; with recomputation the first half of a backward is all of it."""
    waiting: dict[int, int] = {}
    late: dict[int, int] = {}
    found: dict[State, None] = {}
    for kind, stage, _ in actions:
        if kind == "F":
            waiting[stage] = waiting.get(stage, 0) + 1
        if not (kind == "W" and recomputed):
            row = tuple((s, number, late.get(s, 0)) for s, number in waiting.items())
            found[State(kind == "F", stage, row)] = None
        if kind == "W":
            late[stage] = late.get(stage, 0) - (not recomputed)
        elif kind != "F":
            waiting[stage] -= 1
            late[stage] = late.get(stage, 0) + (kind == "I" and not recomputed)
    return list(found)


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

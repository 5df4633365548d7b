"""Schedules: in which order each rank runs the forwards and backwards of its stages. Pure.

A schedule is made by playing it: time goes in ticks, a forward takes one, a backward two (or one for the gradient of
the input and one for that of the weights, where they are split), and each rank starts the most urgent action whose
inputs are there. What each rank did, in order, is its list. Sends do not wait in the engine, so a list that could be
played cannot deadlock, with any number of micro-batches and any way to lay stages on ranks.

| name          | stages a rank | backward     | forwards that may wait for their backward                            |
|---------------|---------------|--------------|----------------------------------------------------------------------|
| `gpipe`       | 1             | last         | all                                                                  |
| `1f1b`        | 1             | first        | as many as stages follow, and one (PipeDream, 2019)                  |
| `interleaved` | `chunks`      | first        | Megatron-LM's warm-up (Narayanan et al., 2021)                       |
| `zero-bubble` | 1             | first, split | as many as ranks; gradients of weights fill gaps (Qi et al., ZB-H1)  |
| `zbv`         | 2, in a V     | first, split | twice as many as ranks (Qi et al., 2023): first and last on one rank |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["SCHEDULES", "Action", "forwards", "make_schedule", "peak"]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")


class Action(NamedTuple):
    """``F`` forward, ``B`` backward, or its halves ``I`` (gradient of the input) and ``W`` (of the weights)."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f"@{self.stage}" if self.stage else "")


def forwards(rank_of: Sequence[int], microbatches: int) -> list[list[Action]]:
    """Per rank: forwards only, as evaluation needs them."""
    return [[action for action in row if action.kind == "F"] for row in make_schedule("gpipe", rank_of, microbatches)]


def make_schedule(name: str, rank_of: Sequence[int], microbatches: int) -> list[list[Action]]:
    """Per rank: its actions in order.

    Args:
        name: one of :data:`SCHEDULES`.
        rank_of: stage -> rank.
        microbatches: at least 1.
    """
    return _Play(name, rank_of, microbatches).run()


def peak(actions: Iterable[Action]) -> int:
    """The most forwards that wait for their backward at one time: what activations need memory for."""
    most = now = 0
    for action in actions:
        now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, now)
    return most


class _Play:
    def __init__(self, name: str, rank_of: Sequence[int], microbatches: int) -> None:
        self.name, self.rank_of, self.microbatches = name, rank_of, microbatches
        self.stages, self.ranks = len(rank_of), max(rank_of) + 1
        self.split = name in ("zero-bubble", "zbv")
        self.done: dict[Action, int] = {}  # action -> tick at whose start its result is there
        self.lists: list[list[Action]] = [[] for _ in range(self.ranks)]
        self.waiting = [0] * self.ranks  # forwards without their (whole) backward
        self.limits = [self._limit(rank) for rank in range(self.ranks)]
        self.forward_order = [sorted(self._all("F", rank), key=self._urgency) for rank in range(self.ranks)]
        self.open: list[set[Action]] = [set(self._all("I" if self.split else "B", rank)) for rank in range(self.ranks)]
        self.weights: list[list[Action]] = [[] for _ in range(self.ranks)]

    def _all(self, kind: str, rank: int) -> list[Action]:
        stages = [stage for stage in range(self.stages) if self.rank_of[stage] == rank]
        return [Action(kind, stage, m) for stage in stages for m in range(self.microbatches)]

    def _urgency(self, action: Action) -> tuple[int, ...]:
        """Forwards of several stages take turns, in rounds of as many micro-batches as there are ranks."""
        if self.stages == self.ranks:
            return (action.microbatch,)
        return (action.microbatch // self.ranks, action.stage, action.microbatch)

    def _limit(self, rank: int) -> int:
        chunks = self.stages // self.ranks
        if self.name == "gpipe":
            return self.microbatches * chunks
        if self.name == "interleaved":
            return (self.ranks - rank - 1) * 2 + (chunks - 1) * self.ranks + 1
        if self.name == "zbv":
            return 2 * self.ranks
        return self.ranks - rank if not self.split else self.ranks

    def run(self) -> list[list[Action]]:
        free = [0] * self.ranks
        total = self.stages * self.microbatches * (3 if self.split else 2)
        tick = 0
        while len(self.done) < total:
            started = False
            for rank in range(self.ranks):
                if free[rank] <= tick:
                    action = self._next(rank, tick)
                    if action is not None:
                        started = True
                        free[rank] = tick + (2 if action.kind == "B" else 1)
                        self._start(rank, action, free[rank])
            if not started and all(busy <= tick for busy in free):  # the limits leave nothing to do: loosen them
                self.limits = [limit + 1 for limit in self.limits]
            tick += 1
        return self.lists

    def _start(self, rank: int, action: Action, end: int) -> None:
        self.lists[rank].append(action)
        self.done[action] = end
        if action.kind == "F":
            self.forward_order[rank].remove(action)
            self.waiting[rank] += 1
        elif action.kind == "W":
            self.weights[rank].remove(action)
            self.waiting[rank] -= 1
        else:
            self.open[rank].remove(action)
            if action.kind == "I":
                self.weights[rank].append(Action("W", action.stage, action.microbatch))
            else:
                self.waiting[rank] -= 1

    def _next(self, rank: int, tick: int) -> Action | None:
        forward = self.forward_order[rank][0] if self.forward_order[rank] else None
        if self.name != "gpipe" or forward is None:
            ready = [action for action in self.open[rank] if self._backward_ready(action, tick)]
            if ready:
                return min(ready, key=lambda action: (action.microbatch, -action.stage))
        if forward is not None and self.waiting[rank] < self.limits[rank] and self._forward_ready(forward, tick):
            return forward
        return self.weights[rank][0] if self.weights[rank] else None

    def _there(self, action: Action, tick: int) -> bool:
        return self.done.get(action, tick + 1) <= tick

    def _forward_ready(self, action: Action, tick: int) -> bool:
        return action.stage == 0 or self._there(Action("F", action.stage - 1, action.microbatch), tick)

    def _backward_ready(self, action: Action, tick: int) -> bool:
        kind, stage, microbatch = action
        if not self._there(Action("F", stage, microbatch), tick):
            return False
        return stage == self.stages - 1 or self._there(Action(kind, stage + 1, microbatch), tick)

"""Compare the traces of a job with its rehearsal: where a rank went another way, and how far it came. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from autopar.distributed.trace import Call
from autopar.errors import ConfigError
from autopar.tools.rehearsal.matching import Traces

_PARTS = ("step", "evaluation")
_ON_GLOO = "pp control"


class Way(NamedTuple):
    """A rank's way through the collectives and messages of one group.

    Attributes:
        rank, group: whose, over which.
        done: training steps and evaluations that it has behind it.
        at: calls of the next one that it has issued, of ``of`` that this one has; 0 where it ends with a whole one.
        wrong: the call that the rehearsal does not have there, and the one that it has, None if it has no call over
            the group; None: it went as rehearsed.
    """

    rank: int
    group: str
    done: Mapping[str, int]
    at: int
    of: int
    wrong: tuple[Call, Call | None] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} over {self.told}"

    @property
    def told(self) -> str:
        """The same without the rank."""
        behind = " and ".join(
            f"{self.done[part]} {part}{'s' * (self.done[part] != 1)}" for part in _PARTS if self.done.get(part)
        )
        told = f"{self.group}: {behind or 'nothing'} as rehearsed"
        if self.wrong is None:
            return told + (f", and {self.at} of {self.of} calls of the next" if self.at else "")
        call, due = self.wrong
        if due is None:
            return f"{self.group}: {call}\n    {call.where}\n  where the rehearsal has no call over {self.group}"
        return (
            f"{told}, then call {self.at} of the next is {call}\n    {call.where}\n  where the rehearsal has {due}\n"
            f"    {due.where}"
        )


def ranks_in(traces: Traces) -> set[int]:
    """Return all ranks that a job's traces name."""
    return {rank for calls in traces.values() for call in calls for rank in call.group.ranks} | {*traces}


def check_world(traces: Traces, world: int) -> None:
    """Raise ConfigError for traces of a job of another number of ranks."""
    of = max(ranks_in(traces), default=-1) + 1
    if of != world:
        raise ConfigError(f"these are traces of a job of {of} ranks, and the rehearsal is of one of {world}")


def ways(
    traces: Traces, rehearsed: Mapping[int, Iterable[tuple[str, Call]]], standing_for: Callable[[int], int]
) -> list[Way]:
    """Return the way of each rank through each group that the rehearsal has, those that went another one first.

    Compared are kinds, dtypes, partners and numbers of dims of what carries tensors of floating point, and whether a
    backward issues it; no sizes, since other batches have other ones. Single numbers, integers and objects are left
    out: user code and checks exchange them.

    Args:
        traces: of the job.
        rehearsed: calls of each rank that was rehearsed, and the part of the program that each is in.
        standing_for: the rehearsed rank that stands for any rank of the world.
    """
    names = {call.group.name for calls in traces.values() for call in calls}
    found = []
    for rank, calls in traces.items():
        other = standing_for(rank)
        programs: dict[str, dict[str, list[Call]]] = {}
        for part, call in rehearsed[other]:
            name = call.group.name
            if name not in names and name.startswith(("pp forward ", "pp backward ")):
                name = _ON_GLOO  # which carries messages of all ways there
            if _counts(call):
                programs.setdefault(name, {}).setdefault(part, []).append(call)
        for group, parts in programs.items():
            own = [call for call in calls if _counts(call) and call.group.name == group]
            found.append(_way(rank, own, other, group, parts))
        strays = {call.group.name: call for call in reversed(calls) if _counts(call)}
        found += [Way(rank, group, {}, 0, 0, (call, None)) for group, call in strays.items() if group not in programs]
    return sorted(found, key=lambda way: way.wrong is None)


def _way(rank: int, own: Sequence[Call], other: int, group: str, parts: Mapping[str, list[Call]]) -> Way:
    """Follow every part of the program that the calls may be in, since one may begin as another does."""
    due = {part: [_key(call, other) for call in calls] for part, calls in parts.items()}
    states: dict[tuple[str, int], dict[str, int]] = {(part, 0): {} for part in due}
    for call in own:
        key, following = _key(call, rank), dict[tuple[str, int], dict[str, int]]()
        for (part, at), done in states.items():
            if due[part][at] == key and at + 1 < len(due[part]):
                following.setdefault((part, at + 1), done)
            elif due[part][at] == key:
                behind = {**done, part: done.get(part, 0) + 1}
                following |= {(name, 0): behind for name in due if (name, 0) not in following}
        if not following:
            (part, at), done = min(states.items(), key=lambda state: state[0][1])
            return Way(rank, group, done, at, len(due[part]), (call, parts[part][at]))
        states = following
    (part, at), done = min(states.items(), key=lambda state: state[0][1])
    return Way(rank, group, done, at, len(due[part]))


def _counts(call: Call) -> bool:
    return call.carries_tensors and any(prod(size) > 1 for size in call.sizes)


def _key(call: Call, rank: int) -> tuple[Any, ...]:
    """Return a call as all ranks issue it that others stand for: partners by their distance."""
    ranks = call.group.ranks
    partner = (call.peer - ranks.index(rank)) % len(ranks) if call.kind in ("send", "recv") else call.peer
    return call.kind, call.dtype, partner, len(call.sizes[0]), "backward" in call.where

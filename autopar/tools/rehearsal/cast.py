"""Ranks that are rehearsed at a time: processes of this machine that answer for all ranks of the world.

Each stands for one rank, and for those whose coordinates are nearest to its own. Numbers, objects and headers of
messages travel between these processes. Tensors of the model have no memory, and nothing of them is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from autopar.distributed.trace import Call, Group
from autopar.foreign.c10d import Operator, done, tensors_in
from autopar.foreign.fake_world import FakeWork
from autopar.tools.rehearsal.carried import CARRIED, Members, fill
from autopar.tools.rehearsal.links import LeftAloneError, Links, packed, unpacked
from autopar.tools.rehearsal.own_sizes import check_sizes


def standing_for(rank: int, cast: Sequence[int], coordinates: Sequence[tuple[int, ...]]) -> int:
    """Return who of the cast stands for a rank: the one that shares most coordinates, earlier ones first."""
    own = coordinates[rank]
    return min(cast, key=lambda other: [one != its for one, its in zip(coordinates[other], own, strict=True)])


def standing_in(ranks: Sequence[int], cast: Sequence[int], coordinates: Sequence[tuple[int, ...]]) -> list[int]:
    """Return who of the cast stands for each rank of a group.

    Only those who share what all ranks of the group have in common, if there are any: a group of replicas is compared
    with ranks of its own tensor-parallel place, since another place may well issue something else.
    """
    common = [
        axis
        for axis, places in enumerate(zip(*(coordinates[rank] for rank in ranks), strict=True))
        if len(set(places)) == 1
    ]
    own = coordinates[ranks[0]]
    alike = [other for other in cast if all(coordinates[other][axis] == own[axis] for axis in common)]
    return [standing_for(rank, alike or cast, coordinates) for rank in ranks]


class Told(NamedTuple):
    """Answers and numbers of a rank, for casts behind its own.

    Attributes:
        verdicts: of rank 0, one for each time that all ranks agree.
        given: numbers of each broadcast and scatter of which it is the root, by group and turn.
    """

    verdicts: list[Any]
    given: dict[tuple[Group, int], Any]


class Answers:
    """The other ranks of a rehearsed one: they answer its collectives.

    Args:
        rank: this one.
        cast: ranks that are rehearsed beside it, itself among them.
        links: to the others.
        coordinates: of every rank of the world, the one that matters most first: (stage, cp, ep, tp, dp).
        earlier: what ranks have told in casts before.
        finishes: called with the handle of each message that is received, and with what puts numbers into it.

    Attributes:
        told: what this rank tells.
    """

    def __init__(
        self,
        rank: int,
        cast: Sequence[int],
        links: Links,
        coordinates: Sequence[tuple[int, ...]],
        earlier: Mapping[int, Told],
        finishes: Callable[[FakeWork, Callable[[], None] | None], None],
    ) -> None:
        self._rank, self._cast, self._links, self._coordinates = rank, tuple(cast), links, coordinates
        self._earlier, self._finishes = earlier, finishes
        self.told = Told([], {})
        self._rounds = 0  # in which all ranks have agreed
        self._who = functools.cache(lambda rank: standing_for(rank, self._cast, self._coordinates))
        self._counts: dict[Any, int] = {}
        self._turns: dict[Group, int] = {}
        self.root = -1  # of a broadcast for which this rank gives what another one would

    def __call__(self, operator: Operator, call: Call, args: tuple[Any, ...]) -> Any:
        """Carry out a collective: what has no memory is there at once."""
        out, given = tensors_in(args[operator.out]), tensors_in(args[operator.given])
        if call.kind == "recv" and call.peer < 0:
            raise RuntimeError(f"a rehearsal cannot know whose message comes first: name its sender: {call.where}")
        check_sizes(call, call.group.ranks.index(self._rank), out, given)
        carried = any(x.numel() and not x.is_meta for x in (*out, *given)) and operator.kind != "barrier"
        work = None
        if operator.kind == "recv":
            work = FakeWork()
            self._finishes(work, functools.partial(self._carry, call, out, given) if carried else None)
        elif carried:
            self._carry(call, out, given)
        handle = done(out if operator.kind == "all_reduce" else None, work)
        return (args[operator.out], handle) if operator.result else handle

    @contextmanager
    def gives_for(self, root: int) -> Iterator[bool]:
        """Say whether this rank stands for the root of a broadcast; inside, calls tell that one."""
        instead = root != self._rank and self._who(root) == self._rank and root not in self._earlier
        self.root = root if instead else -1
        yield instead
        self.root = -1

    def reports(self, own: Any) -> list[Any]:
        """Return on rank 0 what all ranks report when they agree: those that are not rehearsed as who stands for them.

        This, ``tell`` and ``ask`` stand in for :class:`autopar.distributed.agree._Star`.
        """
        said = {rank: own if rank == self._rank else self._links.receive(rank, "report") for rank in self._cast}
        return [said[self._who(rank)] for rank in range(len(self._coordinates))]

    def tell(self, answer: Any) -> None:
        """Answer on rank 0."""
        self.told.verdicts.append(answer)
        for rank in self._cast:
            if rank != self._rank:
                self._links.send(rank, "answer", answer)

    def ask(self, report: Any) -> Any:
        """Report to rank 0; return its answer, which it gave before if it is not here."""
        if 0 in self._cast:
            self._links.send(0, "report", report)
            return self._links.receive(0, "answer")
        self._rounds += 1
        verdicts = self._earlier[0].verdicts
        if self._rounds > len(verdicts):
            raise LeftAloneError
        return verdicts[self._rounds - 1]

    def as_issued(self, call: Call) -> Call:
        """Return a call as the rank would issue it that has all others beside it."""
        return call if self.root < 0 else call._replace(peer=call.group.ranks.index(self.root))

    @torch.no_grad()
    def _carry(self, call: Call, out: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        ranks = call.group.ranks
        key = (call.group.name, ranks if {*ranks} <= {*self._cast} else (), call.kind)  # others have groups like it
        if call.kind == "send":
            for x in given:
                self._links.send(self._who(ranks[call.peer]), ("message", call.group.name, call.tag), x)
            return
        if call.kind == "recv":
            for x in out:
                fill(x, self._links.receive(self._who(ranks[call.peer]), ("message", call.group.name, call.tag)))
            return
        if call.kind == "all_to_all" and len(given) == 1 and call.splits:
            given = list(given[0].split(list(call.splits[0])))
        if call.kind in ("broadcast", "scatter") and ranks[call.peer] in {*self._cast} - {self._rank}:
            given = []  # what is there before
        everyone = self._everyone(ranks, key, given)
        members = [everyone[self._who(rank)] for rank in ranks]
        if call.kind in ("broadcast", "scatter"):
            self._of_root(call, given, members)
        CARRIED[call.kind](call, ranks.index(self._rank), out, members)

    def _of_root(self, call: Call, given: list[torch.Tensor], members: Members) -> None:
        """Keep what this rank gives as the root; put what another one gave, if it is not in this cast, in its place."""
        turn = self._turns[call.group] = self._turns.get(call.group, 0) + 1
        root = call.group.ranks[call.peer]
        if root == self._rank:
            self.told.given[call.group, turn] = packed(given)
        elif root not in self._cast and root in self._earlier:
            members[call.peer] = unpacked(self._earlier[root].given.get((call.group, turn), []))

    def _everyone(self, ranks: Sequence[int], key: Any, given: list[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """Exchange what each process of the cast gives that stands for one of these ranks."""
        others = {self._who(rank) for rank in ranks} - {self._rank}
        turn = self._counts[key] = self._counts.get(key, 0) + 1
        for other in others:
            self._links.send(other, (key, turn), given)
        return {self._rank: given, **{other: self._links.receive(other, (key, turn)) for other in others}}

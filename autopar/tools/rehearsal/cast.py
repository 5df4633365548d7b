"""Ranks that are rehearsed at a time: processes of this machine that answer for all ranks of the world.

Each stands for one rank, and for those whose coordinates are nearest to its own. Numbers, objects and headers of
messages travel between these processes. Tensors of the model have no memory, and nothing of them is sent.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from autopar.distributed.trace import Call
from autopar.foreign.c10d import Operator, done, tensors_in

__all__ = ["Answers", "LeftAloneError", "standing_for", "standing_in"]

_WAIT = 180.0  # seconds for another process of the cast
_END = "end"


class LeftAloneError(BaseException):
    """The rank waits for one whose program has ended; no part of the program may catch it."""


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


class Answers:
    """The other ranks of a rehearsed one: they answer its collectives.

    Args:
        rank: this one.
        cast: ranks that are rehearsed beside it, itself among them.
        links: a connection to each of the others.
        coordinates: of every rank of the world, the one that matters most first: (stage, cp, ep, tp, dp).
        told: what rank 0 has answered in a cast before, if it is not in this one.

    Attributes:
        told: what rank 0 answers, one for each time that all ranks agree.
    """

    def __init__(
        self,
        rank: int,
        cast: Sequence[int],
        links: dict[int, Connection],
        coordinates: Sequence[tuple[int, ...]],
        told: Sequence[Any] = (),
    ) -> None:
        self._rank, self._cast, self._links, self._coordinates = rank, tuple(cast), links, coordinates
        self.told = list(told)
        self._rounds = 0  # in which all ranks have agreed
        self._who = functools.cache(lambda rank: standing_for(rank, self._cast, self._coordinates))
        self._early: dict[tuple[int, Any], list[bytes]] = {}
        self._counts: dict[Any, int] = {}
        self._ended: set[int] = set()
        self.operation: Any = dist.ReduceOp.SUM
        self.root = -1  # of a broadcast for which this rank gives what another one would

    def __call__(self, operator: Operator, call: Call, args: tuple[Any, ...]) -> Any:
        """Carry out a collective: what has no memory is there at once."""
        out, given = tensors_in(args[operator.out]), tensors_in(args[operator.given])
        if any(x.numel() and not x.is_meta for x in (*out, *given)) and operator.kind != "barrier":
            if operator.reduction >= 0:
                self.operation = getattr(dist.ReduceOp, args[operator.reduction].upper())
            with torch.no_grad():
                self._carry(call, out, given)
        handle = done(out if operator.kind == "all_reduce" else None)
        return (args[operator.out], handle) if operator.result else handle

    @contextmanager
    def gives_for(self, root: int) -> Iterator[bool]:
        """Say whether this rank stands for the root of a broadcast; inside, calls tell that one."""
        instead = root != self._rank and self._who(root) == self._rank
        self.root = root if instead else -1
        yield instead
        self.root = -1

    def reports(self, own: Any) -> list[Any]:
        """Return on rank 0 what all ranks report when they agree: those that are not rehearsed as who stands for them.

        This, ``tell`` and ``ask`` stand in for :class:`autopar.distributed.agree._Star`.
        """
        said = {rank: own if rank == self._rank else self._receive(rank, "report") for rank in self._cast}
        return [said[self._who(rank)] for rank in range(len(self._coordinates))]

    def tell(self, answer: Any) -> None:
        """Answer on rank 0."""
        self.told.append(answer)
        for rank in self._cast:
            if rank != self._rank:
                self._send(rank, "answer", answer)

    def ask(self, report: Any) -> Any:
        """Report to rank 0; return its answer, which it gave before if it is not here."""
        if 0 in self._cast:
            self._send(0, "report", report)
            return self._receive(0, "answer")
        self._rounds += 1
        if self._rounds > len(self.told):
            raise LeftAloneError
        return self.told[self._rounds - 1]

    def end(self) -> None:
        """Tell the others that this rank's program has ended, and wait until theirs have: they may be sending."""
        for rank in self._links:
            self._send(rank, _END, None)
        for rank, link in self._links.items():
            while rank not in self._ended and link.poll(_WAIT):
                self._take(rank)

    def as_issued(self, call: Call) -> Call:
        """Return a call as the rank would issue it that has all others beside it."""
        return call if self.root < 0 else call._replace(peer=call.group.ranks.index(self.root))

    def _carry(self, call: Call, out: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        ranks = call.group.ranks
        key = (call.group.name, ranks if call.kind in ("send", "recv") else (), call.kind)
        if call.kind == "send":
            for x in given:
                self._send(self._who(ranks[call.peer]), ("message", call.group.name, call.tag), x)
            return
        if call.kind == "recv":
            for x in out:
                x.copy_(self._receive(self._who(ranks[call.peer]), ("message", call.group.name, call.tag)))
            return
        everyone = self._everyone(ranks, key, given)
        members = [everyone[self._who(rank)] for rank in ranks]
        _CARRIED[call.kind](call, out, members, self.operation)

    def _everyone(self, ranks: Sequence[int], key: Any, given: list[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """Exchange what each process of the cast gives that stands for one of these ranks."""
        others = {self._who(rank) for rank in ranks} - {self._rank}
        turn = self._counts[key] = self._counts.get(key, 0) + 1
        for other in others:
            self._send(other, (key, turn), given)
        return {self._rank: given, **{other: self._receive(other, (key, turn)) for other in others}}

    def _send(self, to: int, key: Any, value: Any) -> None:
        packed = pickle.dumps(_packed(value))
        if to == self._rank:
            self._early.setdefault((to, key), []).append(packed)
        else:
            self._links[to].send((key, packed))

    def _receive(self, origin: int, key: Any) -> Any:
        waiting = self._early.setdefault((origin, key), [])
        while not waiting:
            if origin in self._ended:
                raise LeftAloneError
            if origin == self._rank or not self._links[origin].poll(_WAIT):
                raise RuntimeError(f"Timed out waiting: rank {origin} sends nothing for {key} in {_WAIT:g} s")
            self._take(origin)
        return _unpacked(pickle.loads(waiting.pop(0)))

    def _take(self, origin: int) -> None:
        came, packed = self._links[origin].recv()
        if came == _END:
            self._ended.add(origin)
        self._early.setdefault((origin, came), []).append(packed)


def _packed(value: Any) -> Any:
    """Arrays travel, and plain data; a tensor without memory as its shape."""
    if isinstance(value, list):
        return [_packed(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        return (tuple(value.shape), value.dtype)
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tuple(value.shape), value.dtype


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if not isinstance(value, tuple):
        return value
    if len(value) == 2:
        return torch.empty(value[0], dtype=value[1], device="meta")
    data, shape, dtype = value
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _all_reduce(call: Call, out: list[torch.Tensor], members: list[list[torch.Tensor]], operation: Any) -> None:
    for place, x in enumerate(out):
        stacked = torch.stack([given[place] for given in members])
        if operation == dist.ReduceOp.MAX:
            x.copy_(stacked.amax(0))
        elif operation == dist.ReduceOp.MIN:
            x.copy_(stacked.amin(0))
        else:
            total = stacked.sum(0)
            x.copy_(total / len(members) if operation == dist.ReduceOp.AVG else total)


def _all_gather(call: Call, out: list[torch.Tensor], members: list[list[torch.Tensor]], operation: Any) -> None:
    if len(out) == 1 and len(members) > 1:
        out[0].view(len(members), -1).copy_(torch.stack([given[0].reshape(-1) for given in members]))
    else:
        for x, given in zip(out, members, strict=True):
            x.copy_(given[0])


def _broadcast(call: Call, out: list[torch.Tensor], members: list[list[torch.Tensor]], operation: Any) -> None:
    for x, value in zip(out, members[call.peer], strict=True):
        x.copy_(value)


def _gather(call: Call, out: list[torch.Tensor], members: list[list[torch.Tensor]], operation: Any) -> None:
    for x, given in zip(out, members, strict=False):  # nothing, but on the root
        x.copy_(given[0])


def _all_to_all(call: Call, out: list[torch.Tensor], members: list[list[torch.Tensor]], operation: Any) -> None:
    out[0].copy_(members[0][0].view_as(out[0]) if members[0][0].numel() == out[0].numel() else out[0].zero_())


_CARRIED = {
    "all_reduce": _all_reduce,
    "reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "gather": _gather,
    "all_to_all": _all_to_all,
}

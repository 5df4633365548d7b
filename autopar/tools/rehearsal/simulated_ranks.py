"""Simulate all ranks of a job: in each round a few local processes stand in for the full world.

A rehearsal runs the first and the last rank of each axis, and one rank for each other shape of shards. The processes of
one round run at the same time. Each process stands in for the ranks with the nearest coordinates. The processes send
each other numbers, objects and message headers. They do not send the model's tensors, which have no memory.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from autopar.compat.tensors import no_dispatch_modes
from autopar.distributed.axis import MeshSizes
from autopar.distributed.mesh import rank_groups
from autopar.plan.plan import Plan
from autopar.tensor_tracking import tensors_in
from autopar.tools.compat.operators import FakeWork, Operator, done
from autopar.tools.rehearsal.trace import Call, Group

_FEW = 8  # a world, or a product of tp, cp and dp, up to this size is rehearsed in full


def coordinates_of(sizes: MeshSizes, experts: int) -> list[tuple[int, ...]]:
    """Return the coordinates (pp, cp, ep, tp, dp) of every rank, the most significant axis first."""
    groups = rank_groups(sizes, experts)
    places = [
        {rank: at for group in groups[name] for at, rank in enumerate(group)} for name in ("pp", "cp", "ep", "tp", "dp")
    ]
    return [tuple(place[rank] for place in places) for rank in range(math.prod(sizes))]


def distinct_ranks(plan: Plan, size: int) -> list[int]:
    """Return the places on an axis with distinct shard shapes, and the last place."""
    held: dict[tuple[int, ...], int] = {}
    layouts = [tensor.layout for tensor in plan.tensors.values() if tensor.layout is not None]
    for place in range(size):
        shape = tuple(layout.local_size(place) for layout in layouts if layout.axis_size == size)
        held.setdefault(shape, place)
    return sorted({0, size - 1, *held.values()})


def rounds_of(sizes: MeshSizes, experts: int, plan: Plan, *, chained: bool = False) -> list[list[int]]:
    """Return the ranks of each round: all stages at one place of the other axes.

    The first round has the first place on every axis. In the next rounds one axis after the other moves to its last
    place, so that each axis has a group with both places. Then follow places between them whose shards have a different
    shape. A small world is rehearsed in one round. If tp x cp x dp is small, all its places are rehearsed.
    ``chained`` context-parallel ranks, which pass states, are in the same round.
    """
    if math.prod(sizes) <= _FEW:
        return [list(range(math.prod(sizes)))]
    coordinates = coordinates_of(sizes, experts)
    by_place = {place: rank for rank, place in enumerate(coordinates)}
    tp = distinct_ranks(plan, sizes.tp) if sizes.tp > 1 else [0]
    dp = {0, sizes.dp - 1}
    if experts > sizes.tp:  # innermost replicas with a different number of experts than the first and the last one
        places = {place // sizes.tp for place in distinct_ranks(plan, experts)}
        dp |= {place for place in places if 0 < place < experts // sizes.tp - 1}
    first, last = (range(sizes.cp), range(sizes.cp)) if chained else (range(1), range(sizes.cp - 1, sizes.cp))
    if sizes.tp * sizes.cp * sizes.dp <= _FEW:
        contexts = [first] if chained else [range(c, c + 1) for c in range(sizes.cp)]
        chosen = [(c, t, d) for d in range(sizes.dp) for c in contexts for t in range(sizes.tp)]
    else:
        chosen = [(first, 0, 0), (first, 0, max(dp)), (first, tp[-1], max(dp)), (last, tp[-1], max(dp))]
        chosen += [*((first, t, 0) for t in tp[1:-1]), *((first, 0, d) for d in sorted(dp)[1:-1])]
    inner, found = max(experts // sizes.tp, 1), []
    for ranks, t, d in dict.fromkeys(chosen):
        ep = (d % inner) * sizes.tp + t if experts > 1 else 0
        found.append([by_place[stage, c, ep, t, d] for stage in range(sizes.pp) for c in ranks])
    return found


def axes_of(sizes: MeshSizes, experts: int, zero: int) -> dict[tuple[int, ...], str]:
    """Return the axis of each group's ranks. If several axes have the same ranks, return the first axis."""
    groups = rank_groups(sizes, experts, zero)
    names = ("tp", "cp", "pp", "ep", "dp", "edp", "dp_cp", "edp_cp", "fsdp", "hsdp", "tp_cp", "tp_pp", "ep_pp", "model")
    return {tuple(ranks): name for name in reversed(names) for ranks in groups.get(name, ()) if len(ranks) > 1}


def check_sizes(call: Call, place: int, out: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if the tensors of the rank at ``place`` do not match the size of the collective's group."""
    members, wrong = len(call.group.ranks), ""
    splits = zip(("sends", "receives"), call.splits, (given, out), strict=False) if call.kind == "all_to_all" else ()
    for name, rows, tensors in splits:
        if len(tensors) > 1 and len(tensors) != members:
            wrong = f"{name} {len(tensors)} tensors, but the group has {members} ranks"
        if len(tensors) == 1 and tensors[0].ndim and sum(rows) != len(tensors[0]):
            wrong = f"{name} {len(tensors[0])} rows, but the split sizes are {list(rows)}"
    of_all = {"all_gather": out, "reduce_scatter": given, "gather": out, "scatter": given}.get(call.kind, ())
    own = given if of_all is out else out
    if of_all and own:  # else the kind has no tensors of all ranks, or this rank is not the root
        in_one = len(of_all) == len(own) and call.kind in ("all_gather", "reduce_scatter")  # one tensor for all ranks
        for full, part in zip(of_all, own, strict=True) if in_one else ():
            if full.numel() != members * part.numel():
                wrong = f"has {full.numel()} elements, but {members} ranks have {part.numel()} each"
        if not in_one and len(of_all) != members * len(own):
            wrong = f"has {len(of_all)} tensors, but the group has {members} ranks"
        elif not in_one and of_all[place].numel() != own[0].numel():
            wrong = f"has {of_all[place].numel()} elements for this rank, expected {own[0].numel()}"
    if wrong:
        raise ValueError(f"{call} {wrong}: {call.where}")


Members = list[list[torch.Tensor]]
"""The input tensors of each rank of a group."""

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
    "avg": lambda rows: rows.mean(0),
    "band": lambda rows: functools.reduce(torch.bitwise_and, rows),
    "bor": lambda rows: functools.reduce(torch.bitwise_or, rows),
    "bxor": lambda rows: functools.reduce(torch.bitwise_xor, rows),
}


def fill(out: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` into ``out``, or fill ``out`` with ones if the sizes differ."""
    if out.numel() == value.numel():
        out.copy_(value.reshape(out.shape))
    else:
        out.fill_(1)


def _reduced(call: Call, like: torch.Tensor, given: Iterable[torch.Tensor]) -> torch.Tensor:
    """Reduce the tensors of all ranks. Skip tensors whose size differs from this rank's tensor."""
    rows = torch.stack([each.reshape(-1) for each in given if each.numel() == like.numel()])
    reduce = _REDUCTIONS.get(call.reduction)
    return rows.sum(0, dtype=rows.dtype) if reduce is None else reduce(rows)


def _part(given: list[torch.Tensor], place: int, of: int) -> torch.Tensor:
    """Return a rank's shard: one of many tensors, or an equal slice of the first tensor's elements."""
    if len(given) >= of:
        return given[place]
    return given[0].reshape(-1).tensor_split(of)[place] if given else torch.empty(0)


def carry(call: Call, place: int, out: list[torch.Tensor], members: Members) -> None:
    """Fill the outputs of the rank at ``place`` in a group. An output whose size does not match gets ones."""
    kind, of, found = call.kind, len(members), list[torch.Tensor]()
    if kind in ("all_reduce", "reduce"):
        for number, x in enumerate(out if kind == "all_reduce" or call.peer == place else ()):
            found.append(_reduced(call, x, [given[number] for given in members if number < len(given)]))
    elif kind == "reduce_scatter":
        for number, x in enumerate(out):
            lists = [given[number:] if len(given) == len(out) else given for given in members]
            found.append(_reduced(call, x, [_part(given, place, of) for given in lists]))
    elif kind == "broadcast":
        found = [*members[call.peer], *(torch.empty(0) for _ in out)]
    elif kind == "scatter":  # empty if a different rank stands in for the root
        found = [_part(members[call.peer], place, of) for _ in out]
    elif kind == "gather":  # empty, except on the root
        found = [given[0] for given, _ in zip(members, out, strict=False)]
    else:
        every = kind == "all_gather"
        found = [given[0] if every else _part(given, place, of) for given in members if given or not every]
        found = [torch.cat([part.reshape(-1) for part in found])] if len(out) == 1 else found
    for x, value in zip(out, found, strict=False):
        fill(x, value)


def stand_in_for(rank: int, rehearsed: Sequence[int], coordinates: Sequence[tuple[int, ...]]) -> int:
    """Return the rehearsed rank that stands in for ``rank``: the one that shares most coordinates, major axes first."""
    own = coordinates[rank]
    return min(rehearsed, key=lambda other: [one != its for one, its in zip(coordinates[other], own, strict=True)])


def stand_ins_for(ranks: Sequence[int], rehearsed: Sequence[int], coordinates: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the rehearsed rank that stands in for each rank of a group.

    If possible, the stand-ins share the coordinates that all ranks of the group share. For example, a group of replicas
    gets stand-ins from its own tensor-parallel place, because a different place may issue different calls.
    """
    every, own = [coordinates[rank] for rank in ranks], coordinates[ranks[0]]
    common = [axis for axis, places in enumerate(zip(*every, strict=True)) if len(set(places)) == 1]
    fitting = [other for other in rehearsed if all(coordinates[other][axis] == own[axis] for axis in common)]
    return [stand_in_for(rank, fitting or rehearsed, coordinates) for rank in ranks]


class Transcript(NamedTuple):
    """Answers and numbers of a rank, which later rounds use.

    Attributes:
        verdicts: The answers of rank 0, one for each agreement of all ranks.
        given: The pickled tensors of each broadcast and scatter from this rank, by group and turn.
    """

    verdicts: list[Any]
    given: dict[tuple[Group, int], bytes]


class Answers:
    """Answers to the collectives of one rehearsed rank, on behalf of all other ranks.

    Args:
        ranks: The ranks of this round, including ``rank``.
        earlier: The transcripts of earlier rounds, by rank.
        finishes: A callback for each received message. It gets the handle, and the function that fills the message.

    Attributes:
        transcript: The transcript of this rank.
        root: The root of the broadcast for which this rank stands in, or -1.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        links: Links,
        coordinates: Sequence[tuple[int, ...]],
        earlier: Mapping[int, Transcript],
        finishes: Callable[[FakeWork, Callable[[], None] | None], None],
    ) -> None:
        self._rank, self._ranks, self._links, self._coordinates = rank, tuple(ranks), links, coordinates
        self._earlier, self._finishes = earlier, finishes
        self.transcript = Transcript([], {})
        self._agreements = 0  # of all ranks, so far
        self._who = functools.cache(lambda rank: stand_in_for(rank, self._ranks, self._coordinates))
        self._counts = Counter[Any]()
        self._turns = Counter[Group]()
        self.root = -1

    def __call__(self, operator: Operator, call: Call, args: tuple[Any, ...]) -> Any:
        """Run a collective. Tensors without memory need no exchange."""
        out, given = (list(tensors_in(args[place])) for place in (operator.out, operator.given))
        if call.kind == "recv" and call.peer < 0:
            raise RuntimeError(f"In a rehearsal a receiver must name a sender; got {call}: {call.where}")
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
        """Yield whether this rank stands in for the root of a broadcast. Calls inside the block name that root."""
        instead = root != self._rank and self._who(root) == self._rank and root not in self._earlier
        self.root = root if instead else -1
        yield instead
        self.root = -1

    def reports(self, own: Any) -> list[Any]:
        """Return the reports of all ranks on rank 0. Each rank has the report of its stand-in.

        This method, ``tell`` and ``ask`` replace :class:`autopar.distributed.agree._Star`.
        """
        said = {rank: own if rank == self._rank else self._links.receive(rank, "report") for rank in self._ranks}
        return [said[self._who(rank)] for rank in range(len(self._coordinates))]

    def tell(self, answers: list[Any]) -> None:
        """Send the answers of rank 0."""
        self.transcript.verdicts.append(answers)
        for rank in self._ranks:
            if rank != self._rank:
                self._links.send(rank, "answer", answers[rank])

    def ask(self, report: Any) -> Any:
        """Report to rank 0 and return its answer. If rank 0 ran in an earlier round, return its recorded answer."""
        if 0 in self._ranks:
            self._links.send(0, "report", report)
            return self._links.receive(0, "answer")
        self._agreements += 1
        verdicts = self._earlier[0].verdicts
        if self._agreements > len(verdicts):
            raise LeftAloneError
        return verdicts[self._agreements - 1][self._rank]

    def as_issued(self, call: Call) -> Call:
        """Return the call with the root for which this rank stands in."""
        return call if self.root < 0 else call._replace(peer=call.group.ranks.index(self.root))

    @torch.no_grad()
    def _carry(self, call: Call, out: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        ranks = call.group.ranks
        key = (call.group.name, ranks if {*ranks} <= {*self._ranks} else (), call.kind)  # stand-ins have similar groups
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
        if call.kind in ("broadcast", "scatter") and ranks[call.peer] in {*self._ranks} - {self._rank}:
            given = []  # the receive buffers hold old values
        # Exchange the tensors of all stand-ins for these ranks.
        rest = {self._who(rank) for rank in ranks} - {self._rank}
        self._counts[key] += 1
        turn = self._counts[key]
        for other in rest:
            self._links.send(other, (key, turn), given)
        everyone = {self._rank: given, **{other: self._links.receive(other, (key, turn)) for other in rest}}
        members = [everyone[self._who(rank)] for rank in ranks]
        if call.kind in ("broadcast", "scatter"):  # record this root's tensors, or use those from an earlier round
            self._turns[call.group] += 1
            turn, root = self._turns[call.group], ranks[call.peer]
            if root == self._rank:
                self.transcript.given[call.group, turn] = pickled(given)
            elif root not in self._ranks and root in self._earlier:
                numbers = self._earlier[root].given.get((call.group, turn))
                members[call.peer] = [] if numbers is None else unpickled(numbers)
        carry(call, ranks.index(self._rank), out, members)


# -- messages between the processes of a round ------------------------------------------------------------------------

_WAIT = 180.0  # seconds to wait for a message


class LeftAloneError(BaseException):
    """The awaited rank has ended or is deadlocked. A BaseException, so that no part of the program catches it."""


class Links:
    """A rank's connection to the process that runs :func:`deliver`."""

    def __init__(self, link: Connection) -> None:
        self._link = link

    def send(self, to: int, key: Any, value: Any) -> None:
        """Send a value to a rank, which may be this rank. The receiver uses the same key."""
        self._link.send(("send", to, key, pickled(value)))

    def receive(self, origin: int, key: Any) -> Any:
        """Return the next value with this key. Raises LeftAloneError if it never comes."""
        self._link.send(("receive", origin, key))
        if not self._link.poll(_WAIT):
            raise RuntimeError(f"Timed out after {_WAIT:g} s: rank {origin} sent no message with key {key}")
        data = self._link.recv()
        if data is None:
            raise LeftAloneError
        return unpickled(data)

    def end(self, result: Any) -> None:
        """Send the result of the rank's program."""
        self._link.send(("end", result))


def deliver(links: Mapping[int, Connection]) -> dict[int, Any]:
    """Deliver the messages of the ranks of a round until all end. Return the results of the ranks that did not die.

    A rank that awaits a message of a rank that has ended is left alone. If all ranks wait, all are left alone: every
    message was sent before its sender waits, so none is in transit.
    """
    live, rank_of = dict(links), {link: rank for rank, link in links.items()}
    sent: dict[tuple[int, int, Any], deque[bytes]] = defaultdict(deque)
    awaited: dict[int, tuple[int, int, Any]] = {}  # receiver -> receiver, sender and key
    results: dict[int, Any] = {}
    while live:
        for link in wait([*live.values()]):
            rank = rank_of[link]  # type: ignore[index]
            try:
                kind, *given = live[rank].recv()
            except EOFError:
                kind, given = "died", []
            if kind == "send":
                to, key, data = given
                sent[to, rank, key].append(data)
            elif kind == "receive":
                origin, key = given
                awaited[rank] = (rank, origin, key)
            else:
                del live[rank]
                awaited.pop(rank, None)
            if kind == "end":
                [results[rank]] = given
        ready = [rank for rank, message in awaited.items() if sent[message] or message[1] not in live]
        for rank in ready or ([*awaited] if len(awaited) == len(live) else ()):
            waiting = sent[awaited.pop(rank)]
            with suppress(OSError):  # the process has died
                live[rank].send(waiting.popleft() if waiting else None)
    return results


def pickled(value: Any) -> bytes:
    """Pickle a value without dispatch modes, which would count its operations."""
    with no_dispatch_modes():
        return pickle.dumps(value)


def unpickled(data: bytes) -> Any:
    """Undo :func:`pickled`."""
    with no_dispatch_modes():
        return pickle.loads(data)

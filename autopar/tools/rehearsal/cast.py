"""Ranks that are rehearsed at a time: processes of this machine that answer for all ranks of the world.

The first rank of each axis is rehearsed, the last one, and those whose shards have other shapes. Each process
represents one rank, and the ranks whose coordinates are nearest to its own. Numbers, objects and headers of messages
travel between these processes. Tensors of the model have no memory, and are not sent.
"""

from __future__ import annotations

import functools
import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import RawArray
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch

from autopar.distributed.axis import MeshSizes
from autopar.distributed.mesh import rank_groups
from autopar.plan.plan import Plan
from autopar.tools.compat.operators import FakeWork, Operator, done, tensors_in
from autopar.tools.rehearsal.trace import Call, Group

_FEW = 8  # places of tensor-parallel, context-parallel and data-parallel ranks, all of which are rehearsed


def coordinates_of(sizes: MeshSizes, experts: int) -> list[tuple[int, ...]]:
    """Return of every rank its place on (pp, cp, ep, tp, dp), what matters most first."""
    world = math.prod(sizes)
    groups = rank_groups(sizes, experts)
    places = [
        {rank: at for group in groups[name] for at, rank in enumerate(group)} for name in ("pp", "cp", "ep", "tp", "dp")
    ]
    return [tuple(place[rank] for place in places) for rank in range(world)]


def unlike_ranks(plan: Plan, size: int) -> list[int]:
    """Return the places on an axis whose shards have shapes of their own, the first and the last one."""
    held: dict[tuple[int, ...], int] = {}
    layouts = [tensor.layout for tensor in plan.tensors.values() if tensor.layout is not None]
    for place in range(size):
        shape = tuple(layout.local_size(place) for layout in layouts if layout.axis_size == size)
        held.setdefault(shape, place)
    return sorted({0, size - 1, *held.values()})


def casts(sizes: MeshSizes, experts: int, plan: Plan, *, chained: bool = False) -> list[list[int]]:
    """Return ranks that are rehearsed together: all stages at one place of the other axes.

    All axes are at their first places; then one after the other is at its last, so that each has a group with both;
    those between whose shards have other shapes, one at a time. Where places are few, all are rehearsed; where ranks
    are, together.

    Args:
        chained: context-parallel ranks hand states on: all of them are rehearsed together.
    """
    if math.prod(sizes) <= _FEW:
        return [list(range(math.prod(sizes)))]
    coordinates = coordinates_of(sizes, experts)
    by_place = {place: rank for rank, place in enumerate(coordinates)}
    tp = unlike_ranks(plan, sizes.tp) if sizes.tp > 1 else [0]
    dp = {0, sizes.dp - 1}
    if experts > sizes.tp:  # innermost replicas whose experts differ in number from those of the first and the last
        places = {place // sizes.tp for place in unlike_ranks(plan, experts)}
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
    """Return the axis of each group's ranks; where axes have the same ranks, the first of them.

    Args:
        zero: as in :func:`~autopar.distributed.mesh.rank_groups`.
    """
    groups = rank_groups(sizes, experts, zero)
    names = ("tp", "cp", "pp", "ep", "dp", "edp", "dp_cp", "edp_cp", "fsdp", "hsdp", "tp_cp", "tp_pp", "ep_pp", "model")
    return {tuple(ranks): name for name in reversed(names) for ranks in groups.get(name, ()) if len(ranks) > 1}


def check_sizes(call: Call, place: int, out: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Check a collective's tensors against the number of ranks.

    Args:
        place: of this rank in the group.

    Raises:
        ValueError: they do not fit; with both numbers.
    """
    members, wrong = len(call.group.ranks), ""
    splits = zip(("sends", "receives"), call.splits, (given, out), strict=False) if call.kind == "all_to_all" else ()
    for name, rows, tensors in splits:
        if len(tensors) > 1 and len(tensors) != members:
            wrong = f"{name} {len(tensors)} tensors, and the group has {members} ranks"
        if len(tensors) == 1 and tensors[0].ndim and sum(rows) != len(tensors[0]):
            wrong = f"{name} {len(tensors[0])} rows, and they are split into {list(rows)}"
    of_all = {"all_gather": out, "reduce_scatter": given, "gather": out, "scatter": given}.get(call.kind, ())
    own = given if of_all is out else out
    if of_all and own:  # else it sends nothing of all, or is not the root
        in_one = len(of_all) == len(own) and call.kind in ("all_gather", "reduce_scatter")  # all ranks' in one tensor
        for whole, part in zip(of_all, own, strict=True) if in_one else ():
            if whole.numel() != members * part.numel():
                wrong = f"has {whole.numel()} elements where {members} ranks have {part.numel()} each"
        if not in_one and len(of_all) != members * len(own):
            wrong = f"has {len(of_all)} tensors, and the group has {members} ranks"
        elif not in_one and of_all[place].numel() != own[0].numel():
            wrong = f"has {of_all[place].numel()} elements for itself, and its own are {own[0].numel()}"
    if wrong:
        raise ValueError(f"{call} {wrong}: {call.where}")


Members = list[list[torch.Tensor]]
"""Tensors that each rank of a group gives."""

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
    """Copy numbers; ones, where there are more or fewer of them."""
    if out.numel() == value.numel():
        out.copy_(value.reshape(out.shape))
    else:
        out.fill_(1)


def _reduced(call: Call, like: torch.Tensor, given: Iterable[torch.Tensor]) -> torch.Tensor:
    """Make one tensor of those of all ranks that have the size of this one's."""
    rows = torch.stack([each.reshape(-1) for each in given if each.numel() == like.numel()])
    reduce = _REDUCTIONS.get(call.reduction)
    return rows.sum(0, dtype=rows.dtype) if reduce is None else reduce(rows)


def _part(given: list[torch.Tensor], place: int, of: int) -> torch.Tensor:
    """Return the part of a rank: one of many tensors, or as many elements of the first as others get."""
    if len(given) >= of:
        return given[place]
    return given[0].reshape(-1).tensor_split(of)[place] if given else torch.empty(0)


def carry(call: Call, place: int, out: list[torch.Tensor], members: Members) -> None:
    """Fill what the rank at a place of a group gets of what all give; with ones where numbers do not fit."""
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
    elif kind == "scatter":  # nothing, if who represents the root is not one
        found = [_part(members[call.peer], place, of) for _ in out]
    elif kind == "gather":  # nothing, but on the root
        found = [given[0] for given, _ in zip(members, out, strict=False)]
    else:
        every = kind == "all_gather"
        found = [given[0] if every else _part(given, place, of) for given in members if given or not every]
        found = [torch.cat([part.reshape(-1) for part in found])] if len(out) == 1 else found
    for x, value in zip(out, found, strict=False):
        fill(x, value)


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

    def tell(self, answers: list[Any]) -> None:
        """Answer on rank 0."""
        self.told.verdicts.append(answers)
        for rank in self._cast:
            if rank != self._rank:
                self._links.send(rank, "answer", answers[rank])

    def ask(self, report: Any) -> Any:
        """Report to rank 0; return its answer, which it gave before if it is not here."""
        if 0 in self._cast:
            self._links.send(0, "report", report)
            return self._links.receive(0, "answer")
        self._rounds += 1
        verdicts = self._earlier[0].verdicts
        if self._rounds > len(verdicts):
            raise LeftAloneError
        return verdicts[self._rounds - 1][self._rank]

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
        # Exchange what each process of the cast gives that stands for one of these ranks.
        others = {self._who(rank) for rank in ranks} - {self._rank}
        turn = self._counts[key] = self._counts.get(key, 0) + 1
        for other in others:
            self._links.send(other, (key, turn), given)
        everyone = {self._rank: given, **{other: self._links.receive(other, (key, turn)) for other in others}}
        members = [everyone[self._who(rank)] for rank in ranks]
        if call.kind in ("broadcast", "scatter"):  # keep what this root gives; take what an earlier one gave
            turn = self._turns[call.group] = self._turns.get(call.group, 0) + 1
            root = ranks[call.peer]
            if root == self._rank:
                self.told.given[call.group, turn] = packed(given)
            elif root not in self._cast and root in self._earlier:
                members[call.peer] = unpacked(self._earlier[root].given.get((call.group, turn), []))
        carry(call, ranks.index(self._rank), out, members)


# -- messages between the processes, and how one finds out that they wait for each other for ever ----------------------


class Standstill:
    """Counts of messages, and who waits, in memory that forks share: whether all processes wait for each other.

    Each process writes its own numbers: a message that it sends before it does, one that it takes once it goes on.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._sent, self._taken, self._waiting = (RawArray("q", len(ranks)) for _ in range(3))

    def sends(self, rank: int) -> None:
        """Count a message before it is sent."""
        self._sent[self._places[rank]] += 1

    def takes(self, rank: int) -> None:
        """Count a message after its arrival."""
        self._taken[self._places[rank]] += 1

    @contextmanager
    def waits(self, rank: int) -> Iterator[None]:
        """Wait inside for a message, or for the end of the others, with nothing else to do."""
        self._waiting[self._places[rank]] = True
        try:
            yield
        finally:
            self._waiting[self._places[rank]] = False

    def holds(self) -> bool:
        """Return whether all wait and no message is on its way: the counts are equal, and stay what they were.

        A process that began to work in between would have taken a message (Mattern, "Algorithms for distributed
        termination detection", 1987).
        """
        before = [*self._sent, *self._taken]
        still = all(self._waiting) and sum(self._sent) == sum(self._taken)
        return still and before == [*self._sent, *self._taken]


_WAIT = 180.0  # seconds for another process
_LOOK = 0.5  # seconds until a process that waits looks whether all do
_END = "end"


class LeftAloneError(BaseException):
    """The rank waits for one whose program has ended, or that waits for it; no part of the program may catch it."""


class Links:
    """A process's connections to the others of its cast, from which a thread takes all that comes: no sender waits."""

    def __init__(self, rank: int, links: Mapping[int, Connection], standstill: Standstill) -> None:
        self._rank, self._links, self._standstill = rank, links, standstill
        self._early: dict[tuple[int, Any], list[Any]] = {}
        self._ended: set[int] = set()
        self._arrived: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        if links:
            Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        origins = {link: rank for rank, link in self._links.items()}
        while True:
            for link in wait([*origins]):
                self._arrived.put((origins[link], link.recv_bytes()))  # type: ignore[index, union-attr]

    def send(self, to: int, key: Any, value: Any) -> None:
        """Send a value, which the other one receives by the same key; also to this process itself."""
        if to == self._rank:
            self._early.setdefault((to, key), []).append(pickle.loads(pickle.dumps(packed(value))))
            return
        self._standstill.sends(self._rank)
        self._links[to].send_bytes(pickle.dumps((key, packed(value))))

    def receive(self, origin: int, key: Any) -> Any:
        """Return what was sent by this key, the first of several first.

        Raises:
            LeftAloneError: it never comes.
        """
        waiting, until = self._early.setdefault((origin, key), []), time.monotonic() + _WAIT
        while not waiting:
            if origin in self._ended or origin == self._rank:
                raise LeftAloneError
            with self._standstill.waits(self._rank):
                arrived = self._next(_LOOK)
                if arrived is None and self._standstill.holds():
                    raise LeftAloneError
            if arrived is not None:
                self._take(*arrived)
            elif time.monotonic() > until:
                raise RuntimeError(f"Timed out waiting: rank {origin} sends nothing for {key} in {_WAIT:g} s")
        return unpacked(waiting.pop(0))

    def tell_end(self) -> None:
        """Tell the others that this rank's program has ended."""
        for rank in self._links:
            self.send(rank, _END, None)

    def drain(self) -> None:
        """Take what the others send until their programs have ended, too."""
        with self._standstill.waits(self._rank):
            while self._ended < {*self._links} and (arrived := self._next(_WAIT)):
                self._take(*arrived)

    def _next(self, seconds: float) -> tuple[int, bytes] | None:
        try:
            return self._arrived.get(timeout=seconds)
        except Empty:
            return None

    def _take(self, origin: int, data: bytes) -> None:
        key, value = pickle.loads(data)
        self._early.setdefault((origin, key), []).append(value)
        self._standstill.takes(self._rank)
        if key == _END:
            self._ended.add(origin)


def packed(value: Any) -> Any:
    """Return plain data as it is, an array as its bytes, a tensor without memory as its shape."""
    if isinstance(value, list):
        return [packed(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        return (tuple(value.shape), value.dtype)
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tuple(value.shape), value.dtype


def unpacked(value: Any) -> Any:
    """Undo :func:`packed`."""
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if not isinstance(value, tuple):
        return value
    if len(value) == 2:
        return torch.empty(value[0], dtype=value[1], device="meta")
    data, shape, dtype = value
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)

"""Compare the traces of ranks: collectives find their like, messages their receivers; then play them. Pure.

The traces are those of rehearsed ranks, or of a job. A rank that was not rehearsed is represented by one that was, in
the group of the same name. Calls that match are played against each other: whether all ranks come to an end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autopar.distributed.agree import names_of
from autopar.tools.rehearsal.trace import Call, Group

Traces = Mapping[int, Sequence[Call]]
MESSAGES = ("send", "recv")
OF_THE_HOST = "pp control"  # goes over gloo, whose tags keep messages apart, on GPUs as well


def differences(
    traces: Traces, standing_in: Callable[[Sequence[int]], Sequence[int]], *, cut: Collection[int] = ()
) -> Iterator[str]:
    """Yield what does not fit, in a few lines each: the first of each group, and of each pair that exchanges messages.

    Args:
        traces: calls by rank.
        standing_in: returns the traced ranks that stand for those of a group.
        cut: ranks whose programs did not come to their end: nothing counts as missing there.
    """
    yield from _groups_made(traces, cut)
    by_group: dict[int, dict[Group, list[Call]]] = {rank: defaultdict(list) for rank in traces}
    for rank, calls in traces.items():
        for call in calls:
            if call.kind != "new_group":
                by_group[rank][call.group].append(call)
    seen: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    for rank, groups in by_group.items():
        for group in groups:
            members = tuple(standing_in(group.ranks))
            lines = _lines(group, members, by_group)
            shown = _Compared(group, members, lines)
            key = (group.name, members, tuple(map(id, lines)))
            if key not in seen:
                seen.add(key)
                yield from _collectives(shown, cut)
            yield from _messages(shown, rank, cut)
            if group.name != OF_THE_HOST:
                yield from _in_order(shown, rank)


class _Compared(NamedTuple):
    """A group, who was traced for each of its ranks, and the calls of that one over it."""

    group: Group
    members: tuple[int, ...]
    lines: list[list[Call]]

    def rank(self, place: int) -> str:
        """Say which rank it is, and who stood for it."""
        rank, member = self.group.ranks[place], self.members[place]
        return f"rank {rank}" + ("" if member == rank else f" (as rank {member})")

    def __str__(self) -> str:
        ranks = self.group.ranks
        return f"{self.group.name} {list(ranks) if len(ranks) <= 8 else f'[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]'}"


_ByGroup = Mapping[int, Mapping[Group, list[Call]]]
_NONE: list[Call] = []


def _lines(group: Group, members: Sequence[int], by_group: _ByGroup) -> list[list[Call]]:
    """Return the calls of the rank that was traced for each place of a group: over that, or over its own like it."""
    over = {member: by_group[member].get(group) for member in {*members}}  # once: the world's ranks are many to hash
    return [
        own if own is not None else _line_like(group, place, member, by_group)
        for place, member in enumerate(members)
        for own in (over[member],)
    ]


def _line_like(group: Group, place: int, member: int, by_group: _ByGroup) -> list[Call]:
    """Return the calls of a rank over its own group that is most like another one."""
    if member == group.ranks[place]:
        return _NONE
    alike = [own for own in by_group[member] if own.name == group.name and member in own.ranks]
    if not alike:
        return _NONE
    most = max(alike, key=lambda own: (len(own.ranks) == len(group.ranks), own.ranks.index(member) == place))
    return by_group[member][most]


def _groups_made(traces: Traces, cut: Collection[int]) -> Iterator[str]:
    """Every rank makes all groups of the world, in one order."""
    made = {rank: [call for call in calls if call.kind == "new_group"] for rank, calls in traces.items()}
    if not made:
        return
    first = next(iter(made))
    for rank, calls in made.items():
        for number, (one, other) in enumerate(zip(made[first], calls, strict=False)):
            if one.group != other.group:
                yield (
                    f"group {number} that rank {first} makes is {one.group.name} {list(one.group.ranks)} ({one.where}),"
                    f"\n  that of rank {rank} is {other.group.name} {list(other.group.ranks)} ({other.where})"
                )
                break
        else:
            fewer = first if len(made[first]) < len(calls) else rank
            if len(calls) != len(made[first]) and fewer not in cut:
                yield f"rank {first} makes {len(made[first])} groups, rank {rank} makes {len(calls)}"


def _collectives(compared: _Compared, cut: Collection[int]) -> Iterator[str]:
    lines = [[call for call in line if call.kind not in MESSAGES] for line in compared.lines]
    traced = [(member, id(line)) for member, line in zip(compared.members, compared.lines, strict=True)]
    done = {traced[0]}
    for place, line in enumerate(lines):
        if traced[place] in done:
            continue
        done.add(traced[place])
        for number, (one, other) in enumerate(zip(lines[0], line, strict=False)):
            wrong = _contradiction(one, other)
            if wrong:
                pair = (f"\n  {compared.rank(at)}: {call}\n    {call.where}" for at, call in ((0, one), (place, other)))
                yield f"call {number} over {compared} {wrong}:" + "".join(pair)
                break
        else:
            fewer = compared.members[0 if len(lines[0]) < len(line) else place]
            if len(lines[0]) != len(line) and fewer not in cut:
                yield _missing(compared, place, lines)
    yield from _splits(compared, lines)


def _contradiction(one: Call, other: Call) -> str:
    if one.kind != other.kind:
        return "are different collectives"
    if one.dtype != other.dtype:
        return f"have different dtypes, {one.dtype} and {other.dtype}"
    if one.peer != other.peer:
        return f"have different roots, places {one.peer} and {other.peer} of the group"
    if one.reduction != other.reduction:
        return f"reduce in different ways, {one.reduction} and {other.reduction}"
    if one.control != other.control:
        return "are on different devices, one of them on the CPU"
    objects = one.dtype == "uint8" and one.control  # pickled: as long as they are
    sizes: list[Any] = [one.sizes, other.sizes]
    if one.kind == "all_to_all":  # shapes of a row; of lists, whose elements are counted, none
        sizes = [call.sizes[0][1:] if len(call.sizes) == 1 else () for call in (one, other)]
    if sizes[0] != sizes[1] and not objects:
        return f"have different sizes, {list(one.sizes)} and {list(other.sizes)}"
    return ""


def _splits(compared: _Compared, lines: list[list[Call]]) -> Iterator[str]:
    """Each sends as many rows to another as that one takes from it, as far as they were traced themselves."""
    ranks = compared.group.ranks
    own = [place for place, member in enumerate(compared.members) if member == ranks[place]]
    for number, calls in enumerate(zip(*lines, strict=False)):
        if calls[0].kind != "all_to_all" or not all(call.splits for call in calls):
            continue
        for one in own:
            for other in own:
                sent, taken = calls[one].splits[0][other], calls[other].splits[1][one]
                if sent != taken:
                    yield (
                        f"collective {number} over {compared}: rank {ranks[one]} sends {sent} rows to rank "
                        f"{ranks[other]}, which takes {taken}\n  rank {ranks[one]}: {calls[one].where}\n  rank "
                        f"{ranks[other]}: {calls[other].where}"
                    )
                    return


def _missing(compared: _Compared, place: int, lines: Sequence[Sequence[Call]]) -> str:
    more, fewer = (0, place) if len(lines[0]) > len(lines[place]) else (place, 0)
    call = lines[more][len(lines[fewer])]
    return (
        f"{compared.rank(more)} has {len(lines[more])} collectives over {compared}, "
        f"{compared.rank(fewer)} has {len(lines[fewer])}.\n  The first that it does not have: {call}\n    "
        f"{call.where}"
    )


def _pairs(compared: _Compared, rank: int) -> Iterator[tuple[int, list[Call], list[Call]]]:
    """Yield each rank that this one sends to, what it sends, and what that one, or who stands for it, takes from it."""
    ranks, members = compared.group.ranks, compared.members
    place = ranks.index(rank)
    own = compared.lines[place]
    for peer in sorted({call.peer for call in own if call.kind == "send"} - {place}):
        other = compared.lines[peer]
        theirs = [call.group.ranks.index(members[peer]) for call in other[:1]]
        back = place if not theirs or theirs[0] == peer else place + theirs[0] - peer
        sent = [call for call in own if (call.kind, call.peer) == ("send", peer)]
        taken = [call for call in other if (call.kind, call.peer) == ("recv", back)]
        if taken or members[peer] == ranks[peer]:  # who stands for it may be one that sends
            yield ranks[peer], sent, taken


def _messages(compared: _Compared, rank: int, cut: Collection[int]) -> Iterator[str]:
    name = compared.group.name
    for to, *both in _pairs(compared, rank):
        by_tag: tuple[dict[int, list[Call]], dict[int, list[Call]]] = defaultdict(list), defaultdict(list)
        for calls, tagged in zip(both, by_tag, strict=True):
            for call in calls:
                tagged[call.tag].append(call)
        for tag, sent in sorted(by_tag[0].items()):
            taken = by_tag[1].get(tag, [])
            for number, (one, two) in enumerate(zip(sent, taken, strict=False)):
                if (one.sizes, one.dtype) != (two.sizes, two.dtype):
                    yield (
                        f"message {number} from rank {rank} to rank {to} over {name} is sent as {one} and received as "
                        f"{two}\n  {one.where}\n  {two.where}"
                    )
                    break
                if one.control != two.control:
                    devices = [("a device", "the CPU")[call.control] for call in (one, two)]
                    yield (
                        f"message {number} from rank {rank} to rank {to} over {name}, {one}, is sent from {devices[0]} "
                        f"and received on {devices[1]}\n  {one.where}\n  {two.where}"
                    )
                    break
            else:
                fewer = rank if len(sent) < len(taken) else compared.members[compared.group.ranks.index(to)]
                if len(sent) != len(taken) and fewer not in cut:
                    extra = (sent if len(sent) > len(taken) else taken)[min(len(sent), len(taken))]
                    yield (
                        f"rank {rank} sends {len(sent)} messages with tag {tag} to rank {to} over {name}, which "
                        f"receives {len(taken)}\n  the first that is too many: {extra}\n  {extra.where}"
                    )


def _in_order(compared: _Compared, rank: int) -> Iterator[str]:
    """A message is received as it was sent, the first one first: nccl has no tags. Numbers of the CPU go over gloo."""
    for to, *both in _pairs(compared, rank):
        sent, taken = ([call for call in calls if not call.control] for calls in both)
        for number, (one, two) in enumerate(zip(sent, taken, strict=False)):
            if one.tag != two.tag:
                yield (
                    f"message {number} from rank {rank} to rank {to} over {compared.group.name} has tag {one.tag} "
                    f"where it is sent and {two.tag} where it is received: nccl has no tags, and gives it the wrong "
                    f"one\n  {one.where}\n  {two.where}"
                )
                break


Waited = Mapping[int, int]
"""The number of a message that is received -> of the call before which it is waited for."""


def where_awaited(calls: Sequence[Call], waited: Waited) -> Iterator[int]:
    """Yield the numbers of calls as they are played: a message is taken where its receiver waits for it."""
    later: dict[int, list[int]] = defaultdict(list)
    for number, before in waited.items():
        if before > number + 1:
            later[before].append(number)
    moved = {number for numbers in later.values() for number in numbers}
    for number in range(len(calls) + 1):
        yield from later.get(number, ())
        if number < len(calls) and number not in moved:
            yield number


def latest(calls: Sequence[Call]) -> dict[int, int]:
    """Return where messages of a real trace, which does not say it, are waited for at the latest: next collectives."""
    found: dict[int, int] = {}
    before = len(calls)
    for number in reversed(range(len(calls))):
        if calls[number].kind not in MESSAGES:
            before = number
        elif calls[number].kind == "recv":
            found[number] = before
    return found


def waiting(
    traces: Traces, *, in_order: bool = False, waited: Mapping[int, Mapping[int, int]] | None = None
) -> dict[int, Call]:
    """Play the calls of all ranks against each other; return where each waits that does not come to an end.

    A collective waits until all traced members of its group are at it, a receiver for its message; a sender does not
    wait, as over gloo.

    Args:
        in_order: as over nccl, a group carries one message of a rank after the other: none goes before the one that
            was issued first has been received. Those of a batch go at the same time; numbers of the CPU go over gloo.
        waited: of each rank; without, a receiver waits at once.
    """
    played = {}
    for rank, calls in traces.items():
        awaited = (waited or {}).get(rank, {})
        if in_order:
            awaited = {number: before for number, before in awaited.items() if _beside(calls[number])}
        played[rank] = [calls[number] for number in where_awaited(calls, awaited)]
    return Play(played, in_order=in_order).run()


def stuck(
    traces: Traces, *, in_order: bool = False, waited: Mapping[int, Mapping[int, int]] | None = None
) -> list[str]:
    """Say where ranks are :func:`waiting`."""
    over = "over nccl, where a group carries one message after the other, " if in_order else ""
    left = waiting(traces, in_order=in_order, waited=waited)
    return [f"{over}rank {rank} waits in {call}\n    {call.where}" for rank, call in left.items()]


def standing(calls: Mapping[int, Call]) -> list[str]:
    """Say in which calls ranks wait for ever, those first in which fewest do."""
    at: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, call in calls.items():
        at[str(call), call.where].append(rank)
    fewest = sorted(at.items(), key=lambda one: len(one[1]))
    return [
        f"{names_of(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {call}\n    {where}"
        for (call, where), ranks in fewest
    ]


def _beside(call: Call) -> bool:
    """Return whether a message goes beside others of its group, over nccl: of a batch, or over gloo, from the CPU."""
    return call.batched or call.control or call.group.name == OF_THE_HOST


class Play:
    """A play of calls, without time; subclasses say how long things take.

    Attributes:
        left: the calls that are left of each rank.
        clocks: how late it is for each rank.
    """

    def __init__(self, calls: Mapping[int, Iterable[Call]], *, in_order: bool = False) -> None:
        self.left = {rank: deque(call for call in own if call.kind != "new_group") for rank, own in calls.items()}
        self.clocks: dict[int, float] = defaultdict(float)
        self._in_order = in_order
        self._sent: dict[tuple[str, int, int, int], deque[float]] = defaultdict(deque)  # when messages arrive
        self._lines: dict[tuple[str, int], deque[int]] = defaultdict(deque)

    def run(self) -> dict[int, Call]:
        """Return where each rank waits at the end, if it is not through."""
        moved = True
        while moved:
            moved = False
            for rank, calls in self.left.items():
                while calls and self._goes(rank):
                    moved = True
        return {rank: calls[0] for rank, calls in self.left.items() if calls}

    def reach(self, rank: int) -> None:
        """Do what comes before a rank's next call, once."""

    def seconds(self, rank: int, call: Call) -> float:
        """Return how long a call takes."""
        return 0.0

    def through(self, rank: int, start: float, end: float) -> None:
        """Let a rank be through its next call."""
        self.left[rank].popleft()

    def _goes(self, rank: int) -> bool:
        self.reach(rank)
        call = self.left[rank][0]
        if call.kind in MESSAGES:
            return self._message(rank, call)
        members = [member for member in call.group.ranks if member in self.left]
        heads = [self.left[member][0] if self.left[member] else None for member in members]
        if any(head is None or head.group != call.group or head.kind in MESSAGES for head in heads):
            return False
        for member in members:
            self.reach(member)
        start = max(self.clocks[member] for member in members)
        end = start + self.seconds(rank, call)
        for member in members:
            self.through(member, start, end)
        return True

    def _message(self, rank: int, call: Call) -> bool:
        peer, clock, name = call.group.ranks[call.peer], self.clocks[rank], call.group.name
        one_by_one = self._in_order and not _beside(call)
        if call.peer >= 0 and call.kind == "send":
            if one_by_one and peer in self.left:
                self._lines[name, rank].append(peer)
            else:
                self._sent[name, rank, peer, call.tag].append(clock + self.seconds(rank, call))
        elif call.peer >= 0:
            arrived, line = self._sent[name, peer, rank, call.tag], self._lines[name, peer]
            if arrived:
                clock = max(clock, arrived.popleft())
            elif peer in self.left:
                if list(line)[:1] != [rank] or (one_by_one and self._lines[name, rank]):
                    return False
                line.popleft()
        self.through(rank, clock, clock)
        return True

"""Compare and replay the traces of a rehearsal or a job. Pure functions.

For a rank without a trace, another rank with a group of the same name stands in.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autopar.distributed.agree import names_of
from autopar.tools.rehearsal.trace import Call, Group

Traces = Mapping[int, Sequence[Call]]
MESSAGES = ("send", "recv")
OF_THE_HOST = "pp control"  # uses gloo, also with GPUs, and gloo matches messages by tag


def differences(
    traces: Traces, stand_ins_for: Callable[[Sequence[int]], Sequence[int]], *, cut: Collection[int] = ()
) -> Iterator[str]:
    """Yield a description of the first difference in each group, and between each sender and receiver.

    Args:
        traces: The calls by rank.
        stand_ins_for: A function from the ranks of a group to their traced stand-ins.
        cut: The ranks whose programs did not end. Calls that they lack are not differences.
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
            members = tuple(stand_ins_for(group.ranks))
            lines = _lines(group, members, by_group)
            shown = _Compared(group, members, lines)
            key = (group.name, members, tuple(map(id, lines)))
            if key not in seen:
                seen.add(key)
                yield from _collectives(shown, cut)
            yield from _messages(shown, rank, cut)


class _Compared(NamedTuple):
    """A group, the stand-in for each of its ranks, and each stand-in's calls over the group."""

    group: Group
    members: tuple[int, ...]
    lines: list[list[Call]]

    def rank(self, place: int) -> str:
        rank, member = self.group.ranks[place], self.members[place]
        return f"rank {rank}" + ("" if member == rank else f" (as rank {member})")

    def __str__(self) -> str:
        ranks = self.group.ranks
        return f"{self.group.name} {list(ranks) if len(ranks) <= 8 else f'[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]'}"


_ByGroup = Mapping[int, Mapping[Group, list[Call]]]
_NONE: list[Call] = []


def _lines(group: Group, members: Sequence[int], by_group: _ByGroup) -> list[list[Call]]:
    """Return each stand-in's calls over the group, or over its most similar group of the same name."""
    over = {member: by_group[member].get(group) for member in {*members}}  # once: hashing many ranks is slow

    def line(place: int, member: int) -> list[Call]:
        own = over[member]
        if own is not None or member == group.ranks[place]:
            return own or _NONE
        like = [each for each in by_group[member] if each.name == group.name and member in each.ranks]
        like.sort(key=lambda each: (len(each.ranks) != len(group.ranks), each.ranks.index(member) != place))
        return by_group[member][like[0]] if like else _NONE

    return [line(place, member) for place, member in enumerate(members)]


def _groups_made(traces: Traces, cut: Collection[int]) -> Iterator[str]:
    """Yield a difference if ranks do not create the same groups in the same order."""
    made = {rank: [call for call in calls if call.kind == "new_group"] for rank, calls in traces.items()}
    first, own = next(iter(made.items()), (0, []))
    for rank, calls in made.items():
        for number, pair in enumerate(zip(own, calls, strict=False)):
            if pair[0].group != pair[1].group:
                one, other = (f"{call.group.name} {list(call.group.ranks)} ({call.where})" for call in pair)
                yield f"rank {first} creates group {number} as {one},\n  rank {rank} as {other}"
                break
        else:
            fewer = first if len(own) < len(calls) else rank
            if len(calls) != len(own) and fewer not in cut:
                yield f"rank {first} creates {len(own)} groups, but rank {rank} creates {len(calls)}"


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
            more, fewer = (0, place) if len(lines[0]) > len(line) else (place, 0)
            if len(lines[0]) != len(line) and compared.members[fewer] not in cut:
                call = lines[more][len(lines[fewer])]
                yield (
                    f"{compared.rank(more)} issues {len(lines[more])} collectives over {compared}, "
                    f"{compared.rank(fewer)} only {len(lines[fewer])}.\n  The first missing collective: {call}\n    "
                    f"{call.where}"
                )
    yield from _splits(compared, lines)


def _contradiction(one: Call, other: Call) -> str:
    if one.kind != other.kind:
        return "are different collectives"
    if one.dtype != other.dtype:
        return f"have different dtypes, {one.dtype} and {other.dtype}"
    if one.peer != other.peer:
        return f"have different roots, group ranks {one.peer} and {other.peer}"
    if one.reduction != other.reduction:
        return f"have different reductions, {one.reduction} and {other.reduction}"
    if one.control != other.control:
        return "are on different devices, one on the CPU and one on the GPU"
    objects = one.dtype == "uint8" and one.control  # pickled, of any length
    sizes: list[Any] = [one.sizes, other.sizes]
    if one.kind == "all_to_all":  # the shape of a row; () for lists, whose elements are counted
        sizes = [call.sizes[0][1:] if len(call.sizes) == 1 else () for call in (one, other)]
    if sizes[0] != sizes[1] and not objects:
        return f"have different sizes, {list(one.sizes)} and {list(other.sizes)}"
    return ""


def _splits(compared: _Compared, lines: list[list[Call]]) -> Iterator[str]:
    """Yield the first all-to-all in which a rank sends a different number of rows than the receiver expects."""
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
                        f"{ranks[other]}, which expects {taken}\n  rank {ranks[one]}: {calls[one].where}\n  rank "
                        f"{ranks[other]}: {calls[other].where}"
                    )
                    return


def _pairs(compared: _Compared, rank: int) -> Iterator[tuple[int, list[Call], list[Call]]]:
    """Yield each receiver of this rank's messages, the sent messages, and the messages that its stand-in receives."""
    ranks, members = compared.group.ranks, compared.members
    place = ranks.index(rank)
    own = compared.lines[place]
    for peer in sorted({call.peer for call in own if call.kind == "send"} - {place}):
        other = compared.lines[peer]
        theirs = [call.group.ranks.index(members[peer]) for call in other[:1]]
        back = place if not theirs or theirs[0] == peer else place + theirs[0] - peer
        sent = [call for call in own if (call.kind, call.peer) == ("send", peer)]
        taken = [call for call in other if (call.kind, call.peer) == ("recv", back)]
        if taken or members[peer] == ranks[peer]:  # a stand-in may send where the receiver receives
            yield ranks[peer], sent, taken


def _messages(compared: _Compared, rank: int, cut: Collection[int]) -> Iterator[str]:
    name = compared.group.name
    for to, *both in _pairs(compared, rank):
        for tag in sorted({call.tag for call in both[0]}):
            sent, taken = ([call for call in calls if call.tag == tag] for calls in both)
            for number, (one, two) in enumerate(zip(sent, taken, strict=False)):
                message = f"message {number} from rank {rank} to rank {to} over {name}"
                if (one.sizes, one.dtype) != (two.sizes, two.dtype):
                    yield f"{message} is sent as {one} and received as {two}\n  {one.where}\n  {two.where}"
                    break
                if one.control != two.control:
                    origin, end = (("a device", "the CPU")[call.control] for call in (one, two))
                    lines = f"{one.where}\n  {two.where}"
                    yield f"{message}, {one}, is sent from {origin} and received on {end}\n  {lines}"
                    break
            else:
                fewer = rank if len(sent) < len(taken) else compared.members[compared.group.ranks.index(to)]
                if len(sent) != len(taken) and fewer not in cut:
                    extra = (sent if len(sent) > len(taken) else taken)[min(len(sent), len(taken))]
                    yield (
                        f"rank {rank} sends {len(sent)} messages with tag {tag} to rank {to} over {name}, which "
                        f"receives {len(taken)}\n  the first unmatched message: {extra}\n  {extra.where}"
                    )
        # NCCL ignores tags, and needs the order of sending. CPU tensors use gloo.
        pairs = zip(*([call for call in calls if not call.control] for calls in both), strict=False)
        for number, (one, two) in enumerate(pairs if name != OF_THE_HOST else ()):
            if one.tag != two.tag:
                yield (
                    f"message {number} from rank {rank} to rank {to} over {name} is sent with tag "
                    f"{one.tag} and received with tag {two.tag}: NCCL ignores tags, so the receiver gets the wrong "
                    f"message\n  {one.where}\n  {two.where}"
                )
                break


Waited = Mapping[int, int]
"""The number of a received message -> the number of the call before which the receiver waits for it."""


def where_awaited(calls: Sequence[Call], waited: Waited) -> Iterator[int]:
    """Yield call numbers in replay order: a message is received where the receiver waits for it."""
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
    """Return the latest point at which each message can be awaited: before the next collective. Traces omit waits."""
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
    """Replay the calls of all ranks, and return the call in which each deadlocked rank waits.

    A collective waits for all traced members of its group, and a receiver waits for its message. A sender does not
    wait, as with gloo.

    Args:
        in_order: A flag for NCCL, where a rank sends one message at a time over a group, in order. Batched messages
            have no order, and CPU tensors use gloo.
        waited: The :data:`Waited` of each rank. By default a receiver waits immediately.
    """
    played = {}
    for rank, calls in traces.items():
        awaited = (waited or {}).get(rank, {})
        if in_order:
            awaited = {number: before for number, before in awaited.items() if _beside(calls[number])}
        played[rank] = [calls[number] for number in where_awaited(calls, awaited)]
    return Play(played, in_order=in_order).run()


OVER_NCCL = "over nccl, where a group sends one message at a time, "


def blocked_calls(calls: Mapping[int, Call], over: str = "") -> list[str]:
    """Describe the calls in which ranks deadlock, the call with the fewest ranks first, each after ``over``."""
    at: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, call in calls.items():
        at[str(call), call.where].append(rank)
    fewest = sorted(at.items(), key=lambda one: len(one[1]))
    return [
        f"{over}{names_of(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {call}\n    {where}"
        for (call, where), ranks in fewest
    ]


def _beside(call: Call) -> bool:
    """Return whether a message has no order in its group: it is batched, or a CPU tensor over gloo."""
    return call.batched or call.control or call.group.name == OF_THE_HOST


class Play:
    """A replay of calls. Calls take no time unless a subclass overrides :meth:`seconds`.

    Attributes:
        left: The remaining calls, by rank.
        clocks: The seconds since the start, by rank.
    """

    def __init__(self, calls: Mapping[int, Iterable[Call]], *, in_order: bool = False) -> None:
        self.left = {rank: deque(call for call in own if call.kind != "new_group") for rank, own in calls.items()}
        self.clocks: dict[int, float] = defaultdict(float)
        self._in_order = in_order
        self._sent: dict[tuple[str, int, int, int], deque[float]] = defaultdict(deque)  # when messages arrive
        self._lines: dict[tuple[str, int], deque[int]] = defaultdict(deque)

    def run(self) -> dict[int, Call]:
        """Replay all calls, and return the call in which each deadlocked rank waits."""
        moved = True
        while moved:
            moved = False
            for rank, calls in self.left.items():
                while calls and self._goes(rank):
                    moved = True
        return {rank: calls[0] for rank, calls in self.left.items() if calls}

    def seconds(self, rank: int, call: Call) -> float:
        """Return the duration of a call in seconds."""
        return 0.0

    def through(self, rank: int, start: float, end: float) -> None:
        """Finish a rank's next call."""
        self.left[rank].popleft()

    def _goes(self, rank: int) -> bool:
        call = self.left[rank][0]
        if call.kind in MESSAGES:
            return self._message(rank, call)
        members = [member for member in call.group.ranks if member in self.left]
        heads = [self.left[member][0] if self.left[member] else None for member in members]
        if any(head is None or head.group != call.group or head.kind in MESSAGES for head in heads):
            return False
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

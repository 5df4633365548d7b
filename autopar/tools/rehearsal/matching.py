"""Compare the traces of ranks: collectives find their like, messages their receivers, and all come to an end.

Pure: of rehearsed ranks, or of a job's own traces. A rank that was not rehearsed is stood for by one that was, in the
group of the same name.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from autopar.distributed.trace import Call

__all__ = ["Traces", "differences", "stuck"]

Traces = Mapping[int, Sequence[Call]]
_MESSAGES = ("send", "recv")
_OF_THE_HOST = "pp control"  # goes over gloo, whose tags keep messages apart, on GPUs as well


def differences(traces: Traces, standing_in: Callable[[Sequence[int]], Sequence[int]]) -> Iterator[str]:
    """Yield what does not fit, in a few lines each: the first of each group, and of each pair that exchanges messages.

    Args:
        traces: calls by rank.
        standing_in: returns the traced ranks that stand for those of a group.
    """
    yield from _groups_made(traces)
    by_name = {rank: _by_name(calls) for rank, calls in traces.items()}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for rank, groups in by_name.items():
        for name, calls in groups.items():
            ranks = calls[0].group.ranks
            members = tuple(standing_in(ranks))
            if (name, members) not in seen:
                seen.add((name, members))
                yield from _collectives(name, ranks, members, by_name)
            yield from _messages(name, rank, members, by_name)
            if name != _OF_THE_HOST:
                yield from _in_order(name, rank, members, by_name)


def _by_name(calls: Sequence[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if call.kind != "new_group":
            found[call.group.name].append(call)
    return found


def _groups_made(traces: Traces) -> Iterator[str]:
    """Every rank makes all groups of the world, in one order."""
    made = {rank: [call for call in calls if call.kind == "new_group"] for rank, calls in traces.items()}
    first = next(iter(made), None)
    for rank, calls in made.items():
        for number, (one, other) in enumerate(zip(made[first], calls, strict=False)):  # type: ignore[index]
            if one.group != other.group:
                yield (
                    f"group {number} that rank {first} makes is {one.group.name} {list(one.group.ranks)} ({one.where}),"
                    f"\n  that of rank {rank} is {other.group.name} {list(other.group.ranks)} ({other.where})"
                )
                break
        else:
            if len(calls) != len(made[first]):  # type: ignore[index]
                yield f"rank {first} makes {len(made[first])} groups, rank {rank} makes {len(calls)}"  # type: ignore[index]


def _collectives(
    name: str, ranks: Sequence[int], members: Sequence[int], by_name: Mapping[int, Mapping[str, list[Call]]]
) -> Iterator[str]:
    lines = [[c for c in by_name[member].get(name, ()) if c.kind not in _MESSAGES] for member in members]
    done: set[int] = set()
    for place, member in enumerate(members):
        if member in done or member == members[0]:
            continue
        done.add(member)
        for number, (one, other) in enumerate(zip(lines[0], lines[place], strict=False)):
            wrong = _contradiction(one, other)
            if wrong:
                yield _of_two(name, number, wrong, ranks, members, place, (one, other))
                break
        else:
            if len(lines[0]) != len(lines[place]):
                yield _missing(name, ranks, members, place, lines)
    yield from _splits(name, ranks, members, lines)


def _contradiction(one: Call, other: Call) -> str:
    if one.kind != other.kind:
        return "are different collectives"
    if one.dtype != other.dtype:
        return f"have different dtypes, {one.dtype} and {other.dtype}"
    if one.peer != other.peer:
        return f"have different roots, places {one.peer} and {other.peer} of the group"
    objects = one.dtype == "uint8" and one.control  # pickled: as long as they are
    if one.sizes != other.sizes and one.kind != "all_to_all" and not objects:
        return f"have different sizes, {list(one.sizes)} and {list(other.sizes)}"
    return ""


def _splits(name: str, ranks: Sequence[int], members: Sequence[int], lines: list[list[Call]]) -> Iterator[str]:
    """Each sends as many rows to another as that one takes from it, as far as they were traced themselves."""
    own = [place for place, member in enumerate(members) if member == ranks[place]]
    for number, calls in enumerate(zip(*lines, strict=False)):
        if calls[0].kind != "all_to_all" or not all(call.splits for call in calls):
            continue
        for one in own:
            for other in own:
                sent, taken = calls[one].splits[0][other], calls[other].splits[1][one]
                if sent != taken:
                    yield (
                        f"collective {number} over {name} {_shown(ranks)}: rank {ranks[one]} sends {sent} rows to rank "
                        f"{ranks[other]}, which takes {taken}\n  rank {ranks[one]}: {calls[one].where}\n  rank "
                        f"{ranks[other]}: {calls[other].where}"
                    )
                    return


def _of_two(
    name: str,
    number: int,
    wrong: str,
    ranks: Sequence[int],
    members: Sequence[int],
    place: int,
    calls: tuple[Call, Call],
) -> str:
    pair = zip((0, place), calls, strict=True)
    lines = (f"\n  {_rank(ranks, members, at)}: {call}\n    {call.where}" for at, call in pair)
    return f"call {number} over {name} {_shown(ranks)} {wrong}:" + "".join(lines)


def _missing(
    name: str, ranks: Sequence[int], members: Sequence[int], place: int, lines: Sequence[Sequence[Call]]
) -> str:
    more, fewer = (0, place) if len(lines[0]) > len(lines[place]) else (place, 0)
    call = lines[more][len(lines[fewer])]
    return (
        f"{_rank(ranks, members, more)} has {len(lines[more])} collectives over {name} {_shown(ranks)}, "
        f"{_rank(ranks, members, fewer)} has {len(lines[fewer])}.\n  The first that it does not have: {call}\n    "
        f"{call.where}"
    )


def _rank(ranks: Sequence[int], members: Sequence[int], place: int) -> str:
    stood = "" if members[place] == ranks[place] else f" (as rank {members[place]})"
    return f"rank {ranks[place]}{stood}"


def _shown(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]"


def _pairs(
    name: str, rank: int, members: Sequence[int], by_name: Mapping[int, Mapping[str, list[Call]]]
) -> Iterator[tuple[int, list[Call], list[Call]]]:
    """Yield each rank that this one sends to, what it sends, and what that one, or who stands for it, takes from it."""
    own = by_name[rank][name]
    place = own[0].group.ranks.index(rank)
    for peer in sorted({call.peer for call in own if call.kind == "send"} - {place}):
        other = by_name[members[peer]].get(name, ())
        theirs = [call.group.ranks.index(members[peer]) for call in other[:1]]
        back = place if not theirs or theirs[0] == peer else place + theirs[0] - peer
        sent = [call for call in own if (call.kind, call.peer) == ("send", peer)]
        yield own[0].group.ranks[peer], sent, [call for call in other if (call.kind, call.peer) == ("recv", back)]


def _messages(
    name: str, rank: int, members: Sequence[int], by_name: Mapping[int, Mapping[str, list[Call]]]
) -> Iterator[str]:
    for to, all_sent, all_taken in _pairs(name, rank, members, by_name):
        for tag in sorted({call.tag for call in all_sent}):
            sent = [call for call in all_sent if call.tag == tag]
            taken = [call for call in all_taken if call.tag == tag]
            for number, (one, two) in enumerate(zip(sent, taken, strict=False)):
                if (one.sizes, one.dtype) != (two.sizes, two.dtype):
                    yield (
                        f"message {number} from rank {rank} to rank {to} over {name} is sent as {one} and received as "
                        f"{two}\n  {one.where}\n  {two.where}"
                    )
                    break
            else:
                if len(sent) != len(taken):
                    extra = (sent if len(sent) > len(taken) else taken)[min(len(sent), len(taken))]
                    yield (
                        f"rank {rank} sends {len(sent)} messages with tag {tag} to rank {to} over {name}, which "
                        f"receives {len(taken)}\n  the first that is too many: {extra}\n  {extra.where}"
                    )


def _in_order(
    name: str, rank: int, members: Sequence[int], by_name: Mapping[int, Mapping[str, list[Call]]]
) -> Iterator[str]:
    """A message is received as it was sent, the first one first: nccl has no tags."""
    for to, sent, taken in _pairs(name, rank, members, by_name):
        for number, (one, two) in enumerate(zip(sent, taken, strict=False)):
            if one.tag != two.tag:
                yield (
                    f"message {number} from rank {rank} to rank {to} over {name} has tag {one.tag} where it is sent "
                    f"and {two.tag} where it is received: nccl has no tags, and gives it the wrong one\n  {one.where}\n"
                    f"  {two.where}"
                )
                break


def stuck(traces: Traces, *, in_order: bool = False) -> list[str]:
    """Play the calls of all ranks against each other; say where each waits if they do not come to an end.

    A collective waits until all traced members of its group are at it, a receiver for its message; a sender does not
    wait, as over gloo.

    Args:
        in_order: as over nccl, a group carries one message of a rank after the other: none goes before the one that
            was issued first has been received.
    """
    left = {rank: deque(c for c in calls if c.kind != "new_group") for rank, calls in traces.items()}
    sent: dict[tuple[str, int, int, int], int] = defaultdict(int)
    lines: dict[tuple[str, int], deque[int]] | None = defaultdict(deque) if in_order else None
    moved = True
    while moved:
        moved = False
        for rank, calls in left.items():
            while calls and _goes(calls[0], rank, left, sent, lines):
                moved = True
    waiting = {rank: calls[0] for rank, calls in left.items() if calls}
    return [f"rank {rank} waits in {call}\n    {call.where}" for rank, call in waiting.items()]


def _goes(
    call: Call,
    rank: int,
    left: Mapping[int, deque[Call]],
    sent: dict[tuple[str, int, int, int], int],
    lines: dict[tuple[str, int], deque[int]] | None,
) -> bool:
    ranks = call.group.ranks
    line = None if lines is None or call.group.name == _OF_THE_HOST else lines
    if call.kind == "send":
        if line is not None and ranks[call.peer] in left:
            line[call.group.name, rank].append(ranks[call.peer])
        else:
            sent[call.group.name, rank, ranks[call.peer], call.tag] += 1
    elif call.kind == "recv":
        origin = ranks[call.peer]
        if line is not None and origin in left:
            if line[call.group.name, rank] or list(line[call.group.name, origin])[:1] != [rank]:
                return False
            line[call.group.name, origin].popleft()
            left[rank].popleft()
            return True
        key = (call.group.name, origin, rank, call.tag)
        if origin in left and not sent[key]:
            return False
        sent[key] -= 1
    else:
        members = [member for member in ranks if member in left]
        heads = [left[member][0] if left[member] else None for member in members]
        if any(head is None or head.group != call.group or head.kind in _MESSAGES for head in heads):
            return False
        for member in members:
            if member != rank:
                left[member].popleft()
    left[rank].popleft()
    return True

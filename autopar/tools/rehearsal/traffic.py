"""Count the bytes that ranks send in a training step, by axis, inside of nodes and between them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autopar.distributed.trace import Call
from autopar.tools.planner.stage_costs import volume


class Traffic(NamedTuple):
    """Traffic of a rank over one axis in a training step.

    Attributes:
        calls: collectives and messages.
        bytes: that the rank sends, of the rank that sends most; a collective goes around a ring.
        between: those of them that go to another node, of the rank that sends most there.
    """

    calls: int
    bytes: int
    between: int


def traffic_of(
    traces: Mapping[int, Iterable[Call]], axes: Mapping[tuple[int, ...], str], gpus_per_node: int
) -> dict[str, Traffic]:
    """Return the traffic by axis; integers (chosen experts, numbers of tokens) and objects are left out.

    Args:
        axes: of the ranks of groups; others go by the group's name.
    """
    found: dict[str, Traffic] = {}
    for rank, calls in traces.items():
        number, given, away = Counter[str](), Counter[str](), Counter[str]()
        alike = Counter((call.group, call.kind, call.peer, call.bytes) for call in calls if _counts(call))
        for (group, kind, peer, size), times in alike.items():
            call = Call(kind, group, ((size,),), "uint8", peer=peer)
            axis = axes.get(group.ranks, group.name)
            number[axis] += times
            given[axis] += sent(call) * times
            away[axis] += round(sent(call) * times * _to_others(call, rank, gpus_per_node))
        for name, count in number.items():
            known = found.get(name, Traffic(0, 0, 0))
            found[name] = Traffic(*map(max, known, (count, given[name], away[name])))
    return found


def _counts(call: Call) -> bool:
    return call.carries_tensors and call.kind not in ("new_group", "recv")


def sent(call: Call) -> int:
    """Return the bytes that a rank sends for a collective over a ring, or a message."""
    ranks = len(call.group.ranks)
    if call.kind == "recv":
        return 0
    if call.kind == "send":
        return call.bytes
    return volume(call.kind, call.bytes * (ranks if call.kind in ("all_gather", "gather") else 1), ranks)


def _to_others(call: Call, rank: int, gpus_per_node: int) -> float:
    """Return the part of a call's bytes that this rank sends to another node."""
    ranks, node = call.group.ranks, rank // gpus_per_node
    if call.kind == "all_to_all":
        return sum(other // gpus_per_node != node for other in ranks) / max(len(ranks) - 1, 1)
    peer = call.peer if call.kind == "send" else (ranks.index(rank) + 1) % len(ranks)
    return float(ranks[peer] // gpus_per_node != node)


def speed_of(kind: str, ranks: Sequence[int], within: float, between: float, gpus_per_node: int) -> float:
    """Return the bytes a second of a rank in a collective over a group; each rank has a network card of its own.

    Args:
        within, between: bytes a second of a rank to one of its node, to another node.
    """
    nodes = Counter(rank // gpus_per_node for rank in ranks)
    if len(nodes) == 1:
        return within
    beside = max(nodes.values())
    if kind == "all_to_all":
        return min(within, between * (len(ranks) - 1) / (len(ranks) - beside))
    return min(within, between * beside)

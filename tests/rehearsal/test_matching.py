"""Planted faults in the traces of four ranks are found, with the ranks; processes that wait for each other."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar.tools.rehearsal.matching import blocked_calls, differences, waiting
from autopar.tools.rehearsal.trace import Call, Group
from tests.rehearsal.programs import BATCH, CASES, SEQUENCE, config_of

Traces = dict[int, list[Call]]
Change = Callable[[list[Call]], list[Call]]


@pytest.fixture(scope="module")
def traces() -> Traces:
    case = CASES["pp x tp"]
    with torch.device("meta"):
        model: Any = case.build()
    found = autopar.rehearse(model, config_of(case), 4, batch=BATCH, sequence=SEQUENCE)
    return {rank: [call for _, call in parts] for rank, parts in found.traces.items()}


def problems_of(traces: Traces) -> list[str]:
    found = list(differences(traces, lambda ranks: ranks))
    return found or blocked_calls(waiting(traces)) or blocked_calls(waiting(traces, in_order=True))


def at(kind: str, name: str, number: int, change: Callable[[list[Call], int], None]) -> Change:
    """Change one call: the ``number``-th of this kind over this axis."""

    def changed(calls: list[Call]) -> list[Call]:
        calls = list(calls)
        places = [n for n, call in enumerate(calls) if (call.kind, call.group.name) == (kind, name)]
        change(calls, places[number])
        return calls

    return changed


def put(**fields: Any) -> Callable[[list[Call], int], None]:
    def change(calls: list[Call], place: int) -> None:
        calls[place] = calls[place]._replace(**fields)

    return change


def skip(calls: list[Call], place: int) -> None:
    del calls[place]


def twice(calls: list[Call], place: int) -> None:
    calls.insert(place, calls[place])


def before_the_last(calls: list[Call], place: int) -> None:
    """Let a collective come before the one that is in front of it on its axis."""
    other = max(n for n in range(place) if calls[n].group == calls[place].group)
    calls[other], calls[place] = calls[place], calls[other]


SIZE = ((3, 16, 64),)
FAULTS: dict[str, Change] = {}
for number in (0, 1, 4, -1):  # in several places of the step and the evaluation
    FAULTS |= {
        f"skips all-reduce {number}": at("all_reduce", "tp", number, skip),
        f"one all-reduce more, {number}": at("all_reduce", "tp", number, twice),
        f"another size, {number}": at("all_reduce", "tp", number, put(sizes=SIZE)),
        f"another dtype, {number}": at("all_reduce", "tp", number, put(dtype="bfloat16")),
        f"another collective, {number}": at("all_reduce", "tp", number, put(kind="all_gather")),
    }
for kind in ("send", "recv"):
    for group, numbers in {"pp control": (0, 2, -1), "pp forward up": (0, -1)}.items():
        for number in numbers:
            where = f"over {group}, {number}"
            FAULTS |= {
                f"skips a {kind} {where}": at(kind, group, number, skip),
                f"one {kind} more {where}": at(kind, group, number, twice),
                f"another size of a {kind} {where}": at(kind, group, number, put(sizes=SIZE)),
                f"another tag of a {kind} {where}": at(kind, group, number, put(tag=4711)),
            }


def _reordered(calls: list[Call]) -> list[Call]:
    made = [n for n, call in enumerate(calls) if call.kind == "new_group"]
    calls = list(calls)
    calls[made[0]], calls[made[1]] = calls[made[1]], calls[made[0]]
    return calls


FAULTS |= {
    "skips the loss's all-gather": at("all_gather", "tp", 0, skip),
    "the loss's all-gather before an all-reduce": at("all_gather", "tp", 0, before_the_last),
    "another width of the loss": at("all_gather", "tp", 0, put(sizes=((7,),))),
    "a group less": at("new_group", "pp control", 0, skip),
    "a group of other ranks": at("new_group", "tp", 0, put(group=Group("tp", (0, 3)))),
    "groups in another order": _reordered,
}


def test_traces_match_as_they_are(traces: Traces) -> None:
    assert sorted(traces) == [0, 1, 2, 3]
    assert problems_of(traces) == []


def test_every_planted_fault_is_found_and_names_two_ranks(traces: Traces) -> None:
    assert len(FAULTS) >= 40
    missed, unnamed = [], []
    for name, change in FAULTS.items():
        rank = 3 if "loss" in name else 1
        try:
            planted = {**traces, rank: change(traces[rank])}
        except IndexError:
            rank = 3
            planted = {**traces, rank: change(traces[rank])}
        found = problems_of(planted)
        missed += [] if found else [name]
        named = {int(text) for text in re.findall(r"rank (\d)", "\n".join(found))}
        unnamed += [] if rank in named and len(named) > 1 else [f"{name}: {found[:1]}"]
    assert not missed and not unnamed


def test_ranks_that_wait_for_each_other_for_ever(traces: Traces) -> None:
    """Both stages receive before they send."""
    group = Group("pp control", (0, 1))
    send, recv = (Call(kind, group, ((4,),), "float32", peer=1) for kind in ("send", "recv"))
    first = [recv, send]
    second = [call._replace(peer=0) for call in first]
    assert list(differences({0: first, 1: second}, lambda ranks: ranks)) == []
    assert waiting({0: [send, recv], 1: [second[0], second[1]]}) == {}
    lines = [line.partition(" over")[0] for line in blocked_calls(waiting({0: first, 1: second}))]
    assert lines == ["rank 0 waits in recv from rank 1", "rank 1 waits in recv from rank 0"]

    group = Group("pp forward up", (0, 1))
    send, recv = (Call(kind, group, ((4,),), "float32", peer=1) for kind in ("send", "recv"))
    crossed = {0: [send, recv], 1: [call._replace(peer=0) for call in (send, recv)]}
    assert list(differences(crossed, lambda ranks: ranks)) == [] and waiting(crossed) == {}
    assert len(waiting(crossed, in_order=True)) == 2
    down = group._replace(name="pp backward down")
    apart = {0: [send, recv._replace(group=down)], 1: [call._replace(peer=0, group=down) for call in (send, recv)]}
    apart[1] = [apart[1][0], recv._replace(peer=0)]
    assert waiting(apart, in_order=True) == {}

    tp, dp = Group("tp", (0, 1)), Group("dp", (0, 1))
    one, two = (Call("all_reduce", group, ((4,),), "float32", where=f"train.py:{7}") for group in (tp, dp))
    assert list(differences({0: [one, two], 1: [two, one]}, lambda ranks: ranks)) == []
    lines = blocked_calls(waiting({0: [one, two], 1: [two, one]}))
    assert lines == [
        "rank 0 waits in all_reduce over tp [4] float32\n    train.py:7",
        "rank 1 waits in all_reduce over dp [4] float32\n    train.py:7",
    ]


def test_messages_in_another_order_and_rows_that_nobody_takes() -> None:
    group = Group("pp forward up", (0, 1))
    first, second = (Call("send", group, ((4,),), "float32", peer=1, tag=tag, where=f"a.py:{tag}") for tag in (1, 2))
    taken = [call._replace(kind="recv", peer=0, where=f"b.py:{call.tag}") for call in (second, first)]
    [line] = differences({0: [first, second], 1: taken}, lambda ranks: ranks)
    assert line == (
        "message 0 from rank 0 to rank 1 over pp forward up is sent with tag 1 and received with tag 2: "
        "NCCL ignores tags, so the receiver gets the wrong message\n  a.py:1\n  b.py:2"
    )
    control = [call._replace(group=group._replace(name="pp control")) for call in (first, second, *taken)]
    assert list(differences({0: control[:2], 1: control[2:]}, lambda ranks: ranks)) == [], "over gloo on GPUs, too"

    group = Group("ep", (0, 1))
    call = Call("all_to_all", group, ((4, 8),), "float32", ((3, 1), (3, 2)), where="experts.py:71")
    other = call._replace(splits=((2, 2), (2, 2)))
    [line] = differences({0: [call], 1: [other]}, lambda ranks: ranks)
    assert line.startswith("collective 0 over ep [0, 1]: rank 0 sends 1 rows to rank 1, which expects 2\n")
    assert list(differences({0: [call], 1: [call._replace(splits=((2, 2), (1, 2)))]}, lambda ranks: ranks)) == []


def test_the_call_with_the_fewest_ranks_is_named_first() -> None:
    given = Group("world", (0, 1, 2)), ((3,),), "float32"
    one, other = (Call(kind, *given, where="a.py:1") for kind in ("barrier", "gather"))
    assert blocked_calls({0: one, 1: other, 2: one}) == [
        "rank 1 waits in gather over world [3] float32\n    a.py:1",
        "ranks 0, 2 wait in barrier over world [3] float32\n    a.py:1",
    ]
    assert blocked_calls({}) == []

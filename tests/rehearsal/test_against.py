"""The traces of a job against its rehearsal: which rank went another way, where, and how far it came."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.distributed.trace import Call, Group
from autopar.tools.cli.rehearse import ways_in_words as in_words
from autopar.tools.rehearsal.against import ways

TP, PP = Group("tp", (0, 1)), Group("pp", (0, 2))


def call(kind: str, size: int = 8, group: Group = TP, peer: int = -1, where: str = "train.py:1") -> Call:
    return Call(kind, group, ((size,),), "float32", peer=peer, where=where)


REDUCE, GATHER, NUMBER = call("all_reduce"), call("all_gather"), call("all_reduce", 1)
STEP = [REDUCE, GATHER, REDUCE]
EVALUATION = [REDUCE, GATHER]
PARTS = [
    ("initialize", call("broadcast", peer=0)),
    *(("step", c) for c in STEP),
    *(("evaluation", c) for c in EVALUATION),
]


def told(own: Sequence[Call], rank: int = 0) -> list[str]:
    return [str(way) for way in ways({rank: own}, {0: PARTS}, lambda rank: 0)]


def test_steps_and_evaluations_in_any_order() -> None:
    begin = [call("broadcast", peer=0)]
    assert told([*begin, *STEP, *EVALUATION, *STEP]) == ["rank 0 over tp: 2 steps and 1 evaluation as rehearsed"]
    assert told([]) == ["rank 0 over tp: nothing as rehearsed"]
    assert told([*STEP, REDUCE]) == ["rank 0 over tp: 1 step as rehearsed, and 1 of 3 calls of the next"]


def test_numbers_integers_and_other_sizes_are_no_other_way() -> None:
    other = [NUMBER, call("all_reduce", 9), NUMBER, call("all_gather", 3)._replace(), call("all_reduce", 5)]
    objects = call("broadcast", 80)._replace(dtype="uint8", control=True)
    assert told([objects, *other]) == ["rank 0 over tp: 1 step as rehearsed"]


def test_the_call_that_is_another_one_is_told_with_both_places() -> None:
    wrong = call("reduce_scatter", 4, where="train.py:40")
    assert told([*STEP, REDUCE, wrong], rank=1) == [
        "rank 1 over tp: 1 step as rehearsed, then call 1 of the next is reduce_scatter over tp [4] float32\n"
        "    train.py:40\n"
        "  where the rehearsal has all_gather over tp [8] float32\n"
        "    train.py:1"
    ]


def test_tensors_as_bytes_are_compared_and_headers_of_messages_are_not() -> None:
    as_bytes = [one._replace(dtype="uint8") for one in STEP]
    parts = [("step", one) for one in as_bytes]
    (way,) = ways({0: [*as_bytes, *STEP[:1]]}, {0: parts}, lambda rank: 0)
    assert way.wrong is not None and way.done["step"] == 1
    assert told([call("send", 80, peer=1)._replace(dtype="uint8"), *STEP]) == ["rank 0 over tp: 1 step as rehearsed"]


def test_a_group_that_the_rehearsal_lacks_is_another_way() -> None:
    stray = call("all_reduce", 64, group=Group("world", (0, 1, 2, 3)), where="train.py:41")
    assert told([*STEP, stray]) == [
        "rank 0 over world: all_reduce over world [64] float32\n    train.py:41\n"
        "  where the rehearsal has no call over world",
        "rank 0 over tp: 1 step as rehearsed",
    ]


def test_the_command_tells_ranks_of_one_way_together_and_also_how_far_others_came() -> None:
    stray = call("all_reduce", 64, group=Group("world", (0, 1, 2, 3)), where="train.py:41")
    parts = [("step", one) for one in STEP]
    traces = {rank: [*STEP, *STEP[: rank % 2], stray] for rank in range(4)}
    lines = in_words(ways(traces, {0: parts}, lambda rank: 0))
    assert lines == [
        "4 ranks, 0 first, over world: all_reduce over world [64] float32\n    train.py:41\n"
        "  where the rehearsal has no call over world",
        "2 ranks, 0 first, over tp: 1 step as rehearsed",
        "2 ranks, 1 first, over tp: 1 step as rehearsed, and 1 of 3 calls of the next",
    ]
    strays = [stray._replace(group=Group(f"own {number}", (0, 1))) for number in range(7)]
    lines = in_words(ways({1: strays}, {0: parts}, lambda rank: 0))
    assert (
        len(lines) == 7 and lines[0].startswith("rank 1 over own ") and lines[5] == "... and 2 more: --json lists all"
    )


def test_partners_are_as_far_away_as_those_of_who_stands_for_a_rank() -> None:
    ring = Group("cp", (0, 1, 2, 3))
    parts = [("step", call("send", group=ring, peer=1)), ("step", call("recv", group=ring, peer=3))]
    right = [call("send", group=ring, peer=3), call("recv", group=ring, peer=1)]
    (way,) = ways({2: right}, {0: parts}, lambda rank: 0)
    assert way.wrong is None and way.done["step"] == 1
    (way,) = ways({2: [right[0], call("recv", group=ring, peer=0)]}, {0: parts}, lambda rank: 0)
    assert way.wrong is not None and (way.at, way.of) == (1, 2)


def test_groups_one_by_one_those_that_went_wrong_first() -> None:
    parts = [("step", REDUCE), ("step", call("send", group=PP, peer=1))]
    found = ways({0: [REDUCE, call("recv", group=PP, peer=1)]}, {0: parts}, lambda rank: 0)
    assert [(way.group, way.wrong is None) for way in found] == [("pp", False), ("tp", True)]


def test_on_gloo_one_group_carries_messages_of_all_ways() -> None:
    up, down = (Group(f"pp {way}", (0, 2)) for way in ("forward up", "backward down"))
    parts = [("step", call("send", group=up, peer=1)), ("step", call("recv", group=down, peer=1))]
    control = [one._replace(group=PP._replace(name="pp control")) for _, one in parts]
    (way,) = ways({0: control}, {0: parts}, lambda rank: 0)
    assert str(way) == "rank 0 over pp control: 1 step as rehearsed"
    assert len(ways({0: [one for _, one in parts]}, {0: parts}, lambda rank: 0)) == 2

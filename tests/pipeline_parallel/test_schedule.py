"""Schedules as lists: complete, in an order that can run, and within the memory they promise."""

from __future__ import annotations

import pytest

from autopar.pipeline_parallel.schedule import SCHEDULES, Action, forwards, make_schedule, peak
from autopar.policy.stages import rank_of_stage

CHUNKS = {"interleaved": 2, "zbv": 2}


def _layout(name: str, ranks: int) -> tuple[int, ...]:
    return rank_of_stage(ranks, CHUNKS.get(name, 1), folded=name == "zbv")


def _play(lists: list[list[Action]], stages: int) -> None:
    """Run the lists as the engine does: an action waits until its input is there. AssertionError if all wait."""
    done: set[Action] = set()
    places = [0] * len(lists)
    while any(place < len(row) for place, row in zip(places, lists, strict=True)):
        moved = False
        for rank, row in enumerate(lists):
            while places[rank] < len(row) and _ready(row[places[rank]], done, stages):
                done.add(row[places[rank]])
                places[rank] += 1
                moved = True
        assert moved, f"deadlock at {[row[p : p + 1] for row, p in zip(lists, places, strict=True)]}"


def _ready(action: Action, done: set[Action], stages: int) -> bool:
    kind, stage, m = action
    if kind == "F":
        return stage == 0 or Action("F", stage - 1, m) in done
    if kind == "W":
        return Action("I", stage, m) in done
    return Action("F", stage, m) in done and (stage == stages - 1 or Action(kind, stage + 1, m) in done)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 13])
def test_every_action_once_and_no_deadlock(name: str, ranks: int, microbatches: int) -> None:
    rank_of = _layout(name, ranks)
    lists = make_schedule(name, rank_of, microbatches)
    kinds = "FIW" if name in ("zero-bubble", "zbv") else "FB"
    expected = {Action(k, s, m) for k in kinds for s in range(len(rank_of)) for m in range(microbatches)}
    actions = [action for row in lists for action in row]
    assert len(actions) == len(expected)
    assert set(actions) == expected
    assert all(rank_of[action.stage] == rank for rank, row in enumerate(lists) for action in row)
    _play(lists, len(rank_of))
    _play(forwards(rank_of, microbatches), len(rank_of))


def test_the_textbook_lists() -> None:
    def shown(name: str, ranks: int, microbatches: int) -> list[str]:
        lists = make_schedule(name, _layout(name, ranks), microbatches)
        return [" ".join(f"{a.kind}{a.microbatch}" for a in row) for row in lists]

    assert shown("1f1b", 2, 4) == ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert shown("gpipe", 2, 2) == ["F0 F1 B0 B1", "F0 F1 B0 B1"]
    assert shown("zero-bubble", 2, 2)[1] == "F0 I0 F1 I1 W0 W1"


def test_activations_in_memory() -> None:
    """1F1B keeps as many as stages follow, however many micro-batches there are; GPipe keeps all."""
    for ranks in (2, 4, 8):
        for microbatches in (ranks, 4 * ranks):
            rank_of = _layout("1f1b", ranks)
            one = [peak(row) for row in make_schedule("1f1b", rank_of, microbatches)]
            assert one == [ranks - rank for rank in range(ranks)]
            assert [peak(row) for row in make_schedule("gpipe", rank_of, microbatches)] == [microbatches] * ranks
            assert max(peak(row) for row in make_schedule("zero-bubble", rank_of, microbatches)) <= ranks
            folded = make_schedule("zbv", _layout("zbv", ranks), microbatches)
            assert max(peak(row) for row in folded) <= 2 * ranks

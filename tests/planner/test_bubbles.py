"""Schedules with times, against the formulas of the papers that they come from."""

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.config.sections import PipelineConfig
from autopar.pipeline_parallel.schedule import Action, make_schedule
from autopar.plan.stages import rank_of_stage
from autopar.tools.planner.estimate import peak_of, play, step_time

EQUAL = {"F": Fraction(1), "I": Fraction(1), "W": Fraction(1), "B": Fraction(2)}


def _played(name: str, ranks: int, microbatches: int, times: dict[str, Fraction] = EQUAL) -> Any:
    config = PipelineConfig.of({"schedule": name}, ranks, [])
    rank_of = rank_of_stage(ranks, config.chunks, folded=config.folded)
    share = Fraction(1, config.chunks)  # a stage of so many of a rank's layers
    lists = make_schedule(name, rank_of, microbatches)
    return play(lists, len(rank_of), lambda action: times[action.kind] * share, Fraction(0))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_bubble_is_that_of_narayanan(name: str, chunks: int, rounds: int, ranks: int) -> None:
    """Narayanan et al., 2021, 2.2: (p - 1) / (v m) of the time without bubble."""
    assert _played(name, ranks, rounds * ranks) - 3 * rounds * ranks == Fraction(ranks - 1, chunks) * 3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_waits_a_third_as_long(ranks: int) -> None:
    """Qi et al., 2023: (p - 1)(F + I - W), with equal times a third of 1F1B's."""
    assert _played("zero-bubble", ranks, 4 * ranks) - 12 * ranks == ranks - 1
    times = {"F": Fraction(2), "I": Fraction(3), "W": Fraction(2), "B": Fraction(5)}
    assert _played("zero-bubble", ranks, 4 * ranks, times) - 7 * 4 * ranks == (ranks - 1) * (2 + 3 - 2)


def test_stages_with_other_times_and_messages() -> None:
    lists = make_schedule("1f1b", (0, 1), 4)

    def slow_last(action: Action) -> float:
        return (2.0 if action.stage else 1.0) * (2 if action.kind == "B" else 1)

    assert play(lists, 2, slow_last) == 1 + 24 + 2  # the second rank works through
    assert play(lists, 2, slow_last, message=0.5) == 1 + 0.5 + 24 + 0.5 + 2


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("microbatches", [37, 64, 96])
def test_many_microbatches_take_as_long_as_if_all_were_played(name: str, microbatches: int) -> None:
    played: list[int] = []
    time = step_time(lambda m: played.append(m) or _played(name, 4, m), microbatches, 4)
    assert time == _played(name, 4, microbatches) and max(played) < microbatches


def test_lists_that_cannot_be_run() -> None:
    with pytest.raises(ValueError, match="the schedule deadlocks: 2 actions wait for each other"):
        play([[Action("B", 0, 0), Action("F", 0, 0)]], 1, lambda action: 1.0)


@pytest.mark.parametrize("every", [0, 1, 2])  # every so many-th stage is recomputed
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_the_most_bytes_at_a_time(name: str, every: int) -> None:
    config = PipelineConfig.of({"schedule": name}, 4, [])
    rank_of = rank_of_stage(4, config.chunks, folded=config.folded)
    drawn = random.Random(0)
    for _ in range(3):
        costs: Any = [_bytes(drawn, every > 0 and stage % every == 0) for stage in range(len(rank_of))]
        for actions in make_schedule(name, rank_of, 8):
            *held, kept = peak_of(actions, costs)
            assert (sum(held), kept) == _needed(actions, costs)


def _bytes(drawn: random.Random, recomputed: bool) -> SimpleNamespace:
    names = ("kept", "late", "gradients", "logits", "late_logits", "forward_work", "backward_work")
    return SimpleNamespace(**{name: drawn.randrange(100) for name in names}, recomputed=recomputed)


def _needed(actions: Sequence[Action], costs: Any) -> tuple[int, int]:
    """Return the most bytes at one time, and the most that wait for a backward."""
    waiting, late, works, kept = Counter[int](), Counter[int](), 0, 0
    for kind, stage, _ in actions:
        if kind == "W" and costs[stage].recomputed:
            continue
        waiting[stage] += kind == "F"
        waits = sum(costs[s].kept * n for s, n in waiting.items()) + sum(costs[s].late * n for s, n in late.items())
        work = costs[stage].forward_work if kind == "F" else costs[stage].backward_work
        works = max(works, waits + work + sum(costs[s].gradients * n for s, n in late.items()))
        kept = max(kept, waits)
        waiting[stage] -= kind in ("B", "I")
        late[stage] += 0 if costs[stage].recomputed else (kind == "I") - (kind == "W")
    return works, kept

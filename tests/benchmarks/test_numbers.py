"""Medians, ratios, tables and charts of the benchmarks, from made-up numbers."""

import pytest

from benchmarks import tables
from benchmarks.rounds import Taken, Turns, Variant, interleave, ratio, summary


def test_a_ratio_is_the_median_of_neighbours_not_of_the_whole() -> None:
    assert ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0]) == 2.0
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


def test_the_summary_takes_the_slowest_rank_and_the_mean_cpu() -> None:
    samples = {
        "plain": [[Taken(0.4, 0.4), Taken(0.0, 0.0)], [Taken(0.6, 0.5), Taken(0.0, 0.0)]],
        "fast": [[Taken(0.1, 0.1), Taken(0.2, 0.3)], [Taken(0.3, 0.2), Taken(0.1, 0.2)]],
    }
    found = summary(samples, alone=["plain"], base="plain")
    assert found["fast"] == {
        "ms": 250.0, "p10_ms": 200.0, "min_ms": 200.0, "cpu_ms": 200.0, "rounds": 2, "speedup": 2.0
    }  # fmt: skip
    assert found["plain"]["cpu_ms"] == 450.0 and found["plain"]["speedup"] == 1.0


def test_variants_take_turns_and_the_warm_up_is_left_out(tmp_path) -> None:
    seen: list[str] = []
    works = {name: Variant(lambda name=name: seen.append(name), name == "a") for name in ("a", "b")}
    samples = interleave(works, 3, Turns(str(tmp_path)), warm_up=1)
    assert "".join(seen) == "baabbaab"
    assert {name: len(rows) for name, rows in samples.items()} == {"a": 3, "b": 3}


STEP = {
    "row": "llama",
    "kind": "decode",
    "size": {"hidden": 8},
    "parameters": 1_500_000,
    "collectives": "35 allreduce, 34.00 MiB",
    "missing": {"DTensor": "not available: no Conv1D"},
    "variants": {
        "plain": {"ms": 40.0, "p10_ms": 39.0, "cpu_ms": 40.0, "speedup": 1.0, "tokens_per_s": 25.0},
        "autopar": {"ms": 22.0, "p10_ms": 21.0, "cpu_ms": 23.0, "speedup": 1.8, "tokens_per_s": 45.0},
        "limit": {"ms": 20.0, "p10_ms": 19.0, "cpu_ms": 20.0, "speedup": 2.0, "tokens_per_s": 50.0},
        "collectives, gloo": {"ms": 2.0, "p10_ms": 1.0, "cpu_ms": 1.0, "speedup": 20.0, "tokens_per_s": 500.0},
    },
}


def test_the_table_of_steps_says_what_share_of_the_limit_is_reached() -> None:
    text = tables.step_table({"rows": [STEP]})
    assert "| autopar | 22 | 21 | 23 | 1.8 | 0.9 | 45 |" in text
    assert "| collectives, gloo | 2 | 1 | 1 | - | - | - |" in text
    assert "`DTensor`: not available: no Conv1D" in text and "35 allreduce, 34.00 MiB" in text

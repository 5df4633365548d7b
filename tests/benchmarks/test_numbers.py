"""Medians, ratios, tables and charts of the benchmarks, from made-up numbers."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks import tables
from benchmarks.chart import bar_chart
from benchmarks.pipeline import efficiency
from benchmarks.rounds import Taken, Turns, Variant, interleave, quantile, ratio, summary


def test_a_ratio_is_the_median_of_neighbours_not_of_the_whole() -> None:
    assert ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0]) == 2.0
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


def test_quantiles_are_measured_values() -> None:
    assert quantile([5.0, 1.0, 4.0, 2.0, 3.0], 0.1) == 1.0
    assert quantile([5.0, 1.0, 4.0, 2.0, 3.0], 0.5) == 3.0
    assert quantile([5.0, 1.0, 4.0, 2.0, 3.0], 1.0) == 5.0


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


def test_efficiency_is_relative_to_the_textbook() -> None:
    ones, twos = [[Taken(9.0, 0), Taken(0, 0)]] * 2, [[Taken(4.0, 0), Taken(5.0, 0)], [Taken(10.0, 0), Taken(5.0, 0)]]
    found = efficiency(ones, twos, microbatches=4, ranks=2)  # 2 * 4 / 5 = 1.6 times as fast
    assert found["of textbook, fastest"] == round(9 / 5 / 1.6, 3)
    assert found["of textbook"] == round((9 / 5 + 9 / 10) / 2 / 1.6, 3)


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


def test_the_chart_is_xml_with_a_bar_for_each_variant() -> None:
    root = ET.fromstring(tables.step_chart({"rows": [STEP]}))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["llama, decode, autopar: 1.8", "llama, decode, limit: 2"]


def test_bars_are_as_long_as_their_values_and_text_is_escaped() -> None:
    root = ET.fromstring(bar_chart("a < b", {"g & h": {"x": 1.0, "y": 3.0}}, "s", mark=2.0))
    bars = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if len(element)]
    widths = [float(bar.get("width", "0")) for bar in bars]
    assert widths[1] == pytest.approx(3 * widths[0], rel=1e-2)
    assert "a < b" in "".join(root.itertext())
    ET.fromstring(bar_chart("nothing", {}, "s"))

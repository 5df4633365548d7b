"""The sweep of ``verify``: verdicts from reports, rows that are kept, and one type on ranks that stay up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from autopar.tools.verification.report import Report, Row
from benchmarks.verified_policies import known, row_of, sizes, summary, verdict

pytestmark = pytest.mark.tier("sweep")


def _report(*rows: Row) -> Report:
    return Report("M", 1, "policy m", {"tp": 2}, "float32", "cpu", rows)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([Row("forward", "logits", True, 1e-7, 1e-4)], "holds"),
        ([Row("forward", "left out", None, note="the plain model raises")], "differs"),  # nothing was compared
        ([Row("forward", "logits", True), Row("step", "weight", False, 1.0, 1e-3)], "differs"),
        ([Row("plan", "UnsupportedModelError", False, note="cannot be split")], "refused"),
        ([Row("forward", "raises ConfigError", False, note="one micro-batch")], "refused"),
        ([Row("forward", "raises RuntimeError", False, note="size of tensor a")], "raises"),
        ([Row("backward", "raises PipelineError", False, note="rank 1, it failed: ValueError: 15 and 30")], "raises"),
        ([Row("backward", "raises PipelineError", False, note="rank 1, it failed: ConfigError: no")], "refused"),
        ([Row("backward", "raises PipelineError", False, note="rank 1 did not answer")], "raises"),
    ],
)
def test_verdicts(rows: list[Row], expected: str) -> None:
    assert verdict(_report(*rows))[0] == expected


def test_meshes_are_read() -> None:
    assert sizes("tp2xpp4") == {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    with pytest.raises(argparse.ArgumentTypeError, match="'2x2' is no mesh"):
        sizes("2x2")


def test_rows_of_earlier_runs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"type": "gpt2", "mesh": "tp2", "verdict": "raises", "why": "first", "seconds": 1},
        {"type": "gpt2", "mesh": "tp2", "verdict": "holds", "why": "", "seconds": 1},  # later: it counts
        {"type": "dia", "mesh": "pp2", "verdict": "refused", "why": "one\nmicro-batch", "seconds": 2},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert set(known(path, None)) == {("tp2", "gpt2"), ("pp2", "dia")}
    assert set(known(path, ["refused"])) == {("tp2", "gpt2")} and known(path, []) == {}
    text = summary(rows[1:])
    assert "| pp2 | 1 | 0 | 0 | 0 | 0 | 1 | 0 | 2 |" in text and "pp2 refused  dia: one micro-batch" in text


def test_a_type_is_verified_on_ranks_that_stay_up(tmp_path: Path) -> None:
    path = tmp_path / "now"
    row = row_of("gpt2", "tp2", ["forward"], 120.0, path)
    assert (row["verdict"], row["model"], row["batches"]) == ("holds", "GPT2LMHeadModel", "made") and not path.exists()
    assert row_of("lxmert", "tp2", ["forward"], 120.0, path)["batches"] == "of the tests"


def test_a_type_that_does_not_end_takes_its_ranks_down(tmp_path: Path) -> None:
    assert row_of("gpt2", "tp2", None, 0.05, tmp_path / "now")["verdict"] == "hangs"
    assert row_of("gpt2", "tp2", ["forward"], 120.0, tmp_path / "now")["verdict"] == "holds"

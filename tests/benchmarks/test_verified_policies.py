"""The sweep of ``verify``: verdicts from reports, rows that are kept, and one type on ranks that stay up."""

from pathlib import Path

import pytest

from autopar.tools.verification.report import Row, VerificationReport
from benchmarks.verified_policies import row_of, verdict

pytestmark = pytest.mark.tier("sweep")


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
    report = VerificationReport("M", 1, "policy m", {"tp": 2}, "float32", "cpu", tuple(rows))
    assert verdict(report)[0] == expected


def test_a_type_is_verified_on_ranks_that_stay_up(tmp_path: Path) -> None:
    path = tmp_path / "now"
    row = row_of("gpt2", "tp2", ["forward"], 120.0, path)
    assert (row["verdict"], row["model"], row["batches"]) == ("holds", "GPT2LMHeadModel", "made") and not path.exists()
    assert row_of("lxmert", "tp2", ["forward"], 120.0, path)["batches"] == "of the tests"


def test_a_type_that_does_not_end_takes_its_ranks_down(tmp_path: Path) -> None:
    assert row_of("gpt2", "tp2", None, 0.05, tmp_path / "now")["verdict"] == "hangs"
    assert row_of("gpt2", "tp2", ["forward"], 120.0, tmp_path / "now")["verdict"] == "holds"

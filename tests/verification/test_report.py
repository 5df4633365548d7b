"""The pure parts of verify: distances, the first of a list of events that differs, and reports."""

import json
import math

import pytest
import torch

from autopar.errors import VerificationError
from autopar.tools.verification.diagnosis import Event, first_difference
from autopar.tools.verification.outputs import Distance, measure
from autopar.tools.verification.report import Culprit, RankMemory, Row, Traffic, VerificationReport

ONE = torch.tensor([1.0, -4.0, 2.0])


def test_a_distance_is_a_part_of_the_largest_element() -> None:
    assert measure(ONE + torch.tensor([0.0, 0.0, 0.4]), ONE).relative == pytest.approx(0.1)
    assert measure(ONE, ONE) == Distance(0.0)
    assert measure(ONE * 1e-9 + 1e-10, ONE * 1e-9).relative == pytest.approx(0.025, rel=1e-3)
    assert measure(ONE * 1e-9 + 1e-10, ONE * 1e-9, floor=1.0).relative == pytest.approx(1e-10, rel=1e-3)


def test_what_cannot_be_compared_has_a_reason() -> None:
    assert measure(ONE[:2], ONE) == Distance(math.inf, "expected shape [3], got [2]")
    assert measure(torch.tensor([1, 2]), torch.tensor([1, 3])).problem == "1 of 2 elements differ"
    assert measure(torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0])).problem == "1 of 2 elements are not finite"
    masked = torch.tensor([-math.inf, 1.0])
    assert measure(masked.clone().add_(torch.tensor([0.0, 1e-3])), masked).relative == pytest.approx(1e-3, rel=1e-2)


def event(path: str, kind: str, verdict: bool | None, *readers: str) -> Event:
    return Event(path, kind, verdict, readers=readers)


def test_the_first_output_that_differs_is_the_innermost_modules() -> None:
    events = [
        event("h.0.attn.q", "output", True),
        event("h.0.attn.o", "output", False),
        event("h.0.attn", "output", False),
        event("h.0", "output", False),
    ]
    found = first_difference(events)
    assert found is not None and found.module == "h.0.attn.o"
    assert found.since == ("h.0.attn.q",)
    assert first_difference(events[:1]) is None


def test_a_wrong_input_is_made_by_the_module_around() -> None:
    events = [
        event("h.0.attn.q", "output", True),
        event("h.0.attn.norm", "output", None),
        event("h.0.attn.o", "input", False),
        event("h.0.attn.o", "output", False),
    ]
    found = first_difference(events)
    assert found is not None and found.module == "h.0.attn"
    assert found.since == ("h.0.attn.q", "h.0.attn.norm", "h.0.attn.o")


def test_a_wrong_gradient_is_made_by_who_reads_the_output() -> None:
    one = first_difference([event("h.0.norm", "gradient", False, "h.0.mlp.up")])
    several = first_difference([event("h.0.norm", "gradient", False, "h.0.attn.q", "h.0.attn.k")])
    parameter = first_difference([event("h.0.norm", "gradient", True), event("h.0.norm", "parameter", False)])
    assert one is not None and one.module == "h.0.mlp.up"
    assert several is not None and several.module == "h.0.attn"
    assert parameter is not None and parameter.module == "h.0.norm"


def report(*rows: Row, culprit: Culprit | None = None) -> VerificationReport:
    memory = RankMemory(0, 1000, 2000, 3_500_000)
    return VerificationReport("Model", 1234, "policy p (p.yaml:2)", {"tp": 2, "pp": 1, "dp": 1}, "float32", "cpu", rows,
                              culprit, (memory,), memory, (Traffic("all-reduce", 4, 5_000),), 1.0)  # fmt: skip


GOOD = Row("forward", "logits", True, 2e-7, 1e-4)
BAD = Row("backward", "worst gradient", False, 0.25, 1e-4, "h.0.q.weight", rank=1, failing=3, of=9)


def test_a_report_holds_if_something_does_and_nothing_does_not() -> None:
    assert report(GOOD).ok and report(GOOD, Row("generate", "tokens", None)).ok
    assert not report(Row("generate", "tokens", None)).ok and not report(GOOD, BAD).ok
    assert report(GOOD).raise_if_failed().ok


def test_the_error_names_what_how_much_and_where() -> None:
    culprit = Culprit("h.0.q", "the output of h.0.q differs by 2.5e-01", ("p.yaml:7: h.0.q: column",), ("h.0.q",))
    with pytest.raises(VerificationError) as raised:
        report(GOOD, *[BAD] * 12, culprit=culprit).raise_if_failed()
    lines = str(raised.value).splitlines()
    assert lines[0] == "Model on tp 2 differs from the reference model: 12 of 13 comparisons fail."
    assert lines[1] == (
        "  backward: worst gradient (h.0.q.weight, 3 of 9 differ) differs by 2.5e-01, allowed is 1e-04 on rank 1"
    )
    assert lines[-3:] == [
        "  ... and 6 more",
        "  first difference: the output of h.0.q differs by 2.5e-01",
        "    p.yaml:7: h.0.q: column",
    ]
    assert len(lines) <= 10


def test_a_report_is_a_table_and_plain_data() -> None:
    infinite = Row("save", "merged checkpoint", False, math.inf, 0.0, "a.weight", "is missing", 0)
    text = str(report(GOOD, BAD, infinite))
    shown = ["Model: 1,234 parameters", "tp 2 x pp 1", "2.0e-07", "h.0.q.weight, 3 of 9 differ (rank 1)", "3.5 MB"]
    shown += ["reference", "all-reduce", "5 KB", "merged checkpoint: a.weight", "is missing", "some checks fail"]
    for part in shown:
        assert part in text
    assert "all checks pass" in str(report(GOOD))
    data = json.loads(json.dumps(report(GOOD, BAD, infinite).to_dict()))
    assert data["ok"] is False and [row["difference"] for row in data["rows"]] == [2e-7, 0.25, None]
    assert data["traffic"] == [{"kind": "all-reduce", "calls": 4, "bytes": 5000}]

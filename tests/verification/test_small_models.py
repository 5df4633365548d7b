"""The parts of verify without ranks: small models and batches, distances, differences and reports."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import ConvNextConfig, ConvNextModel, PretrainedConfig, PreTrainedModel

import autopar
from autopar.errors import VerificationError
from autopar.tools.commands.models import of_task
from autopar.tools.verification.batches import halves_agree, make_batches
from autopar.tools.verification.diagnosis import Event, first_difference
from autopar.tools.verification.outputs import Distance, measure, size_of_loss, total_loss
from autopar.tools.verification.report import Culprit, RankMemory, Row, Traffic, VerificationReport
from autopar.tools.verification.session import _Dtypes
from autopar.tools.verification.small_models import build_small

LARGEST = 5_000_000  # parameters
TAKEN = yaml.safe_load(Path(__file__).with_name("small_models.yaml").read_text())


@pytest.mark.parametrize(("model_type", "taken"), TAKEN.items())
def test_a_small_model_runs_with_the_batches_made_for_it(model_type: str, taken: list[str]) -> None:
    head = of_task(model_type, None)
    assert head.kind is not None and head.config is not None
    model = build_small(head.kind, head.config)
    assert sum(parameter.numel() for parameter in model.parameters()) < LARGEST
    with torch.no_grad():
        batches = make_batches(model, count=2, rows=2, length=16)
        assert len(batches) == 2 and {*taken} <= set(batches[0])
        assert torch.isfinite(total_loss(model.eval()(**batches[1])))


class OddConfig(PretrainedConfig):
    """``dim`` has a name that is known, ``n_q`` has not: small sizes do not fit each other."""

    model_type = "odd_names"

    def __init__(self, dim: int = 48, n_q: int = 6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dim, self.n_q = dim, n_q


class Odd(PreTrainedModel):
    """Has ``n_q`` heads of ``dim // n_q`` features."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        assert config.dim % config.n_q == 0
        self.out = nn.Linear(config.dim, config.dim)
        self.post_init()


def test_what_cannot_be_built_or_run_is_named() -> None:
    assert build_small(Odd, OddConfig(n_q=8)).out.in_features == 32
    with pytest.raises(autopar.ConfigError, match="Odd cannot be built small: AssertionError"):
        build_small(Odd, OddConfig())

    head = of_task("lxmert", None)
    assert head.kind is not None and head.config is not None
    with pytest.raises(autopar.ConfigError) as raised:
        make_batches(build_small(head.kind, head.config), count=1, rows=2, length=16)
    message = str(raised.value)
    assert "LxmertForPreTraining does not run with generated inputs: " in message
    assert "The inputs were input_ids [2, 16]" in message and "Pass batches=[...] to autopar.verify." in message


def test_sizes_of_losses_dtypes_images_and_coupled_samples() -> None:
    output = {"last_hidden_state": torch.tensor([[1.0, 1.0, 1.0, 1.0]])}
    assert abs(total_loss(output).item()) < size_of_loss(output)
    assert size_of_loss({"loss": torch.tensor(2.0), **output}) == 0.0

    with _Dtypes() as dtypes:
        (torch.ones(2, dtype=torch.float64).float() + 1).double()
    assert dtypes.found == {torch.float32, torch.float64}

    # Patches of 4 pixels, which three stages shrink by 8: two of them are left in each direction.
    assert build_small(ConvNextModel, ConvNextConfig()).config.image_size == 64

    batch = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}
    assert halves_agree(Coupled(False), batch) and not halves_agree(Coupled(True), batch)


class Coupled(torch.nn.Module):
    """Its logits take the mean of the batch away."""

    def __init__(self, coupled: bool) -> None:
        super().__init__()
        self.coupled = coupled

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": x - x.mean(0) if self.coupled else x + 1}


ONE = torch.tensor([1.0, -4.0, 2.0])


def test_a_distance_is_a_part_of_the_largest_element_or_has_a_reason() -> None:
    assert measure(ONE + torch.tensor([0.0, 0.0, 0.4]), ONE).relative == pytest.approx(0.1)
    assert measure(ONE, ONE) == Distance(0.0)
    assert measure(ONE * 1e-9 + 1e-10, ONE * 1e-9).relative == pytest.approx(0.025, rel=1e-3)
    assert measure(ONE * 1e-9 + 1e-10, ONE * 1e-9, floor=1.0).relative == pytest.approx(1e-10, rel=1e-3)

    assert measure(ONE[:2], ONE) == Distance(math.inf, "expected shape [3], got [2]")
    assert measure(torch.tensor([1, 2]), torch.tensor([1, 3])).problem == "1 of 2 elements differ"
    assert measure(torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0])).problem == "1 of 2 elements are not finite"
    masked = torch.tensor([-math.inf, 1.0])
    assert measure(masked.clone().add_(torch.tensor([0.0, 1e-3])), masked).relative == pytest.approx(1e-3, rel=1e-2)


def event(path: str, kind: str, verdict: bool | None, *readers: str) -> Event:
    return Event(path, kind, verdict, readers=readers)


def test_the_first_difference_names_the_module_that_made_it() -> None:
    wrong = (event(path, "output", False) for path in ("h.0.attn.o", "h.0.attn", "h.0"))
    events = [event("h.0.attn.q", "output", True), *wrong]
    found = first_difference(events)
    assert found is not None and found.module == "h.0.attn.o"
    assert found.since == ("h.0.attn.q",)
    assert first_difference(events[:1]) is None

    events = [
        event("h.0.attn.q", "output", True),
        event("h.0.attn.norm", "output", None),
        event("h.0.attn.o", "input", False),
        event("h.0.attn.o", "output", False),
    ]
    found = first_difference(events)
    assert found is not None and found.module == "h.0.attn"
    assert found.since == ("h.0.attn.q", "h.0.attn.norm", "h.0.attn.o")

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


def test_a_report_is_an_error_a_table_and_plain_data() -> None:
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

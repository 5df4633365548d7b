"""verify with experts that replicas share: all of it holds, and what is wrong with them is found."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.config import ParallelConfig
from autopar.features.experts import layers as experts
from autopar.tools.verification.report import VerificationReport
from autopar.tools.verification.session import Session
from autopar.tools.verification.verify import checks_of, verify_on_ranks
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import llama


def mixtral() -> Any:
    """Five experts: 3 and 2 on two ranks, 2, 1, 1 and 1 on four."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    more = {"vocab_size": 131, "intermediate_size": 24, "num_experts_per_tok": 2, "num_local_experts": 5}
    return MixtralForCausalLM(MixtralConfig(**sizes, **more, initializer_range=0.2))


def verified(config: dict[str, Any], checks: Any = None, change: Any = None, rows: int = 4) -> VerificationReport:
    batches = language_batches(131, count=2, batch=rows)
    return verify_on_ranks(mixtral(), ParallelConfig.parse(config), None, batches, checks_of(checks), change)


@pytest.mark.parametrize(
    "config",
    [{"ep": 4}, {"ep": 2, "zero": {"stage": 1}}, {"tp": 2, "ep": 4}, {"pp": 2, "ep": 2}],
    ids=["ep 4", "ep 2, ZeRO-1", "tp 2, ep 4", "pp 2, ep 2"],
)
@pooled(world_size=4, timeout=300)
def test_all_of_it_holds(config: dict[str, Any]) -> None:
    report = verified(config)
    assert report.ok, str(report)
    assert report.mesh["ep"] == config["ep"] and report.mesh["dp"] == 4 // config.get("tp", config.get("pp", 1))
    held = {row.check for row in report.rows if row.holds}
    assert held >= {"weights", "forward", "generate", "save", "reshard", "backward", "step"}


def _other_weights(session: Session) -> None:
    if session.mpu.ep.rank == 1:
        own = session.parallel.model.layers[1].mlp.experts.gate_up_proj
        own.data.mul_(1.1)


@pooled(world_size=2)
def test_what_is_wrong_with_experts_is_found() -> None:
    report = verified({"ep": 2}, change=_other_weights)
    assert not report.ok and report.rows[0].check == "weights" and report.rows[0].holds is False
    assert report.rows[0].name == "model.layers.1.mlp.experts.gate_up_proj"
    assert report.culprit is not None and report.culprit.module == "model.layers.1.mlp.experts"
    with patch.object(experts._ScaledGradient, "apply", lambda x, factor: x):  # a sum, not a mean
        report = verified({"ep": 2}, ["backward"])
    failed = [row for row in report.rows if row.holds is False]
    assert [(row.check, row.what) for row in failed] == [("backward", "worst gradient")]
    assert ".experts." in failed[0].name and failed[0].failing == 4 and failed[0].difference > 0.5


@pooled(world_size=2)
def test_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(autopar.ConfigError, match="must be a multiple of the 2 replicas; got 3 in batch 0"):
        verified({"ep": 2}, rows=3)


@pytest.mark.tier("all")
def test_as_many_replicas_are_started_as_share_experts() -> None:
    report = autopar.verify(mixtral(), {"ep": 2}, checks=["forward"])
    assert report.ok and report.mesh == {"tp": 1, "pp": 1, "dp": 2, "ep": 2}


def test_the_command() -> None:
    with patch("autopar.tools.verification.verify.run_on_ranks", lambda work, world, **_: _Empty(work, world)):
        result = CliRunner().invoke(app, ["verify", "mixtral", "--ep", "4", "--tp", "2", "--json"])
        assert result.exit_code == 0, result.output
        assert '"world": 4' in result.stdout and '"ep": 4' in result.stdout
    refused = CliRunner().invoke(app, ["verify", "mixtral", "--ep", "2", "--config", "c.yaml"])
    assert "is not supported with --tp, --pp, --cp, --ep, --sp" in refused.stderr
    with pytest.raises(autopar.ConfigError, match="expert_parallel_size=2 must be 1 or a multiple of"):
        autopar.verify(llama(), {"ep": 2}, data_parallel_size=3)


class _Empty:
    """The report of no processes."""

    ok = True

    def __init__(self, work: Any, world: int) -> None:
        self.config, self.world = work.args[1], world

    def to_dict(self) -> dict[str, int]:
        return {"world": self.world, "ep": self.config.expert_parallel_size}

"""Verify dropout over sequence shards, heads and stages, and experts that replicas share."""

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.config import ParallelConfig
from autopar.features.experts import layers as experts
from autopar.tools.verification.checks import Draw, Place, wrong_draws
from autopar.tools.verification.report import VerificationReport
from autopar.tools.verification.session import Session
from autopar.tools.verification.verify import checks_of, verify_on_ranks
from tests.features.experts.mixtures import mixtral
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2, llama

TP, PP, CP = ({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "context"))
COMPARED = {"random draws", "generator states after the forward", "outputs of all ranks"}


def _gpt2() -> Any:
    return gpt2(embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)


def _llama() -> Any:
    return llama(attention_dropout=0.1)


def _t5() -> Any:
    """It drops what comes behind the last block, where ranks still have rows."""
    sizes = {"d_model": 24, "d_kv": 4, "d_ff": 37, "num_layers": 2, "num_heads": 6}
    config = T5Config(vocab_size=131, **sizes, dropout_rate=0.1, decoder_start_token_id=0)
    return T5ForConditionalGeneration._from_config(config)


def _verified(
    build: Any, sizes: dict[str, Any], change: Callable[[Session], None] | None = None, **more: Any
) -> VerificationReport:
    torch.manual_seed(0)
    model = build()
    batches = language_batches(131, count=1)
    if model.config.is_encoder_decoder:
        batches = [{**batch, "decoder_input_ids": batch["input_ids"].clone()} for batch in batches]
    config = ParallelConfig.parse({"model_parallelism": sizes, **more})
    checks = [check for check in checks_of(("dropout",)) if check != "weights"]
    return verify_on_ranks(model, config, None, batches, checks, change)


def _holds(build: Any, sizes: dict[str, Any], **more: Any) -> None:
    report = _verified(build, sizes, **more)
    compared = {row.what: row.holds for row in report.rows if row.check == "dropout"}
    assert all(compared.values()) and compared.keys() >= COMPARED, f"{build.__name__}, {sizes}: {report}"


@pooled(world_size=2)
def test_rows_are_drawn_apart_and_all_else_alike() -> None:
    for method in ("gather", "ulysses"):
        for build in (_gpt2, _llama, _t5):
            _holds(build, {**CP, "context_parallel_method": method})


@pytest.mark.tier("sweep")
@pooled(world_size=4)
def test_with_stages_and_heads() -> None:
    for build in (_gpt2, _llama, _t5):
        for mesh in ({**CP, **PP}, {**CP, **TP}, {**TP, **PP}):
            _holds(build, mesh)


@pooled(world_size=2)
def test_recomputed_blocks_draw_again_what_they_drew() -> None:
    recomputed = {"activation_checkpointing": {"enable": True}}
    for sizes in (TP, PP, CP):
        report = _verified(_gpt2, sizes, **recomputed)
        assert report.ok and "recomputed draws" in {row.what for row in report.rows}, str(report)

    def forgets(session: Session) -> None:
        for module in session.parallel.modules():
            if "_gradient_checkpointing_func" in vars(module):
                plain: Any = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
                module._gradient_checkpointing_func = plain

    report = _verified(_gpt2, TP, forgets, **recomputed)
    assert [row.what for row in report.rows if row.holds is False] == ["recomputed draws"], str(report)


@pooled(world_size=4)
def test_stages_whose_own_stream_is_the_same_for_all_rows_are_found() -> None:
    with patch("autopar.tensor_parallel.regions.followers", []):
        report = _verified(_gpt2, {**CP, **PP})
    assert report.culprit is not None and report.culprit.module.startswith("transformer.h.1."), str(report)
    assert "draws identical numbers on ranks with different shards" in report.culprit.found


def _everyone(states: str, shape: tuple[int, ...] = (2, 4)) -> dict[Place, list[Draw]]:
    """Draws of a part, by ranks in the order of (cp, tp): one letter for each rank's state."""
    places = [Place(0, cp, tp) for cp in range(2) for tp in range(2)]
    return {place: [Draw("drop", shape, state, 0.5)] for place, state in zip(places, states, strict=True)}


@pytest.mark.parametrize("states", ["abcd", "aabb", "abab"])
def test_parts_on_both_axes_or_on_one_of_them_are_drawn_apart(states: str) -> None:
    assert not list(wrong_draws([Draw("drop", (4, 4), "", 0.5)], _everyone(states)))


@pytest.mark.parametrize("states", ["aaaa", "aaab", "abba"])
def test_parts_that_some_ranks_draw_alike_are_found(states: str) -> None:
    assert list(wrong_draws([Draw("drop", (4, 4), "", 0.5)], _everyone(states))) == [
        ("drop", "draws identical numbers on ranks with different shards [2, 4]")
    ]


def test_what_ranks_hold_alike_must_be_drawn_alike_and_as_the_plain_model_does() -> None:
    whole, same = Draw("drop", (2, 4), "", 0.5), _everyone("aaaa")
    assert not list(wrong_draws([whole], same))
    for everyone, text in (
        (_everyone("aaba"), "draws different numbers on ranks with the same activation"),
        ({p: [draws[0]._replace(rate=0.1)] for p, draws in same.items()}, "has a dropout rate of 0.1, expected 0.5"),
        ({p: [] if p.cp else draws for p, draws in same.items()}, "draws 1, 1, 0, 0 times"),
        ({p: [] for p in same}, "draws 0, 0, 0, 0 times on the ranks, 1 times in the refer"),
    ):
        assert next(wrong_draws([whole], everyone))[1].startswith(text)
    three = {place: draws * 3 for place, draws in same.items()}
    text = "draws 3, 3, 3, 3 times on the ranks, 2 times in the reference model"
    assert next(wrong_draws([whole, whole], three))[1] == text
    runs = {place: draws * 2 for place, draws in _everyone("abcd").items()}  # attention over two runs of rows
    assert not list(wrong_draws([whole], runs))


def five_experts() -> Any:
    """3 and 2 of them on two ranks, 2, 1, 1 and 1 on four."""
    return mixtral(5, vocab_size=131).float()


def verified(config: dict[str, Any], checks: Any = None, change: Any = None, rows: int = 4) -> VerificationReport:
    batches = language_batches(131, count=2, batch=rows)
    return verify_on_ranks(five_experts(), ParallelConfig.parse(config), None, batches, checks_of(checks), change)


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
        session.parallel.model.layers[1].mlp.experts.gate_up_proj.data.mul_(1.1)


@pooled(world_size=2)
def test_what_is_wrong_with_experts_is_found() -> None:
    report = verified({"ep": 2}, change=_other_weights)
    assert not report.ok and report.rows[0].check == "weights" and report.rows[0].holds is False
    assert report.rows[0].name == "model.layers.1.mlp.experts.gate_up_proj"
    assert report.culprit is not None and report.culprit.module == "model.layers.1.mlp.experts"
    with patch.object(experts._ScaledGradient, "apply", lambda x, axis, factor: x):  # a sum, not a mean
        report = verified({"ep": 2}, ["backward"])
    failed = [row for row in report.rows if row.holds is False]
    assert [(row.check, row.what) for row in failed] == [("backward", "worst gradient")]
    assert ".experts." in failed[0].name and failed[0].failing == 4 and failed[0].difference > 0.5

    report = verified({"ep": 2}, rows=3)  # replicas with different numbers of samples
    assert report.ok, str(report)


def test_the_command_starts_as_many_ranks_as_share_experts() -> None:
    with patch("autopar.tools.verification.verify.run_on_ranks", side_effect=autopar.ConfigError("started")) as start:
        result = CliRunner().invoke(app, ["verify", "mixtral", "--ep", "4", "--tp", "2"])
    assert result.stderr == "error: started\n"
    work, world = start.call_args.args
    assert world == 4 and work.args[1].expert_parallel_size == 4
    with pytest.raises(autopar.ConfigError, match="expert_parallel_size=2 must be 1 or a multiple of"):
        autopar.verify(llama(), {"ep": 2}, data_parallel_size=3)

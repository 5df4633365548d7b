"""Dropout over rows of sequences, heads and stages: the plain model is given the ranks' masks; and what is found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import T5Config, T5ForConditionalGeneration

from autopar.config import ParallelConfig
from autopar.tools.verification.dropout_masks import DrawnMask
from autopar.tools.verification.mask_parts import Place, kept_too_few_or_many, sites_of, whole_mask, wrong_parts
from autopar.tools.verification.ranks import checks_of, verify_on_ranks
from autopar.tools.verification.report import Report
from autopar.tools.verification.session import Session
from tests.parity import language_batches
from tests.pool import pooled
from tests.small import gpt2, llama

TP, PP, CP = ({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "context"))
OUTPUTS = "outputs, with the ranks' draws"


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
) -> Report:
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
    compared = {row.what: row.holds for row in report.rows}
    assert all(compared.values()) and OUTPUTS in compared, f"{build.__name__}, {sizes}: {report}"


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_the_plain_model_drops_what_the_ranks_do() -> None:
    for method in ("gather", "ulysses"):
        for build in (_gpt2, _llama, _t5):
            _holds(build, {**CP, "context_parallel_method": method})


@pooled(world_size=4)
def test_with_stages_and_heads() -> None:
    for build in (_gpt2, _llama, _t5):
        for mesh in ({**CP, **PP}, {**CP, **TP}, {**TP, **PP}):
            _holds(build, mesh)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
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
    with patch("autopar.tensor_parallel.regions.follow_streams", lambda follow: None):
        report = _verified(_gpt2, {**CP, **PP})
    assert report.culprit is not None and report.culprit.module.startswith("transformer.h.1."), str(report)
    assert "draws alike on context-parallel ranks, which hold different parts" in report.culprit.found


def _drawn(kept: torch.Tensor, state: str, rate: float = 0.5, **more: Any) -> DrawnMask:
    return DrawnMask("drop", tuple(kept.shape), state, rate, kept, **more)


def test_masks_are_put_together_from_heads_on_both_axes() -> None:
    whole = torch.rand(2, 6, 4, 4, generator=torch.Generator().manual_seed(0)) > 0.5
    heads = {(0, 0): slice(0, 2), (0, 1): slice(2, 4), (1, 0): slice(4, 5), (1, 1): slice(5, 6)}  # (tp, cp)
    parts = {Place(0, cp, tp): [_drawn(whole[:, own], f"{tp}{cp}")] for (tp, cp), own in heads.items()}
    [site] = sites_of([_drawn(whole, "")], parts, lambda length: None, 2)
    assert not wrong_parts(site) and torch.equal(whole_mask(site), whole)
    alike = {place: [draw._replace(state="same") for draw in draws] for place, draws in parts.items()}
    [site] = sites_of([_drawn(whole, "")], alike, lambda length: None, 2)
    assert wrong_parts(site) == "draws alike on context-parallel ranks, which hold different parts [2, 2, 4, 4]"
    [site] = sites_of([_drawn(whole, "")], {Place(0, 0, 0): []}, lambda length: None, 2)
    assert wrong_parts(site) == "the ranks draw 0 times, the plain model 1 times"


def test_heads_of_all_samples_in_one_dim() -> None:
    whole = torch.rand(2, 4, 3, 3, generator=torch.Generator().manual_seed(0)) > 0.5  # samples, heads
    parts = {Place(0, cp, 0): [_drawn(whole[:, 2 * cp : 2 * cp + 2].flatten(0, 1), f"{cp}")] for cp in range(2)}
    [site] = sites_of([_drawn(whole.flatten(0, 1), "")], parts, lambda length: None, 2)
    assert not wrong_parts(site) and torch.equal(whole_mask(site), whole.flatten(0, 1))


def test_what_ranks_hold_alike_must_be_drawn_alike() -> None:
    one, other = torch.tensor([True, False]), torch.tensor([False, True])
    [site] = sites_of([_drawn(one, "")], {Place(0, 0, 0): [_drawn(one, "a")], Place(0, 1, 0): [_drawn(other, "b")]},
                      lambda length: None, 1)  # fmt: skip
    assert wrong_parts(site) == "draws differently on context-parallel ranks, which hold the same activation"
    many = _drawn(torch.ones(10_000, dtype=torch.bool), "a", 0.1)
    [site] = sites_of([many], {Place(0, 0, 0): [many]}, lambda length: None, 1)
    assert kept_too_few_or_many([site]) > 30

"""Modules that need all rows, sharded by heads: which ones are, that each rank computes its own, and equality."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.context_parallel import heads
from autopar.dry_run.context_parallel import plan_rows
from autopar.policy.match import find_policy
from benchmarks.traffic import record
from tests.context_parallel.test_exactness import made, padded_left, sizes
from tests.context_parallel.test_traffic import sent
from tests.parity import check, close, language_batches
from tests.pool import pooled
from tests.random_models import Case, build

SHARED = {
    "heads of their own sizes": ("bloom", "BloomForCausalLM"),
    "biases that later blocks read": ("t5", "T5ForConditionalGeneration"),
    "channels, and a norm over them": ("bamba", "BambaForCausalLM"),
    "latents that all heads read": ("deepseek_v32", "DeepseekV32ForCausalLM"),
}


def shared(model_type: str, head: str, ranks: int, **options: bool) -> set[bool]:
    model = build(Case(model_type, head), 6, 3)
    plan = plan_rows(model, find_policy(model), "", ranks, **options)
    return {where.heads is not None for where in plan.whole.values()}


@pytest.mark.parametrize("name", SHARED)
def test_what_the_policy_shards_is_shared_out(name: str) -> None:
    assert shared(*SHARED[name], 2) == {True}
    assert shared(*SHARED[name], 2, by_heads=False) == {False}


def test_what_it_does_not_shard_is_computed_whole() -> None:
    assert shared("recurrent_gemma", "RecurrentGemmaForCausalLM", 2) == {False}  # sums inside of its own module
    assert shared("bloom", "BloomForCausalLM", 7) == {False}  # 6 heads


def test_all_readers_of_a_bias_have_its_heads_or_none_has(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = heads._only_cuts

    def only_cuts(plan: Any, module: nn.Module) -> bool:
        return plain(plan, module) and not plan.path.startswith("decoder.block.1.layer.0")

    monkeypatch.setattr(heads, "_only_cuts", only_cuts)
    assert shared(*SHARED["biases that later blocks read"], 2) == {False}


@pytest.mark.tier("test", only=("heads of their own sizes",))
@pytest.mark.parametrize("name", SHARED)
@pooled(world_size=2)
def test_it_equals_the_plain_model(name: str) -> None:
    """On ranks with 4 and 2 of 6 heads, with recomputed blocks."""
    case = functools.partial(made, *SHARED[name], 6, 3)
    config = {**sizes(2), "activation_checkpointing": {"enable": True}}
    check(case, language_batches(131, count=2, seq=7), 1, config=config, step=False).mpu.destroy()


def adapted(model_type: str, head: str, targets: list[str], dropout: float = 0.0) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=dropout)
    torch.manual_seed(3)
    return peft.get_peft_model(made(model_type, head, 6, 3), config)


@pytest.mark.parametrize(
    ("model_type", "head", "targets"),
    [
        ("bloom", "BloomForCausalLM", ["query_key_value", "dense"]),
        ("t5", "T5ForConditionalGeneration", ["q", "v", "o"]),
        ("bamba", "BambaForCausalLM", ["in_proj", "o_proj", "down_proj"]),
    ],
)
@pooled(world_size=2)
def test_adapters_inside_have_the_heads_of_their_layers(model_type: str, head: str, targets: list[str]) -> None:
    config = {**sizes(2), "activation_checkpointing": {"enable": True}}
    plain = adapted(model_type, head, targets).train()
    model = autopar.initialize(copy.deepcopy(plain), config).train()
    (state,) = {each._autopar_rows for each in model.modules() if hasattr(each, "_autopar_rows")}
    assert {where.heads is not None for where in state.plan.whole.values()} == {True}
    for batch in language_batches(131, count=2, seq=7):
        losses = [each(**batch).loss for each in (plain, model)]
        close(losses[1], losses[0], "loss")
        for loss in losses:
            loss.backward()
    autopar.average_gradients(model)
    trained = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    for name, gradient in trained.items():
        close(model.get_parameter(name).grad, gradient, name)
    for each in (plain, model):
        each.merge_adapter()
    close(model(**batch).loss, plain(**batch).loss, "merged")


@pooled(world_size=2)
def test_adapters_that_drop_inputs_are_computed_whole() -> None:
    model = adapted("bloom", "BloomForCausalLM", ["dense"], 0.1).base_model.model
    assert {where.heads for where in plan_rows(model, find_policy(model), "", 2).whole.values()} == {None}


@pooled(world_size=2)
def test_each_rank_computes_its_heads_of_all_rows() -> None:
    model = autopar.initialize(made("bloom", "BloomForCausalLM"), sizes(2))
    attention = model.transformer.h[0].self_attention
    seen: list[tuple[int, ...]] = []
    autopar.local_hooks(attention.dense)  # others would have all heads
    attention.dense.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    batch = padded_left(16)
    model(**batch)
    width = attention.dense.in_features
    assert seen == [(len(batch["input_ids"]), 16, width // 2)]
    assert attention.dense.weight.shape == (width, width) and attention.num_heads == 4
    assert isinstance(attention.dense.weight, nn.Parameter)
    model(batch["input_ids"], use_cache=True)  # not cut: every rank has all heads
    assert seen[1] == (len(batch["input_ids"]), 16, width)


@pooled(world_size=4)
def test_four_ranks_and_beside_tensor_parallelism() -> None:
    batches = [padded_left(16), *language_batches(131, count=1, seq=33)]
    model = functools.partial(made, "bloom", "BloomForCausalLM", 6)
    check(model, batches, 1, config=sizes(4), step=False).mpu.destroy()
    check(model, batches, 2, config=sizes(2, tensor_parallel_size=2), step=False).mpu.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@pooled(world_size=2)
def test_steps_with_sharded_states(stage: int) -> None:
    plain, model = (made("bamba", "BambaForCausalLM").train() for _ in range(2))
    reference, optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, model))
    model, optimizer = autopar.initialize(model, {**sizes(2), "zero": {"stage": stage}}, optimizer=optimizer)
    engine = model
    if stage < 3:
        group = model.mpu.get_data_parallel_group(with_context_parallel=True)
        engine = DistributedDataParallel(model, process_group=group)
    for step in range(3):
        batch = language_batches(131, count=1, seq=7 + step, seed=step)[0]
        for each, its in ((plain, reference), (engine, optimizer)):
            each(**batch).loss.backward()
            its.step()
            its.zero_grad()
    weights = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        held: Any = weights[name]
        close(held.full_tensor() if stage == 3 else held.data, parameter.data, f"{name} after three steps")


@pooled(world_size=2)
def test_a_gradient_that_is_not_summed_is_seen() -> None:
    """Behind the row-parallel layer each rank has the gradients of its rows only."""
    plain, heads.copy = heads.copy, lambda x, axis: x
    try:
        with pytest.raises(AssertionError, match="off by"):
            model = functools.partial(made, "bloom", "BloomForCausalLM")
            check(model, language_batches(131, count=1, seq=8), 1, config=sizes(2), step=False)
    finally:
        heads.copy = plain


@pooled(world_size=2)
def test_it_sends_what_the_page_says() -> None:
    """All-gather and reduce-scatter in front of the module, two all-reduces behind it."""
    model = autopar.initialize(made("bloom", "BloomForCausalLM"), sizes(2))
    ids = torch.arange(3 * 32).view(3, 32)
    batch = {"input_ids": ids, "labels": ids}

    def step() -> None:
        model(**batch).loss.backward()

    step()
    found = [each for each in record(step) if each.dtype.is_floating_point]
    rows, hidden, ranks = 3 * 32 // 2, model.config.hidden_size, 2
    halves = 2 * (2 * rows * hidden) * 4  # hidden states, and the residual that this attention is given
    around = [each for each in found if each.name != "allreduce"]
    sums = [each for each in found if each.name == "allreduce"]
    assert [each.bytes for each in sums] == [3 * 32 * hidden * 4] * 4  # in two blocks, forward and backward
    assert sent(around, ranks) == 2 * halves + 2 * rows * 4  # two blocks, and the loss

"""Sequence parallelism: rows of the sequence between the regions of blocks, against the plain model."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.dinov2.modeling_dinov2 import Dinov2DropPath

import autopar
from autopar.config import ParallelConfig
from autopar.distributed.collectives import even_layout
from autopar.errors import ConfigError
from tests.data_parallel.test_zero import OPTIMIZERS, train
from tests.exchange import everyones, raises_everywhere, same_random_states
from tests.features.context_parallel.test_exactness import made, padded_left
from tests.features.experts.mixtures import compare
from tests.harness.worlds import pooled
from tests.parity import check, close, language_batches, whole
from tests.pipeline_parallel.oracle import check_pipeline
from tests.random_models import build, cases
from tests.small import gpt2, llama

IDS = torch.arange(14).view(2, 7)


def sizes(tp: int, **more: Any) -> dict[str, Any]:
    return {"model_parallelism": {"tensor_parallel_size": tp, "sequence_parallel": True, **more}}


bert = functools.partial(made, "bert", "BertForMaskedLM", 6, 3)
t5 = functools.partial(made, "t5", "T5ForConditionalGeneration", 6, 3)


def batches_of(length: int) -> list[dict[str, Any]]:
    """Two micro-batches of different lengths, padded on the right and on the left."""
    return [*language_batches(131, count=1, seq=length), padded_left(length + 1)]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_ragged_lengths_are_those_of_the_plain_model() -> None:
    for length, make in ((7, gpt2), (16, bert), (33, llama)):
        check(make, batches_of(length), 2, config=sizes(2)).mpu.destroy()


@pooled(world_size=4)
def test_four_ranks_stages_and_replicas() -> None:
    check(gpt2, batches_of(3), 4, config=sizes(4)).mpu.destroy()  # the first is whole, of the second each has one

    for schedule, make in (("zero-bubble", lambda: gpt2(n_layer=4)), ("1f1b", t5)):
        config = {**sizes(2, pipeline_parallel_size=2), "pipeline": {"schedule": schedule, "num_microbatches": 2}}
        check_pipeline(make, batches_of(7), tp=2, pp=2, **config).mpu.destroy()

    compare(lambda: llama().double(), {"zero": {"stage": 3}, **sizes(2)})[0].mpu.destroy()


@pooled(world_size=2)
def test_rows_of_encoders_and_decoders_and_modules_that_mix_rows() -> None:
    batch = {**batches_of(7)[0], "decoder_input_ids": torch.arange(10).view(2, 5)}
    batch["labels"] = batch["decoder_input_ids"] + 1
    check(t5, [batch, *batches_of(16)], 2, config=sizes(2)).mpu.destroy()

    model = check(_shifted, language_batches(131), 2, config=sizes(2))
    plan = model._autopar.features["sequence_parallel"]
    assert set(plan.wholes) == {f"model.layers.{n}.post_attention_layernorm" for n in range(2)}


@pooled(world_size=2)
def test_rows_between_the_regions_until_it_is_undone() -> None:
    model = autopar.initialize(gpt2(), sizes(2))
    seen: dict[str, list[int]] = {}
    names = ("transformer.drop", "transformer.h.0.ln_1", "transformer.h.0.attn.c_proj", "transformer.h.1.ln_2")
    for name in (*names, "transformer.h.1.mlp.c_fc", "transformer.ln_f"):
        autopar.local_hooks(model.get_submodule(name))
        model.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: [args[0].shape[1], out.shape[1]]})
        )
    model(IDS, labels=IDS).loss.backward()
    own = even_layout(7, 2).local_size(dist.get_rank())
    assert own == 4 - dist.get_rank()
    assert list(seen.values()) == [[7, 7], [own, own], [7, own], [own, own], [7, 7], [7, 7]], seen

    plain, model = gpt2(), gpt2()
    kinds = [type(module) for module in model.modules()]
    autopar.deparallelize(autopar.initialize(model, sizes(2)))
    assert [type(module) for module in model.modules()] == kinds
    assert not [name for module in model.modules() for name in vars(module) if "rows" in name]
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pooled(world_size=2)
def test_checkpointed_frozen_and_evaluated() -> None:
    def frozen() -> Any:
        model = llama()
        model.model.layers[0].input_layernorm.weight.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(False)
        return model

    def evaluates(plain: Any, parallel: Any) -> None:
        for model in (plain, parallel):
            model.eval()
        with torch.no_grad():
            ours, theirs = (model(IDS, output_hidden_states=True) for model in (parallel, plain))
        for number, (mine, theirs_) in enumerate(zip(ours.hidden_states, theirs.hidden_states, strict=True)):
            close(mine, theirs_, f"hidden states {number}")
        settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        tokens = [model.generate(IDS, attention_mask=torch.ones_like(IDS), **settings) for model in (plain, parallel)]
        assert torch.equal(*tokens)
        for model in (plain, parallel):
            model.train()

    config = {**sizes(2), "activation_checkpointing": {}}
    check(frozen, batches_of(7), 2, config=config, first=evaluates).mpu.destroy()
    check(gpt2, batches_of(7), 2, config=config).mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_experts_that_tokens_travel_to() -> None:
    case = next(case for case in cases("mixtral") if case.head.endswith("ForCausalLM"))

    def with_routers() -> Any:
        model = build(case, 6, 3)
        model.config.output_router_logits = True  # for the loss that balances experts
        return model

    for config in (sizes(2), sizes(2, expert_parallel_size=2)):
        check(with_routers, batches_of(7), 2, config=config).mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_replicas_under_ddp_and_a_sharded_optimizer() -> None:
    for zero in ({"enable": False}, {"stage": 1}):
        model, *_ = train(2, llama, OPTIMIZERS["adamw"], 2, zero=zero, **sizes(2))
        model.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_copy_has_rows_of_its_own() -> None:
    model: Any = autopar.initialize(llama(), sizes(2))
    both = [model, copy.deepcopy(model)]
    losses = [each(IDS, labels=IDS).loss for each in both]  # the second begins before the first is differentiated
    for loss in losses:
        loss.backward()
    for (name, parameter), copied in zip(model.named_parameters(), both[1].parameters(), strict=True):
        assert torch.equal(parameter.grad, copied.grad), name
    found = [{id(each.rows_state) for each in one.modules() if hasattr(each, "rows_state")} for one in both]
    assert [len(each) for each in found] == [1, 1] and not found[0] & found[1]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_each_rank_draws_its_own_mask_for_its_rows_and_recomputes_it() -> None:
    rates = {"attn_pdrop": 0.3, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    ids = torch.arange(16).view(2, 8)
    gradients = []
    for section in ({}, {"activation_checkpointing": {}}):
        model = autopar.initialize(gpt2(**rates), {**sizes(2), **section}).train()
        masks: dict[str, torch.Tensor] = {}
        model.transformer.drop.register_forward_hook(lambda _, a, out, m=masks: m.update(before=(out == 0).float()))
        dropout = model.transformer.h[0].attn.resid_dropout
        autopar.local_hooks(dropout)
        dropout.register_forward_hook(lambda _, a, out, m=masks: m.update(rows=(out == 0).float()))
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        for name, alike in (("before", True), ("rows", False)):
            assert torch.equal(*everyones(masks[name])) is alike and masks[name].any(), name
        gradients.append(whole(model, lambda parameter: parameter.grad))  # replicated ones are equal
        same_random_states()
        model.mpu.destroy()
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient, name, 1e-6)


@pooled(world_size=2)
def test_paths_are_dropped_for_whole_samples() -> None:
    case = next(case for case in cases("dinov2") if case.head == "Dinov2Model")
    model = build(case, 6, 3)
    model.encoder.layer[1].drop_path = Dinov2DropPath(0.5)
    parallel = autopar.initialize(model, sizes(2)).train()
    assert parallel._autopar.features["sequence_parallel"].wholes == ("encoder.layer.1.drop_path",)
    seen: list[torch.Tensor] = []
    parallel.encoder.layer[1].drop_path.register_forward_hook(
        lambda _, args, out: seen.append(out.abs().sum((1, 2)) > 0)
    )
    for seed in range(6):
        torch.manual_seed(seed)
        parallel(torch.randn(4, 3, 32, 32))
    kept = torch.stack(seen).float()  # [forwards x 2, batch]
    assert torch.equal(*everyones(kept)) and 0 < kept.mean() < 1


class Shifted(nn.Module):
    """A norm that mixes each row with the one before."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.weight = plain.weight
        self.mixed = nn.Parameter(torch.full((), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return (x + self.mixed * before) * self.weight


def _shifted() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.post_attention_layernorm = Shifted(layer.post_attention_layernorm)
    return model


@pooled(world_size=2)
def test_blocks_that_mix_rows_or_do_not_run_are_refused() -> None:
    model = build(next(case for case in cases("swin") if case.head.endswith("ForImageClassification")), 6, 3)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match="sequence_parallel is not supported with compile"):
        ParallelConfig.parse({**sizes(2), "compile": {"enable": True}})
    with raises_everywhere(ConfigError, "sequence_parallel does not fit SwinForImageClassification: ", "blocks.0"):
        autopar.initialize(model, sizes(2))
    assert [type(module) for module in model.modules()] == kinds
    assert not hasattr(model, "mpu")

    ids = torch.arange(7)[None]
    plain, model = gpt2(n_layer=3), autopar.initialize(gpt2(n_layer=3), sizes(2))
    for each in (plain, model):
        _leave_out(each.transformer.h[0])
    close(model(ids).logits, plain(ids).logits, "logits")
    model = autopar.initialize(llama(), sizes(2))
    _leave_out(model.model.layers[1])
    with raises_everywhere(ConfigError, "the last block of LlamaModel did not run in this forward"):
        model(ids)


def _leave_out(block: nn.Module) -> None:
    kind = type(block)
    block.__class__ = type(kind.__name__, (kind,), {"__call__": lambda self, x, *args, **kwargs: x})

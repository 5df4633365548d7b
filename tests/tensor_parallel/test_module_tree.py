"""Modules, parameters and forwards that a user changes: refused where a shard would be taken for the whole."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

import autopar
from autopar.errors import ConfigError, ConsistencyError
from autopar.plan.make_plan import make_plan
from autopar.plan.matching import check_forwards
from autopar.policy.match import find_policy
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2, llama, parallel

IDS = torch.arange(10).view(2, 5)


class _LoRA(nn.Module):
    """An adapter around a linear layer, as many write it."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


def _adapter(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = _LoRA(attention.q_proj)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an adapter": (_adapter, "2 parameters were added to LlamaForCausalLM after autopar.initialize"),
    "a new head": (lambda m: setattr(m, "lm_head", nn.Linear(24, 131, bias=False)), "lm_head.weight"),
    "spectral_norm": (lambda m: parametrizations.spectral_norm(m.model.layers[0].mlp.gate_proj), "gate_proj"),
    "weight_norm": (
        lambda m: parametrizations.weight_norm(m.model.layers[0].mlp.up_proj),
        "up_proj.parametrizations.weight.original",
    ),
    "pruning": (
        lambda m: prune.l1_unstructured(m.model.layers[0].mlp.down_proj, "weight", 0.5),
        "model.layers.0.mlp.down_proj of LlamaForCausalLM, a RowParallelLinear since",
    ),
    "a whole weight": (lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.randn(131, 24))), "lm_head.weight"),
    "whole data": (
        lambda m: setattr(m.lm_head.weight, "data", torch.randn(131, 24)),
        "lm_head.weight of LlamaForCausalLM must keep the shape of its shard",
    ),
    "no output": (
        lambda m: setattr(m.model.layers[1].self_attn, "o_proj", nn.Identity()),
        "model.layers.1.self_attn.o_proj of LlamaForCausalLM",
    ),
}


@pytest.mark.tier("test", only=("an adapter", "pruning"))
@pytest.mark.parametrize("name", REFUSED)
@pooled(world_size=2)
def test_what_would_compute_with_a_shard_as_if_it_were_whole(name: str) -> None:
    change, text = REFUSED[name]
    for before in ("nothing", "an evaluation", "a step"):
        model = parallel(llama(), 2)
        if before == "an evaluation":
            with torch.no_grad():
                model.eval()(IDS)
        elif before == "a step":
            model(IDS, labels=IDS).loss.backward()
        change(model)
        for _ in range(2):  # and it stays refused
            with raises_everywhere(ConfigError, text, "before autopar.initialize", "autopar.deparallelize(model)"):
                model(IDS)


def _quiet_activation(model: Any) -> None:
    for block in model.transformer.h:
        block.mlp.dropout = nn.Identity()


def _wrapped(model: Any) -> None:
    for number, block in enumerate(model.transformer.h):
        model.transformer.h[number] = checkpoint_wrapper(block)


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "a quiet activation": _quiet_activation,
    "wrapped": _wrapped,
    "features": lambda m: setattr(m, "lm_head", nn.Identity()),
    "fewer blocks": lambda m: m.transformer.h.__delitem__(1),
    "frozen": lambda m: m.transformer.wte.requires_grad_(False),
}


@pytest.mark.tier("test", only=("a quiet activation",))
@pytest.mark.parametrize("name", HARMLESS)
@pooled(world_size=2)
def test_what_sharding_does_not_mind_gives_the_plain_models_numbers(name: str) -> None:
    plain = gpt2().train()
    model = parallel(copy.deepcopy(plain), 2).train()
    model(IDS)
    for m in (plain, model):
        HARMLESS[name](m)
        m(IDS).logits.square().mean().backward()
    close(model(IDS).logits, plain(IDS).logits, "output")
    norm = "transformer.ln_f.weight"
    close(model.get_parameter(norm).grad, plain.get_parameter(norm).grad, "gradient")


@pooled(world_size=2)
def test_a_module_that_only_one_rank_replaces_leaves_no_rank_waiting():
    model = parallel(llama(), 2)
    model(IDS)
    if dist.get_rank() == 0:
        _adapter(model)
    with pytest.raises(ConfigError if dist.get_rank() == 0 else ConsistencyError, match="were added to"):
        model(IDS)


def _check(model: Any, tp: int = 2) -> None:
    check_forwards(model, make_plan(model, find_policy(model), tp))


def test_a_patched_layer_is_named_and_another_module_may_be_patched() -> None:
    model = llama()
    patched = model.model.layers[1].self_attn.o_proj
    plain = patched.forward
    patched.forward = lambda x: plain(x) * 0.5
    with pytest.raises(ConfigError) as info:
        _check(model)
    assert str(info.value) == (
        "model.layers.1.self_attn.o_proj (row, tensor_parallel_size=2) must not have a forward set on the object: it "
        "would replace the\n  sharded forward, and results would be wrong.\n"
        "  Use register_forward_hook or register_forward_pre_hook, or replace the layer by a subclass."
    )
    _check(model, tp=1)
    del patched.forward
    model.model.norm.forward = model.model.norm.forward  # replicated
    _check(model)


def test_hooks_of_accelerate_are_named_with_what_takes_them_off() -> None:
    model = gpt2()
    add_hook_to_module(model.transformer.wte, ModelHook())
    for block in model.transformer.h:
        add_hook_to_module(block.mlp.c_proj, ModelHook())
    with pytest.raises(
        ConfigError, match=r"(?s)^transformer\.wte, and 2 more .*remove_hook_from_module\(model, recurse=True"
    ):
        _check(model)
    remove_hook_from_module(model, recurse=True)
    _check(model)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_hooks_of_accelerate_leave_behind_is_not_called() -> None:
    plain, model = gpt2(), gpt2()
    for block in model.transformer.h:
        add_hook_to_module(block.mlp.c_proj, ModelHook())
    remove_hook_from_module(model, recurse=True)
    assert "forward" in vars(model.transformer.h[0].mlp.c_proj)
    ids = torch.arange(8).view(2, 4)
    sharded = parallel(model, 2)(ids).logits + 0
    torch.testing.assert_close(sharded, plain(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_initialize_refuses_it_and_changes_nothing() -> None:
    model = llama()
    ids = torch.arange(6).view(1, 6)
    layer = model.model.layers[0].mlp.down_proj
    plain = layer.forward
    layer.forward = lambda x: plain(x) + 1
    expected = model(ids).logits
    with raises_everywhere(ConfigError, "layers.0.mlp.down_proj (row, tensor_parallel_size=2) must not have a forward"):
        parallel(model, 2)
    assert torch.equal(model(ids).logits, expected) and not hasattr(model, "mpu")
    piped = autopar.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2}})
    with torch.no_grad():
        assert torch.equal(piped.eval()(ids).logits, expected), "stages hold whole layers"

"""Model types that no policy lists and that come with a ``tp_plan``: a policy is derived from what they compute."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    ConvNextConfig,
    ConvNextModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    ResNetConfig,
    ResNetModel,
)
from transformers.modeling_outputs import BaseModelOutput

import autopar
from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import UnsupportedModelError
from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from autopar.tools.commands.policy_check import check_policy
from autopar.tools.derivation.derive import derive
from autopar.tools.verification import small_models
from tests.checkpoint.loading import logged
from tests.harness.worlds import pooled
from tests.parity import check, language_batches


class OwnConfig(LlamaConfig):
    """Llama by another name, with the plan that it inherits."""

    model_type = "someones_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


def own(heads: int = 6, kv_heads: int = 3, **changes: Any) -> OwnForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 37, "num_hidden_layers": 2, "vocab_size": 131}
    config = OwnConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, **changes)
    return OwnForCausalLM(config)


def test_it_shards_as_the_policy_that_was_written_for_the_structure() -> None:
    model = own()
    plain = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "model_type": "llama"}))
    for tp in (2, 3):
        ours, derived = make_plan(plain, find_policy(plain), tp), make_plan(model, find_policy(model), tp)
        for name, tensor in ours.tensors.items():
            shapes = [[t.local_shape(rank) for rank in range(tp)] for t in (tensor, derived.tensors[name])]
            assert shapes[0] == shapes[1], name
        assert [(a.path, a.name, a.values) for a in ours.attributes] == [
            (a.path, a.name, a.values) for a in derived.attributes
        ]
        assert check_plan(model, "", derived)


def test_kv_heads_may_be_fewer_than_ranks() -> None:
    plan = make_plan(own(8, 2), find_policy(own(8, 2)), 4)
    shapes = {name: [tensor.local_shape(rank) for rank in range(4)] for name, tensor in plan.tensors.items()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == [(16, 64)] * 4
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [(8, 64)] * 4


@pooled(world_size=2)
def test_an_unlisted_type_trains_as_the_plain_model() -> None:
    check(own, language_batches(131), 2)
    check(lambda: own(5, 1, tie_word_embeddings=True), language_batches(131), 2, step=False)
    plain, batch = own().eval(), language_batches(131)[0]
    model = autopar.initialize(own(), {"model_parallelism": {"pipeline_parallel_size": 2}}).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, plain(**batch).loss, rtol=1e-5, atol=1e-5)


@pooled(world_size=2)
def test_initialize_says_so_in_one_line() -> None:
    expected = (
        "no policy lists model_type 'someones_llama', so its policy is derived from its tp_plan and forward "
        "('autopar policy new' verifies and saves it); 1% of the parameters stay full on each of 2 ranks"
    )
    with logged("autopar.api", logging.INFO) as records:
        model = autopar.initialize(own(), {"model_parallelism": {"tensor_parallel_size": 2}})
    assert records[:-1] == ([expected] if model.mpu.is_master else []) if records else not model.mpu.is_master


def test_policy_check_says_so_too() -> None:
    report = check_policy(own())
    assert report["holds"] and report["policy"]["name"] == "derived", report
    assert report["notice"].startswith("no policy lists model_type 'someones_llama', so its policy is derived")
    assert check_policy(own(), policy="derive")["notice"] is None


class ToyConfig(PretrainedConfig):
    model_type = "someones_toy"
    base_model_tp_plan: Any = None

    def __init__(self, plan: dict[str, str] | None = None, kind: str = "apart", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_attention_heads, self.kind, self.base_model_tp_plan = 4, kind, plan


class ToyAttention(nn.Module):
    """``kind``: how q, k, v lie."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.num_heads, self.kind = 4, kind
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        fused = self.qkv(x)
        if self.kind == "by head":  # q0 k0 v0 q1 k1 v1 ...
            q, k, v = (part.transpose(1, 2) for part in fused.view(batch, length, -1, 24).chunk(3, -1))
        else:
            q, k, v = (part.reshape(batch, length, -1, 8).transpose(1, 2) for part in fused.chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, -1))


class ToyBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = ToyAttention(kind)
        self.gate_up, self.down = nn.Linear(32, 48), nn.Linear(24, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Toy(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(131, 32)
        self.blocks = nn.ModuleList(ToyBlock(config.kind) for _ in range(2))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> BaseModelOutput:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return BaseModelOutput(last_hidden_state=x)


WRONG = {"blocks.*.attention.qkv": "colwise", "blocks.*.gate_up": "colwise", "blocks.*.down": "sequence_parallel"}


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_forward_computes_decides_and_not_the_plan() -> None:
    for kind in ("apart", "by head"):
        torch.manual_seed(0)
        plain = Toy(ToyConfig(WRONG, kind))
        model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}})
        assert model.get_parameter("blocks.0.attention.qkv.weight").shape == (48, 32)
        assert model.get_parameter("blocks.0.gate_up.weight").shape == (24, 32)
        ids = torch.arange(14).reshape(2, 7)
        ours, theirs = model(ids).last_hidden_state, plain(ids).last_hidden_state
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_model_of_which_nothing_can_be_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Toy, input_ids: torch.Tensor, **kwargs: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.embed(torch.tensor(input_ids.tolist())))

    monkeypatch.setattr(Toy, "forward", forward)
    with pytest.raises(UnsupportedModelError) as error:
        find_policy(Toy(ToyConfig(WRONG)))
    text = str(error.value)
    assert text.startswith("no policy lists model_type 'someones_toy' of Toy, and no policy can be derived for Toy: ")
    assert len(text.splitlines()) <= 10


@pytest.mark.parametrize("kind", ["convnext", "resnet"])
def test_a_convolutional_net_is_named(kind: str) -> None:
    stages = {"hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
    net = ConvNextModel(ConvNextConfig(**stages)) if kind == "convnext" else ResNetModel(ResNetConfig(**stages))
    text = f"{type(net).__name__} is a convolutional net, which autopar does not support"
    for find in (find_policy, derive) if kind == "resnet" else (find_policy,):
        with pytest.raises(UnsupportedModelError, match=text):
            find(net)


def test_a_large_model_takes_the_policy_of_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    with torch.device("meta"):
        model = OwnForCausalLM(OwnConfig(**sizes, num_attention_heads=64, num_key_value_heads=8))
    seen = []
    monkeypatch.setattr(small_models, "derive", lambda small: seen.append(small) or derive(small))
    drawn = torch.get_rng_state()
    plan = make_plan(model, find_policy(model), 8)
    assert torch.equal(drawn, torch.get_rng_state()) and sum(p.numel() for p in seen[0].parameters()) < 1e6
    assert plan.tensors["model.layers.79.self_attn.q_proj.weight"].local_shape(7) == (1024, 8192)
    assert plan.tensors["model.layers.79.self_attn.k_proj.weight"].local_shape(7) == (128, 8192)
    monkeypatch.setattr(small_models, "build_small", lambda *_: own(3, 3))  # another structure: no grouped keys
    monkeypatch.setattr(small_models, "LARGE", 0)
    found = make_plan(own(8, 2), find_policy(own(8, 2)), 2)
    assert found.tensors["model.layers.0.self_attn.k_proj.weight"].local_shape(0) == (8, 64)


def test_without_a_plan_none_is_derived_unasked() -> None:
    for plan in ({}, {"lm_head": "colwise_gather_output"}):
        model = own()
        model._tp_plan, model.config.base_model_tp_plan = plan, {}
        with pytest.raises(UnsupportedModelError, match=r"lists model_type 'someones_llama' of OwnForCausalLM\."):
            find_policy(model)

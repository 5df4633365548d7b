"""A ``tp_plan`` that comes with a model stands in for a policy, but not one that is wrong or cannot be shown right."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import autopar
from autopar.dry_run.imported_plan import rehearse
from autopar.errors import PolicyError, UnsupportedModelError
from autopar.plan.make_plan import make_plan
from autopar.plan.summary import imported_notice, whole_share
from autopar.policy.match import find_policy
from autopar.policy.tp_plan import import_tp_plan
from autopar.tools.cli.policy_check import check_policy
from tests.parity import check, language_batches
from tests.pool import pooled
from tests.random_models import batches, build, cases


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
        ours, imported = make_plan(plain, find_policy(plain), tp), make_plan(model, find_policy(model), tp)
        for name, tensor in ours.tensors.items():
            shapes = [[t.local_shape(rank) for rank in range(tp)] for t in (tensor, imported.tensors[name])]
            assert shapes[0] == shapes[1], name
        assert [(a.path, a.name, a.values) for a in ours.attributes] == [
            (a.path, a.name, a.values) for a in imported.attributes
        ]
        assert rehearse(model, "", imported)


def test_heads_follow_their_kv_heads_and_single_ones_are_replicated() -> None:
    plan = make_plan(own(4, 1), find_policy(own(4, 1)), 2)
    shapes = {name: [tensor.local_shape(rank) for rank in range(2)] for name, tensor in plan.tensors.items()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == [(16, 32), (16, 32)]
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [(8, 32), (8, 32)]


@pooled(world_size=2)
def trains_as_the_plain_model() -> None:
    check(own, language_batches(131), 2)
    check(lambda: own(5, 1, tie_word_embeddings=True), language_batches(131), 2, step=False)


@pytest.mark.tier("all")
def test_an_unlisted_type_trains_as_the_plain_model() -> None:
    trains_as_the_plain_model()


TYPES = {
    "mixtral": "experts stacked in one tensor",
    "deepseek_v3": "near-empty: experts and MLPs, attention whole",
    "phi3": "fused layers, which are gathered",
    "gpt_neox": "q, k, v fused head by head",
    "glm4_moe_lite": "latent attention",
}


@pooled(world_size=2)
def imported_trains_as_the_plain_model(model_type: str) -> None:
    case = next(case for case in cases(model_type) if "CausalLM" in case.head)
    model = build(case, 4, 2)
    policy = import_tp_plan(model)
    assert policy is not None and policy.name == "tp_plan"
    check(lambda: build(case, 4, 2), batches(case, model.config), 2, policy=policy, step=False)


@pytest.mark.tier("all")
@pytest.mark.parametrize("model_type", TYPES)
def test_plans_of_transformers(model_type: str) -> None:
    imported_trains_as_the_plain_model(model_type)


@pooled(world_size=2)
def notice(expected: str) -> None:
    records: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autopar.api")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = autopar.initialize(own(), {"model_parallelism": {"tensor_parallel_size": 2}})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert records[:-1] == ([expected] if model.mpu.is_master else []) if records else not model.mpu.is_master


@pytest.mark.tier("all")
def test_initialize_says_so_in_one_line() -> None:
    notice(
        "no policy lists model_type 'someones_llama': the tp_plan that comes with it is used; it leaves 1% of the "
        "parameters whole on each of 2 ranks"
    )


def test_a_near_empty_plan_is_called_so() -> None:
    model = own()
    model._tp_plan = {"model.layers.*.mlp.up_proj": "colwise_gather_output"}
    model.config.base_model_tp_plan = {}
    plan = make_plan(model, find_policy(model), 2)
    share = whole_share(model, plan)
    assert 0.8 < share < 1
    line = imported_notice(model, plan)
    assert line is not None and f"which is near-empty; it leaves {share:.0%} of the parameters whole" in line
    report = check_policy(model)
    assert report["holds"] and report["notice"] == line


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


ATTENTION = {"blocks.*.attention.qkv": "colwise", "blocks.*.attention.out": "rowwise"}
MLP = {"blocks.*.gate_up": "packed_colwise", "blocks.*.down": "rowwise"}


def verdict(plan: dict[str, str], kind: str = "apart") -> None:
    model = Toy(ToyConfig(plan, kind))
    rehearse(model, "", make_plan(model, find_policy(model), 2))


@pytest.mark.parametrize(("plan", "kind"), [(ATTENTION, "by head"), (MLP, "apart"), (ATTENTION | MLP, "by head")])
def test_right_plans_are_taken(plan: dict[str, str], kind: str) -> None:
    verdict(plan, kind)


WRONG = {
    "split cuts the sharded features of [2, 5, 96], which lie in one run": (ATTENTION, "apart"),
    "mean works along the sharded features": (ATTENTION, "mean by head"),
    "in another order": (ATTENTION, "order by head"),
}


@pytest.mark.parametrize(("told", "plan", "kind"), [(told, *case) for told, case in WRONG.items()])
def test_wrong_plans_with_fitting_shapes_are_refused(
    told: str, plan: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind.endswith(" by head"):  # q, k, v in the right order, and one mistake behind it
        monkeypatch.setattr(ToyAttention, "forward", _by_head(kind.partition(" ")[0]))
    with pytest.raises(UnsupportedModelError) as error:
        verdict(plan, "apart")
    text = str(error.value)
    assert text.startswith("the tp_plan of Toy cannot be used: in blocks.0") and told in text, text
    assert "A policy of your own says what its features are made of" in text


def _by_head(mistake: str) -> Any:
    def forward(self: ToyAttention, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).view(batch, length, -1, 24).chunk(3, -1))
        if mistake == "mean":
            q = q - q.mean(1, keepdim=True)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if mistake == "order":  # features of all heads in turns
            return self.out(seen.permute(0, 2, 3, 1).reshape(batch, length, -1))
        return self.out(seen.transpose(1, 2).reshape(batch, length, -1))

    return forward


def test_a_fused_layer_that_is_called_one_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"blocks\.\*\.down: down reads 24 .*, but gate_up makes 48"):
        verdict(MLP | {"blocks.*.gate_up": "colwise"})


def test_another_number_on_a_shard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: ToyAttention, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        fused = self.qkv(x).view(batch, length, -1, 24)
        q, k, v = (part.transpose(1, 2) for part in (fused / fused.shape[2] ** 0.5).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, -1))

    monkeypatch.setattr(ToyAttention, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"div with \(.*\) on a shard, \(2.0,\) in the full model"):
        verdict(ATTENTION)


def test_what_the_dry_run_finds_in_a_plan_is_refused() -> None:
    case = next(case for case in cases("glm4_moe") if "CausalLM" in case.head)
    model = build(case, 4, 2)  # its plan does not sum the gradient of k_norm
    policy = import_tp_plan(model)
    with pytest.raises(PolicyError, match=r"tp_plan of Glm4MoeForCausalLM:\S+: \S+k_norm.weight works on sharded"):
        rehearse(model, "", make_plan(model, find_policy(model, policy), 2))


def test_styles_that_no_rule_says() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        verdict({"blocks.*.attention.qkv": "sequence_parallel"})
    assert str(error.value).startswith(
        "no policy lists model_type 'someones_toy' of Toy, and the tp_plan of Toy cannot be imported: "
        "blocks.0.attention.qkv is 'sequence_parallel': no rule of a policy says that.\n"
    )
    assert len(str(error.value).splitlines()) <= 10


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"blocks.*.attention.norm": "colwise"}, "blocks.0.attention.norm is 'colwise': a LayerNorm has no features"),
        ({"blocks.*.attention": "moe_tp_experts"}, "ToyAttention is not made by transformers' use_experts"),
        ({"blocks.*.down": "embedding_rowwise"}, "blocks.0.down is 'embedding_rowwise': it is no embedding"),
        ({"blocks.*.attention.qkv": "mla_kv_a_proj"}, "beside it no kv_a_layernorm and kv_b_proj are found"),
    ],
)
def test_what_a_style_is_said_of(plan: dict[str, str], told: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        verdict(plan)
    assert told in str(error.value)


def test_a_plan_for_the_head_alone_is_none() -> None:
    model = own()
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    model.config.base_model_tp_plan = {}
    assert import_tp_plan(model) is None
    with pytest.raises(UnsupportedModelError, match=r"no policy lists model_type 'someones_llama' of OwnForCausalLM\."):
        find_policy(model)


@pooled(world_size=2)
def stages_of_an_imported_plan() -> None:
    plain = own().eval()
    model = autopar.initialize(own(), {"model_parallelism": {"pipeline_parallel_size": 2}}).eval()
    batch = language_batches(131)[0]
    with torch.no_grad():
        expected = plain(**batch).loss
        got = model(**batch).loss
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.tier("all")
def test_stages() -> None:
    stages_of_an_imported_plan()

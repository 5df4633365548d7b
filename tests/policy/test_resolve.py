"""Policies and models that fit each other or not: sizes, ties, types, optional modules, fused kernels."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM
from transformers.models.mamba import modeling_mamba

from autopar.errors import ConfigError, PolicyError, UnsupportedModelError
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from tests.policy import written
from tests.policy.written import refused
from tests.random_models import Case, build
from tests.small import gpt2, llama

RIGHT = written.RIGHT["models"]


def test_the_right_one_is_right() -> None:
    for model in (llama(), llama(tie_word_embeddings=True), llama().model):
        plan = make_plan(model, read_user_policy(RIGHT), 2)
        assert plan.attributes[0].values == (2, 2)
        assert plan.tensors[next(iter(plan.tensors))].local_shape(0) == (66, 24)
    plan = make_plan(llama(tie_word_embeddings=True), read_user_policy(RIGHT), 2)
    assert plan.tensors["model.embed_tokens.weight"].aliases == ("lm_head.weight",)


def test_tied_weights_must_agree() -> None:
    weak = RIGHT.replace("{embedding: vocab}", "replicated")
    make_plan(llama(), read_user_policy(weak), 2)
    with refused(
        "policy text:26: lm_head.weight is the same tensor as model.embed_tokens.weight, but sharded along dim 0 by "
        "vocab here and replicated by policy text:8"
    ):
        make_plan(llama(tie_word_embeddings=True), read_user_policy(weak), 2)


def test_sizes_that_do_not_fit_name_the_largest_that_does() -> None:
    with refused(
        "tensor_parallel_size=8 does not fit LlamaForCausalLM: 6 heads cannot be sharded over 8 ranks.\n"
        "  'heads' is num_attention_heads=6 (policy text:4), sharded by self_attn.q_proj (policy text:12).\n"
        "  Largest size that fits this model: 6.",
        ConfigError,
    ):
        make_plan(llama(), read_user_policy(RIGHT), 8)
    gathered = RIGHT.replace("k_proj: {column: kv}", "k_proj: {column: kv, gather_output: true}")
    assert make_plan(llama(), read_user_policy(gathered), 4)
    for row in ("{row: kv}", "{row: kv, split_input: true}"):  # two ranks would add the same
        model = llama(num_key_value_heads=6)
        model.config.num_key_value_heads = 3
        text = RIGHT.replace("o_proj: {row: heads}", f"o_proj: {row}")
        with refused(
            "tensor_parallel_size=4 does not fit self_attn.o_proj: 'row' needs at least one unit of each kind per rank "
            "(policy text:15).",
            ConfigError,
        ):
            make_plan(model, read_user_policy(text), 4)
    alone = RIGHT.replace("replicate: true", "replicate: false")
    with pytest.raises(ConfigError, match="3 kv cannot be sharded over 4 ranks"):
        make_plan(llama(), read_user_policy(alone), 4)


def test_what_cannot_be_cut() -> None:
    model = llama()
    model.model.embed_tokens.max_norm = 1.0
    with pytest.raises(PolicyError, match="policy text:8: embed_tokens uses max_norm, sparse or scale_grad_by_freq"):
        make_plan(model, read_user_policy(RIGHT), 2)
    model = llama()
    weight = torch.zeros(37, 24, dtype=torch.int8)
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(
        PolicyError, match=r"policy text:17: mlp.up_proj.weight is a Parameter of torch.int8; only plain"
    ):
        make_plan(model, read_user_policy(RIGHT), 2)


def test_a_bare_parameter_is_whole_unless_it_is_tied_to_one_that_is_cut() -> None:
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 9,
        "vocab_size": 31,
    }
    for tied in (True, False):
        model = BertForMaskedLM(BertConfig(**sizes, tie_word_embeddings=tied))
        plan = make_plan(model, find_policy(model), 2)
        assert (model.cls.predictions.bias is model.cls.predictions.decoder.bias) == tied
        bias = plan.tensors[plan.canonical("cls.predictions.bias")]
        assert bias.local_shape(0) == ((16,) if tied else (31,))
        assert plan.tensors[plan.canonical("cls.predictions.decoder.bias")].local_shape(0) == (16,)


def test_optional_segments_of_a_path() -> None:
    for cross in (False, True):
        model = gpt2(add_cross_attention=cross)
        plan = make_plan(model, find_policy(model), 2)
        assert ("transformer.h.0.crossattention.q_attn" in plan.modules) == cross
        assert len([a for a in plan.attributes if "crossattention" in a.path]) == (2 if cross else 0)


def _wrapped(is_new_implementation: bool) -> Callable[[], bool]:
    return lambda: is_new_implementation


@pytest.mark.parametrize("foreign", [False, True])
def test_a_kernel_that_multiplies_by_cut_weights_is_refused(foreign: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[modeling_mamba.__name__], "mamba_inner_fn", _wrapped(foreign))
    model = build(Case("mamba", "MambaForCausalLM"), 4, 4)
    policy = find_policy(model)
    make_plan(model, policy, 1)  # nothing is cut
    if not foreign:
        make_plan(model, policy, 2)
        return
    with pytest.raises(UnsupportedModelError, match="kernel 'mamba_inner_fn' of an installed package"):
        make_plan(model, policy, 2)

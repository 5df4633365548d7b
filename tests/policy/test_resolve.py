"""Wrong policies for a right model: each is refused while the plan is made, with the line to blame."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from autopar.errors import ConfigError, PolicyError
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from tests.small import gpt2, llama

RIGHT = """\
match: {model_type: llama}
units:
  kv: {count: num_key_value_heads, replicate: true}
  heads: {count: num_attention_heads, follows: kv}
  ffn: intermediate_size
  vocab: vocab_size
prefix:
  embed_tokens: {embedding: vocab}
blocks:
  path: layers
  modules:
    self_attn.q_proj: {column: heads}
    self_attn.k_proj: {column: kv}
    self_attn.v_proj: {column: kv}
    self_attn.o_proj: {row: heads}
    mlp.gate_proj: {column: ffn}
    mlp.up_proj: {column: ffn}
    mlp.down_proj: {row: ffn}
    input_layernorm: replicated
    post_attention_layernorm: replicated
  attributes:
    self_attn.num_key_value_groups: heads / kv
suffix:
  norm: replicated
head:
  lm_head?: {column: vocab, gather_output: true}
"""


def test_the_right_one_is_right() -> None:
    for model in (llama(), llama(tie_word_embeddings=True), llama().model):
        plan = make_plan(model, read_user_policy(RIGHT), 2)
        assert plan.attributes[0].values == (2, 2)
        assert plan.tensors[next(iter(plan.tensors))].local_shape(0) == (66, 24)
    plan = make_plan(llama(tie_word_embeddings=True), read_user_policy(RIGHT), 2)
    assert plan.tensors["model.embed_tokens.weight"].aliases == ("lm_head.weight",)


# what stands in RIGHT, what stands there instead, line, message
WRONG = [
    (
        "    mlp.up_proj: {column: ffn}\n",
        "",
        1,
        "no rule covers 2 parameters of LlamaForCausalLM: model.layers.0.mlp.up_proj.weight, "
        "model.layers.1.mlp.up_proj.weight.",
    ),
    ("mlp.up_proj:", "mlp.upproj:", 17, "LlamaDecoderLayer has no module 'mlp.upproj'. Did you mean 'mlp.up_proj'?"),
    ("embed_tokens:", "embed_token:", 8, "LlamaModel has no module 'embed_token'. Did you mean 'embed_tokens'?"),
    (
        "embed_tokens:",
        "embed_tokens?.x?:",
        1,
        "no rule covers 1 parameters of LlamaForCausalLM: model.embed_tokens.weight.",
    ),
    ("path: layers", "path: layer", 9, "LlamaModel has no module 'layer'. Did you mean 'layers'?"),
    ("path: layers", "path: norm", 9, "blocks.path 'norm' is no ModuleList of LlamaModel"),
    (
        "o_proj: {row: heads}",
        "o_proj: replicated",
        14,
        "self_attn.v_proj opens a region sharded by 'kv' that no row closes; add a row rule, or gather_output: true",
    ),
    (
        "down_proj: {row: ffn}",
        "down_proj: {row: ffn, split_input: true}",
        17,
        "mlp.up_proj opens a region sharded by 'ffn' that no row closes",
    ),
    (
        "gate_proj: {column: ffn}\n    mlp.up_proj: {column: ffn}",
        "gate_proj: replicated\n    mlp.up_proj: replicated",
        18,
        "mlp.down_proj closes a region sharded by 'ffn' that no column opens; add a column rule, or split_input: true",
    ),
    (
        "{column: vocab, gather_output: true}",
        "{column: vocab}",
        26,
        "lm_head opens a region sharded by 'vocab' that no row closes",
    ),
    (
        "q_proj: {column: heads}",
        "q_proj: {column: [heads, kv]}",
        12,
        "self_attn.q_proj has 24 features, [heads, kv] describes 9 equal parts: 24 / 9 is not whole",
    ),
    (
        "  norm: replicated",
        "  norm: {embedding: vocab}",
        24,
        "'embedding' needs an nn.Embedding, norm is a LlamaRMSNorm",
    ),
    (
        "input_layernorm: replicated",
        "input_layernorm: {column: ffn}",
        19,
        "'column' needs an nn.Linear, Conv1D or convolution, input_layernorm is a LlamaRMSNorm",
    ),
    (
        "input_layernorm: replicated",
        "input_layernorm: {replicated: vocab}",
        19,
        "input_layernorm works on activations sharded by 'vocab', but no column opens them",
    ),
    (
        "input_layernorm: replicated",
        "mlp: replicated\n    input_layernorm: replicated",
        16,
        "model.layers.0.mlp.gate_proj is matched by two rules, here and, with model.layers.0.mlp, in policy text:19",
    ),
    (
        "mlp.up_proj: {column: ffn}",
        "mlp.up_proj: {column: ffn}\n    mlp.up_proj?: {column: ffn}",
        18,
        "model.layers.0.mlp.up_proj is matched by two rules, here and in policy text:17",
    ),
    (
        "input_layernorm: replicated",
        "input_layernorm.weight: {column: ffn}",
        19,
        "input_layernorm.weight is a bare parameter, which can only be 'replicated'",
    ),
    (
        "self_attn.num_key_value_groups:",
        "self_attn.num_key_value_group:",
        22,
        "LlamaDecoderLayer has no integer attribute 'self_attn.num_key_value_group'. "
        "Did you mean 'num_key_value_groups'?",
    ),
    (
        "self_attn.num_key_value_groups:",
        "self_attention.groups:",
        22,
        "LlamaDecoderLayer has no module 'self_attention'. Did you mean 'self_attn'?",
    ),
    (
        "num_key_value_groups: heads / kv",
        "num_key_value_groups: heads / ffn",
        22,
        "self_attn.num_key_value_groups=2 is not heads / ffn = 6 / 37",
    ),
    (
        "num_key_value_groups: heads / kv",
        "num_key_value_groups: heads",
        22,
        "self_attn.num_key_value_groups=2 is not a multiple of 6 heads",
    ),
    (
        "self_attn.num_key_value_groups: heads / kv",
        "self_attn.config.hidden: heads",
        22,
        "LlamaDecoderLayer has no integer attribute 'self_attn.config.hidden'",
    ),
    (
        "self_attn.num_key_value_groups: heads / kv",
        "mlp.down_proj.config.heads: heads",
        22,
        "LlamaDecoderLayer has no integer attribute 'mlp.down_proj.config.heads'.",
    ),
    (
        "self_attn.num_key_value_groups: heads / kv",
        "mlp.down_proj.weight.heads: heads",
        22,
        "LlamaDecoderLayer has no integer attribute 'mlp.down_proj.weight.heads'.",
    ),
    (
        "count: num_attention_heads",
        "count: num_attention_head",
        4,
        "'heads' is num_attention_head, which LlamaConfig lacks. Did you mean 'num_attention_heads'?",
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), WRONG, ids=[f"{w[2]}-{w[3][:30]}" for w in WRONG])
def test_a_wrong_policy_is_refused_with_its_line(old: str, new: str, line: int, message: str) -> None:
    assert RIGHT.count(old) == 1
    model = llama()
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(PolicyError) as info:
        make_plan(model, read_user_policy(RIGHT.replace(old, new)), 2)
    assert str(info.value).startswith(f"policy text:{line}: {message}"), str(info.value)
    assert before == {name: id(module) for name, module in model.named_modules()}


def test_tied_weights_must_agree() -> None:
    weak = RIGHT.replace("{embedding: vocab}", "replicated")
    make_plan(llama(), read_user_policy(weak), 2)
    with pytest.raises(PolicyError) as info:
        make_plan(llama(tie_word_embeddings=True), read_user_policy(weak), 2)
    assert str(info.value) == (
        "policy text:26: lm_head.weight is the same tensor as model.embed_tokens.weight, but sharded along dim 0 by "
        "vocab here and replicated by policy text:8"
    )


def test_sizes_that_do_not_fit_name_the_largest_that_does() -> None:
    with pytest.raises(ConfigError) as info:
        make_plan(llama(), read_user_policy(RIGHT), 8)
    assert str(info.value) == (
        "tensor_parallel_size=8 does not fit LlamaForCausalLM: 6 heads cannot be sharded over 8 ranks.\n"
        "  'heads' is num_attention_heads=6 (policy text:4), sharded by self_attn.q_proj (policy text:12).\n"
        "  Largest size that fits this model: 6."
    )
    gathered = RIGHT.replace("k_proj: {column: kv}", "k_proj: {column: kv, gather_output: true}")
    assert make_plan(llama(), read_user_policy(gathered), 4)
    for row in ("{row: kv}", "{row: kv, split_input: true}"):  # two ranks would add the same
        model = llama(num_key_value_heads=6)
        model.config.num_key_value_heads = 3
        with pytest.raises(ConfigError) as info:
            make_plan(model, read_user_policy(RIGHT.replace("o_proj: {row: heads}", f"o_proj: {row}")), 4)
        assert str(info.value) == (
            "tensor_parallel_size=4 does not fit self_attn.o_proj: 'row' needs at least one unit of each kind a rank "
            "(policy text:15)."
        )
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

"""Small configs of dense decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo.flat import BIASES, GRANITE, HEADS, KV_HEADS, SLIDING, flat
from tests.zoo.form import Draw, Kind

_ALL_BIASES = {"biases": {"attention_bias": True, "mlp_bias": True}}
_CROSS = {"cross-attention": {"add_cross_attention": True}}
_TIED = {"tied": {"tie_word_embeddings": True}}
_UNTIED = {"untied": {"tie_word_embeddings": False}}
_GPT2_VARIANTS = {
    "cross-attention": {"add_cross_attention": True},
    "upcast": {
        "reorder_and_upcast_attn": True,
        "scale_attn_by_inverse_layer_idx": True,
        "n_inner": None,
        "attn_implementation": "eager",
    },
}


def _codegen(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    heads *= 2  # its heads lie in four groups, always
    return flat("codegen", {"rotary_dim": 4, "n_inner": 37})(heads, kv_heads, vocab, changes)


def _diffllama(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    even = kv_heads - kv_heads % 2  # its values lie in two halves of the heads
    return flat("diffllama", {})(heads, even, vocab, changes)


def _mpt(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    settings = {"expansion_ratio": 3, "attn_config": {"clip_qkv": None}}
    return flat("mpt", settings)(heads, kv_heads, vocab, changes)


def _per_layer(name: str, settings: Mapping[str, Any], **legacy: Any) -> Any:
    """Gemma's layers each add an embedding of their own, of as many words."""

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        words = {"vocab_size_per_layer_input": vocab}
        return flat(name, {**settings, **words}, **legacy)(heads, kv_heads, vocab, changes)

    return make


_SHARING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 4,
    "hidden_size_per_layer_input": 6,
    "final_logit_softcapping": 3.0,
}


def _with_encoder(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return {**batch, "encoder_hidden_states": draw.normal(2, 5, config.hidden_size)}


def _padded_left(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return {name: value.flip(1) for name, value in batch.items() if name in ("input_ids", "labels")}


def _xlnet_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    shape = batch["input_ids"].shape
    batch["token_type_ids"] = draw(0, 2, *shape)
    if head == "XLNetLMHeadModel":  # predicts with the second stream
        batch["perm_mask"] = batch["target_mapping"] = torch.eye(shape[1]).expand(2, -1, -1)
    elif head == "XLNetForQuestionAnswering":
        batch |= {"is_impossible": draw(0, 2, 2).float(), "cls_index": draw(0, 7, 2)}
    return batch


_AMPLIFIED = (
    "no scale of 1/sqrt(width) in attention: gradients of the small model are thousands, float32 misses by 1e-4"
)

KINDS: dict[str, Kind] = {
    "qwen2": Kind(without={"JevForDecision": "its config is of model type jev, with a whole language model inside"}),
    "cohere": Kind(
        variants={"biases": {"attention_bias": True}, "qk-norm": {"use_qk_norm": True}},
    ),
    "cohere2": Kind(
        settings={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "exaone4": Kind(
        settings={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2": Kind(
        settings={"sliding_window": 4},
    ),
    "gemma3_text": Kind(
        settings={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "glm": Kind(
        variants={"biases": {"attention_bias": True}},
    ),
    "gpt2": Kind(variants=_GPT2_VARIANTS),
    "gpt-sw3": Kind(variants=_GPT2_VARIANTS),
    "granite": Kind(
        settings={
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "hyperclovax": Kind(
        variants={"no-post-norm": {"use_post_norm": False}},
    ),
    "llama": Kind(
        variants={
            "biases": {"attention_bias": True, "mlp_bias": True},
            "eager": {"attn_implementation": "eager"},
            "four-layers": {"num_hidden_layers": 4},
        },
    ),
    "mistral": Kind(
        settings={"sliding_window": 4},
    ),
    "olmo": Kind(
        settings={"clip_qkv": 0.3},
    ),
    "phi": Kind(
        variants={"qk-norm": {"qk_layernorm": True}},
    ),
    "phi3": Kind(
        variants={"partial-rotary": {"partial_rotary_factor": 0.5}},
    ),
    "qwen3": Kind(
        variants={"biases": {"attention_bias": True}},
    ),
    "stablelm": Kind(
        make=flat("stablelm", {}),
        variants={
            "parallel-residual": {"use_parallel_residual": True, "use_qkv_bias": True},
            "qk-norm": {"qk_layernorm": True},
            **_TIED,
        },
    ),
    "starcoder2": Kind(
        variants={"no-biases": {"use_bias": False}},
    ),
    "vaultgemma": Kind(
        settings={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_neo": Kind(settings={"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gptj": Kind(settings={"rotary_dim": 4}),
    "gpt_neox": Kind(
        variants={"sequential": {"use_parallel_residual": False}, "no-biases": {"attention_bias": False}},
    ),
    "gpt_bigcode": Kind(
        variants={
            "multi-head": {"multi_query": False},
        },
    ),
    "codegen": Kind(make=_codegen, variants=_TIED),
    "opt": Kind(
        settings={"ffn_dim": 37, "init_std": 0.1},
        variants={
            "projected": {"word_embed_proj_dim": 20},
            "post-norm": {"do_layer_norm_before": False},
            "no-biases": {"enable_bias": False, "layer_norm_elementwise_affine": False},
        },
        without={"OPTDecoder": "a part of OPTModel, not a head"},
    ),
    "bloom": Kind(variants={"post-norm-residual": {"apply_residual_connection_post_layernorm": True}}),
    "falcon": Kind(
        make=flat("falcon", {"num_kv_heads": KV_HEADS, "ffn_hidden_size": 37, "num_ln_in_parallel_attn": None}),
        variants={
            "40b": {"new_decoder_architecture": True, "bias": True},
            "40b-one-norm": {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            "alibi": {"alibi": True},
            "40b-alibi": {"new_decoder_architecture": True, "alibi": True},
            "1b": {
                "multi_query": False,
                "num_kv_heads": HEADS,
                "parallel_attn": False,
                "bias": True,
                "alibi": True,
            },
            **_UNTIED,
        },
    ),
    "mpt": Kind(
        make=_mpt,
        variants={"clipped": {"attn_config": {"clip_qkv": 0.3, "softmax_scale": 0.2}}, **_UNTIED},
    ),
    "xglm": Kind(settings={"ffn_dim": 37, "init_std": 0.1}, variants=_CROSS),
    "olmo2": Kind(variants=BIASES),
    "olmo3": Kind(settings=SLIDING, variants=BIASES),
    "biogpt": Kind(),
    "bitnet": Kind(variants=BIASES),
    "cohere_compass_text": Kind(
        settings={
            **SLIDING,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": None,
            },
        },
        variants=BIASES,
    ),
    "cpmant": Kind(
        settings={
            "dim_head": 8,
            "dim_ff": 37,
            "prompt_length": 3,
            "prompt_types": 4,
            "segment_types": 4,
            "position_bias_num_buckets": 8,
            "position_bias_max_distance": 16,
            "init_std": 0.1,
        },
        inputs=_padded_left,
    ),
    "ctrl": Kind(settings={"dff": 37}),
    "diffllama": Kind(make=_diffllama, variants={**BIASES, **_TIED}),
    "doge": Kind(
        make=flat("doge", {"keep_window_size": 4}),
        variants={
            **_ALL_BIASES,
            "experts": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 3},
            **_TIED,
        },
    ),
    "gpt_neox_japanese": Kind(settings={"intermediate_multiple_size": 3}),
    "granite_swa": Kind(settings={**GRANITE, **SLIDING, "layer_rope_theta": [10000.0, 0]}, variants=_ALL_BIASES),
    "hrm_text": Kind(settings={"H_cycles": 2, "L_cycles": 2}),
    "modernbert-decoder": Kind(
        settings={"local_attention": 8, "layer_types": ["sliding_attention", "full_attention"]},
        variants={"biases": {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}},
    ),
    "persimmon": Kind(variants={"no-qk-norm": {"qk_layernorm": False}}),
    "trocr": Kind(
        without=dict.fromkeys(("TrOCRDecoder", "TrOCRDecoderWrapper"), "a part of TrOCRForCausalLM, not a head"),
        settings={"decoder_ffn_dim": 37, "init_std": 0.1, "is_decoder": True},
        inputs=_with_encoder,
        variants={
            "sinusoidal": {"use_learned_position_embeddings": False, "scale_embedding": True},
            "no-embedding-norm": {"layernorm_embedding": False},
        },
    ),
    "xlnet": Kind(settings={"d_inner": 37, "d_head": 8}, inputs=_xlnet_inputs),
    "gemma3n_text": Kind(
        double=_AMPLIFIED,
        make=_per_layer(
            "gemma3n_text",
            {**_SHARING, "laurel_rank": 5, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0]},
        ),
        variants={**BIASES, **_UNTIED},
    ),
    "gemma4_text": Kind(
        double=_AMPLIFIED,
        make=_per_layer("gemma4_text", _SHARING, global_head_dim=12),
        variants={
            **BIASES,
            "equal-keys-and-values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "experts": {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 21,
            },
            "double-wide": {"use_double_wide_mlp": True},
            **_UNTIED,
        },
    ),
    "gemma4_unified_text": Kind(
        double=_AMPLIFIED,
        make=flat("gemma4_unified_text", _SHARING, global_head_dim=12),
        variants={
            **BIASES,
            "equal-keys-and-values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "double-wide": {"use_double_wide_mlp": True},
            **_UNTIED,
        },
    ),
}

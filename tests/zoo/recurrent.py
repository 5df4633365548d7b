"""State-space models, linear attention, and hybrids of them with attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.flat import HEADS, KV_HEADS, flat
from tests.zoo.form import Draw, Kind, Make

LINEAR_THEN_FULL = ["linear_attention", "full_attention"]


def _sized(model_type: str, **settings: Any) -> Make:
    return flat(model_type, settings)


_MOE = {"moe_intermediate_size": 11, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_group": 2,
    "topk_group": 1,
}

# The state-space mixers of one head count: as many heads as attention has, in several groups.
_MAMBA2 = {
    "mamba_n_heads": HEADS,
    "mamba_n_groups": KV_HEADS,
    "mamba_d_state": 5,
    "mamba_chunk_size": 4,
}
_ONE_GROUP = {"mamba_n_groups": 1}

# Gated delta net: several value heads use one key head.
_DELTA = {
    "linear_num_key_heads": KV_HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "layer_types": LINEAR_THEN_FULL,
    "head_dim": 8,
}
_M_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
_QWEN4 = {
    **_DELTA,
    **_MOE,
    "rope_parameters": _M_ROPE,
    "shared_expert_intermediate_size": 13,
    "hc_count": 3,
    "hc_lowrank": 10,
    "ple_layer_ids": [1],
    "ple_embed_dim": 20,
    "ple_conv_kernel_size": 2,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 29,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 6,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
_QWEN_MOE_TEXT = {
    **_DELTA,
    **_MOE,
    "shared_expert_intermediate_size": 13,
    "rope_parameters": _M_ROPE,
}

_OF_TEXT = {
    "JevForDecision": "its config is that of another model type",
    **{f"{name}ForCausalLM": "its config is the text's" for name in ("Qwen3_5", "Qwen3_5Moe", "Qwen4Exp")},
}

IMAGE, VIDEO, VISION_START, VISION_END = 3, 4, 5, 6


def _with_vision(model_type: str, **text: Any) -> Make:
    """A Qwen with a vision tower; the variants change the text."""

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        changes = dict(changes)
        tied = changes.pop("tie_word_embeddings", False)
        words = _sized(f"{model_type}_text", **text)(heads, kv_heads, vocab, changes)
        vision = {
            "depth": 2,
            "hidden_size": 8 * heads,
            "num_heads": heads,
            "intermediate_size": 29,
            "patch_size": 2,
            "out_hidden_size": 8 * heads,
            "num_position_embeddings": 16,
            "initializer_range": 0.1,
        }
        return CONFIG_MAPPING[model_type](
            text_config=words,
            vision_config=vision,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            tie_word_embeddings=tied,
            num_labels=3,
            experts_implementation="eager",
        )

    return make


def _images(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """An image of four patches and one of eight; a merged patch is four."""
    vision = getattr(config, "vision_config", config)
    grids = torch.tensor([[1, 2, 2], [1, 2, 4]])
    volume = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = draw.normal(int(grids.prod(-1).sum()), volume)
    if head.endswith("VisionModel"):
        return {"hidden_states": pixels, "grid_thw": grids}
    ids = batch["input_ids"]
    ids = torch.where((ids >= IMAGE) & (ids <= VISION_END), ids + 10, ids)
    ids[0, 2:3], ids[1, 1:3] = IMAGE, IMAGE
    more = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == IMAGE).int()}
    if "labels" in batch and batch["labels"].shape == ids.shape:
        more["labels"] = batch["labels"].masked_fill(ids == IMAGE, -100)
    return {**batch, "input_ids": ids, **more}


KINDS: dict[str, Kind] = {
    "mamba": Kind(
        settings={"state_size": 5},
        variants={"biases": {"use_bias": True, "use_conv_bias": False}},
    ),
    "mamba2": Kind(
        make=_sized(
            "mamba2",
            num_heads=HEADS,
            head_dim=16,
            n_groups=KV_HEADS,
            state_size=5,
            chunk_size=4,
        ),
        variants={
            "one-group": {"n_groups": 1},
            "biases": {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
        },
    ),
    "jamba": Kind(
        make=_sized(
            "jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=5, num_experts=4, num_experts_per_tok=2
        ),
        variants={
            "other-layers": {"attn_layer_offset": 0, "mamba_proj_bias": True, "mamba_conv_bias": False},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    "bamba": Kind(
        make=_sized("bamba", **_MAMBA2, attn_layer_indices=[1]),
        variants={
            "one-group": _ONE_GROUP,
            "biases": {
                "attention_bias": True,
                "mlp_bias": True,
                "mamba_proj_bias": True,
                "tie_word_embeddings": True,
            },
        },
    ),
    "falcon_h1": Kind(
        make=_sized(
            "falcon_h1",
            **_MAMBA2,
            mamba_d_ssm=None,
            mamba_rms_norm=True,
            lm_head_multiplier=0.5,
            embedding_multiplier=2.0,
            mlp_multipliers=[1.5, 0.7],
            key_multiplier=0.8,
            attention_in_multiplier=1.3,
            attention_out_multiplier=0.9,
            ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9],
            ssm_in_multiplier=1.2,
            ssm_out_multiplier=0.7,
        ),
        variants={
            "one-group": _ONE_GROUP,
            "no-norm": {"mamba_rms_norm": False, "tie_word_embeddings": True},
            "gate-then-norm": {"mamba_norm_before_gate": False},
            "biases": {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
        },
    ),
    "qwen3_next": Kind(
        make=_sized("qwen3_next", **_DELTA, **_MOE, shared_expert_intermediate_size=13, mlp_only_layers=[0]),
        variants={
            "biases": {"attention_bias": True, "mlp_only_layers": [], "tie_word_embeddings": True},
            "router-loss": {"output_router_logits": True},
        },
    ),
    "falcon_mamba": Kind(
        settings={"state_size": 5},
        variants={"biases": {"use_bias": True, "use_conv_bias": False}},
    ),
    "nemotron_h": Kind(
        make=_sized(
            "nemotron_h",
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            mamba_num_heads=HEADS,
            mamba_head_dim=8,
            n_groups=KV_HEADS,
            ssm_state_size=5,
            chunk_size=4,
            head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=11,
            moe_shared_expert_intermediate_size=13,
            n_group=2,
            routed_scaling_factor=1.5,
        ),
        variants={
            "one-group": {"n_groups": 1, "tie_word_embeddings": True},
            "latent": {"moe_latent_size": 10},
            "biases": {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "use_bias": True},
        },
    ),
    "granitemoehybrid": Kind(
        make=_sized(
            "granitemoehybrid",
            **_MAMBA2,
            layer_types=LINEAR_THEN_FULL,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=13,
            embedding_multiplier=2.0,
            logits_scaling=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
        ),
        variants={
            "one-group": _ONE_GROUP,
            "dense": {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True},
            "biases": {"attention_bias": True, "mamba_proj_bias": True},
        },
    ),
    "zamba": Kind(
        make=_sized(
            "zamba",
            num_hidden_layers=4,
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
            n_mamba_heads=HEADS,
            head_dim=16,
            num_key_value_heads=KV_HEADS,
            mamba_d_state=5,
            initializer_range=0.25,
        ),
        variants={
            "two-mamba-heads": {"n_mamba_heads": 2, "mamba_proj_bias": True, "mamba_conv_bias": False},
            "untied": {"tie_word_embeddings": False},
        },
    ),
    "zamba2": Kind(
        make=_sized(
            "zamba2",
            num_hidden_layers=5,
            layers_block_type=["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
            n_mamba_heads=HEADS,
            head_dim=16,
            mamba_ngroups=KV_HEADS,
            mamba_d_state=5,
            initializer_range=0.25,
            chunk_size=4,
            num_key_value_heads=HEADS,
            num_mem_blocks=2,
            use_shared_attention_adapter=True,
            adapter_rank=5,
            use_mem_rope=True,
        ),
        variants={
            "one-group": {"mamba_ngroups": 1},
            "one-block": {
                "num_mem_blocks": 1,
                "use_shared_attention_adapter": False,
                "use_mem_rope": False,
                "num_key_value_heads": KV_HEADS,
            },
            "biases": {"add_bias_linear": True},
            "untied": {"tie_word_embeddings": False},
        },
    ),
    "lfm2": Kind(
        settings={"layer_types": ["conv", "full_attention"], "block_multiple_of": 5},
        variants={"biases": {"conv_bias": True, "block_auto_adjust_ff_dim": False}},
    ),
    "lfm2_moe": Kind(
        make=_sized("lfm2_moe", **_MOE, layer_types=["conv", "full_attention"], num_dense_layers=1),
        variants={
            "biases": {
                "conv_bias": True,
                "use_expert_bias": False,
                "norm_topk_prob": False,
                "tie_word_embeddings": False,
            }
        },
    ),
    "lfm3": Kind(
        settings={
            "num_hidden_layers": 3,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "sliding_window": 4,
        },
        variants={
            "biases": {"conv_bias": True, "attention_bias": True},
            "plain": {"use_sandwich_norm": False, "use_attention_gate": False},
        },
    ),
    "olmo_hybrid": Kind(
        make=_sized(
            "olmo_hybrid",
            layer_types=LINEAR_THEN_FULL,
            linear_num_key_heads=KV_HEADS,
            linear_key_head_dim=4,
            linear_value_head_dim=6,
        ),
        variants={
            "biases": {"attention_bias": True, "linear_allow_neg_eigval": False},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    "qwen3_5_text": Kind(
        make=_sized("qwen3_5_text", **_DELTA, rope_parameters=_M_ROPE),
        variants={"biases": {"attention_bias": True, "tie_word_embeddings": True}},
        without={"JevForDecision": "its config is that of another model type"},
    ),
    "qwen3_5_moe_text": Kind(
        make=_sized("qwen3_5_moe_text", **_QWEN_MOE_TEXT),
        variants={
            "biases": {"attention_bias": True, "tie_word_embeddings": True},
            "router-loss": {"output_router_logits": True},
        },
    ),
    "qwen3_5": Kind(
        make=_with_vision("qwen3_5", **_DELTA, rope_parameters=_M_ROPE),
        inputs=_images,
        without=_OF_TEXT,
        variants={"biases": {"attention_bias": True, "tie_word_embeddings": True}},
    ),
    "qwen3_5_moe": Kind(
        make=_with_vision("qwen3_5_moe", **_QWEN_MOE_TEXT),
        inputs=_images,
        without=_OF_TEXT,
        variants={"biases": {"attention_bias": True, "tie_word_embeddings": True}},
    ),
    "kimi_linear": Kind(
        make=_sized(
            "kimi_linear",
            **_MLA,
            **_MOE,
            layer_types=LINEAR_THEN_FULL,
            mlp_layer_types=["dense", "sparse"],
            linear_num_heads=HEADS,
            linear_head_dim=6,
        ),
        variants={
            "biases": {"attention_bias": True, "tie_word_embeddings": True},
            "query-rank": {"q_lora_rank": 14},
        },
    ),
    "recurrent_gemma": Kind(
        make=_sized(
            "recurrent_gemma",
            block_types=["recurrent", "attention"],
            attention_window_size=4,
        ),
        variants={"one-kv-head": {"num_key_value_heads": 1, "attention_bias": True}},
    ),
    "bailing_hybrid": Kind(
        make=_sized(
            "bailing_hybrid",
            **_MLA,
            **_MOE,
            layer_group_size=2,
            first_k_dense_replace=1,
        ),
        variants={
            "open-gate": {"kda_safe_gate": False},
            "biases": {"attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    "rwkv": Kind(
        variants={"wide-attention": {"attention_hidden_size": 60}},
    ),
    "xlstm": Kind(
        make=_sized(
            "xlstm",
            num_heads=HEADS,
            qk_dim_factor=8.0,
            v_dim_factor=4.0,
            use_cache=False,
            ffn_round_up_to_multiple_of=3,
            chunk_size=4,
        ),
        variants={"biases": {"use_bias": True, "tie_word_embeddings": True}},
    ),
    "qwen4_exp_text": Kind(
        make=_sized("qwen4_exp_text", **_QWEN4),
        variants={"biases": {"attention_bias": True, "tie_word_embeddings": True, "ple_layer_ids": []}},
    ),
    "qwen4_exp": Kind(
        make=_with_vision("qwen4_exp", **_QWEN4),
        inputs=_images,
        without=_OF_TEXT,
        variants={"biases": {"attention_bias": True, "tie_word_embeddings": True}},
    ),
    "zaya": Kind(
        make=_sized(
            "zaya",
            moe_intermediate_size=11,
            num_experts=4,
            router_hidden_size=10,
            head_dim=8,
            layer_types=["hybrid", "hybrid_sliding"],
            sliding_window=4,
        ),
        variants={"biases": {"attention_bias": True, "lm_head_bias": True, "tie_word_embeddings": False}},
    ),
}

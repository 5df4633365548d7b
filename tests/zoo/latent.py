"""Small configs of decoders with latent, indexed or compressed attention, or that convolve keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.flat import BIASES, EXPERTS, GROUPED, GROUPS, HEADS, KV_HEADS, MIXED, TOKENS, UNPADDED, flat, made_flat
from tests.zoo.form import Draw, Kind

_LATENT = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
_INDEXED = {"index_topk": 3, "index_head_dim": 6}
_PER_HEAD = {"num_key_value_heads": HEADS}
_INDEXER = {**_INDEXED, **_PER_HEAD, "index_n_heads": HEADS}
_V4 = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"heavily_compressed_attention": 3, "compressed_sparse_attention": 2},
    "num_key_value_heads": 1,
    "q_lora_rank": 20,
    "o_lora_rank": 5,
    "index_n_heads": HEADS,
    "index_head_dim": 6,
    "index_topk": 2,
    "partial_rotary_factor": 0.5,
    "sliding_window": 4,
    "hc_mult": 2,
}


def _unpadded(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    if "labels" in batch:
        batch["labels"] = batch["labels"].clamp(max=config.unpadded_vocab_size - 1)
    return batch


def dots3_text(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    swa = {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 20, "kv_lora_rank": 12}
    swa |= {"head_dim": 10, "qk_nope_head_dim": 4, "v_head_dim": 7}
    return CONFIG_MAPPING["dots3_note_text"](
        experts_implementation="eager",
        **_LATENT,
        **_INDEXED,
        **GROUPS,
        **MIXED,
        **{f"swa_{name}": value for name, value in swa.items()},
        vocab_size=vocab,
        hidden_size=8 * heads,
        intermediate_size=37,
        moe_intermediate_size=21,
        shared_experts_intermediate_size=23,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        index_n_heads=heads,
        head_dim=8,
        max_position_embeddings=32,
        layer_types=["indexed_attention", "sliding_attention"],
        sliding_window=4,
        initializer_range=0.1,
        **{**TOKENS, **changes},
    )


def _deepseek_v4(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    """The output projection has a group for every two heads, so that every rank of the tests holds one."""
    return flat("deepseek_v4", {**_V4, "o_groups": heads // 2})(heads, kv_heads, vocab, changes)


_INKLING = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": KV_HEADS,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "d_rel": 5,
    "rel_extent": 6,
    "conv_kernel_size": 3,
    "unpadded_vocab_size": UNPADDED,
    "log_scaling_n_floor": 3,
}

_FLAT: dict[str, Kind] = {
    "deepseek_v2": Kind(
        settings={
            **EXPERTS,
            **_LATENT,
            **GROUPS,
            "num_key_value_heads": HEADS,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
        },
        variants={
            "full-query": {"q_lora_rank": None, "topk_method": "greedy", "n_group": None, "topk_group": None},
            "biases": {"attention_bias": True, "mlp_bias": True},
        },
    ),
    "deepseek_v3": Kind(
        settings={**EXPERTS, **_LATENT, **GROUPS, "num_key_value_heads": HEADS, "n_shared_experts": 2},
        variants={"full-query": {"q_lora_rank": None, "rope_interleave": False}, **BIASES, **GROUPED},
    ),
    "deepseek_v32": Kind(
        settings={
            **EXPERTS,
            **MIXED,
            **_LATENT,
            **GROUPS,
            **_INDEXER,
        },
        variants=BIASES,
    ),
    "axk1": Kind(
        settings={**EXPERTS, **MIXED, **_LATENT, **GROUPS, "num_key_value_heads": HEADS},
        variants={**BIASES},
    ),
    "axk2": Kind(
        settings={
            **EXPERTS,
            **MIXED,
            **_LATENT,
            **GROUPS,
            **_INDEXER,
            "gated_norm_rank": 3,
        },
        variants=BIASES,
    ),
    "glm4_moe_lite": Kind(
        settings={**EXPERTS, "num_key_value_heads": HEADS, **MIXED, **_LATENT, **GROUPS},
        variants={"full-query": {"q_lora_rank": None}, **BIASES},
    ),
    "glm_moe_dsa": Kind(
        settings={
            **EXPERTS,
            **MIXED,
            **_LATENT,
            **GROUPS,
            **_INDEXER,
            "indexer_types": ["full", "shared"],
        },
        variants=BIASES,
    ),
    "hy_v4": Kind(
        settings={
            **EXPERTS,
            **MIXED,
            **_LATENT,
            **GROUPS,
            **_INDEXER,
            "indexer_types": ["full", "shared"],
            "hc_mult": 2,
        },
        variants=BIASES,
    ),
    "longcat_flash": Kind(
        settings={
            **EXPERTS,
            **_LATENT,
            "num_key_value_heads": HEADS,
            "num_layers": 2,
            "head_dim": 4,
            "ffn_hidden_size": 37,
            "expert_ffn_hidden_size": 21,
            "zero_expert_num": 2,
        },
        variants={**BIASES},
    ),
    "minicpm3": Kind(
        settings={**_LATENT, "num_key_value_heads": HEADS, "dim_model_base": 16},
        variants={"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "youtu": Kind(
        settings={**_LATENT, "num_key_value_heads": HEADS},
        variants={"full-query": {"q_lora_rank": None}, **BIASES},
    ),
    "inkling_text": Kind(
        settings={
            **EXPERTS,
            **MIXED,
            "layer_types": ["hybrid_sliding", "hybrid"],
            **_INKLING,
            "n_shared_experts": 2,
            "logits_mup_width_multiplier": 2.0,
        },
        inputs=_unpadded,
    ),
    "inkling2_text": Kind(
        settings={
            **EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            **_INKLING,
            "n_layers_per_attn_res_block": 2,
            "qk_l2_clip_threshold": 2.0,
            "rel_l2_clip_threshold": 1.0,
        },
        inputs=_unpadded,
    ),
    "minimax_m3_vl_text": Kind(
        settings={
            **EXPERTS,
            **MIXED,
            "layer_types": ["minimax_m3_sparse", "full_attention"],
            "dense_intermediate_size": 41,
            "rotary_dim": 4,
            "index_n_heads": KV_HEADS,
            "index_head_dim": 8,
            "index_block_size": 2,
            "index_topk_blocks": 2,
            "index_local_blocks": 1,
        },
    ),
}

KINDS: dict[str, Kind] = {
    **made_flat(_FLAT, tied={"minicpm3", "youtu"}),
    "deepseek_v4": Kind(make=_deepseek_v4, variants={"tied": {"tie_word_embeddings": True}}),
    "dots3_note_text": Kind(make=dots3_text, variants={**BIASES, "tied": {"tie_word_embeddings": True}}),
}

"""Vision-language models of which the language model has experts, latent attention or layers of several kinds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo.flat import HEADS, KV_HEADS, UNPADDED, flat
from tests.zoo.form import Draw, Kind
from tests.zoo.patch_grids import ROPE, grid, vlm, width
from tests.zoo.towers import audio_tower, pixels, with_images

_SPARSE = {
    "moe_intermediate_size": 19,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": lambda heads: heads,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "head_dim": 4,
}
_INKLING = {
    "unpadded_vocab_size": UNPADDED,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": KV_HEADS,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "d_rel": 4,
    "rel_extent": 16,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "num_hidden_layers": 3,
    "log_scaling_n_floor": 3,
    "qk_l2_clip_threshold": 2.0,
    "rel_l2_clip_threshold": 1.0,
    "moe_intermediate_size": 19,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_layers_per_attn_res_block": 2,
}
_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": lambda heads: heads // 2,
    "linear_num_value_heads": lambda heads: heads,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
_MINICPM = {"image_size": 16, "insert_layer_id": 0}
_MINIMAX = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 19,
    "dense_intermediate_size": 37,
    "shared_intermediate_size": 23,
    "rotary_dim": 4,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["minimax_m3_sparse", "full_attention"],
    "index_n_heads": KV_HEADS,
    "index_head_dim": 8,
    "index_block_size": 2,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 131,
    "hidden_size_per_layer_input": 6,
    "global_head_dim": 12,
}
_GEMMA4_EXPERTS = {
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 19,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_MISTRAL = {
    "moe_intermediate_size": 19,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
_STEP = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "sliding_window": 4,
    "moe_intermediate_size": 19,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "share_expert_dim": 23,
    "num_sliding_attention_heads": HEADS,
    "swiglu_limits": [None, 0.5],
    "swiglu_limits_shared": [None, 0.5],
}


def _packed(config: PretrainedConfig, draw: Draw) -> dict[str, Any]:
    shapes = {"spatial_shapes": torch.tensor([[4, 4]] * 2), "pixel_attention_mask": torch.ones(2, 16).long()}
    return {"pixel_values": draw.normal(2, 16, 48), **shapes}


def _target_sizes(config: PretrainedConfig, draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.normal(1, 3, 4, 4 * 32), "target_sizes": torch.tensor([[4, 4]] * 2)}


def _tokens(config: PretrainedConfig, draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.normal(8, 8, 8, 3), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}


def _crops(config: PretrainedConfig, draw: Draw) -> dict[str, Any]:
    """One crop for each image; each of its four tokens pools four patches, the last one less."""
    pools = torch.arange(32).view(8, 4)
    pools[3, 3] = -1
    sizes = {"image_grids": torch.tensor([[2, 2, 0, 0]] * 2), "image_num_crops": torch.tensor([1, 1])}
    return {"pixel_values": draw.normal(2, 16, 48), "image_token_pooling": pools, **sizes}


def _positions(config: PretrainedConfig, draw: Draw) -> dict[str, Any]:
    place = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, 16, 2)
    return {"pixel_values": draw.normal(2, 16, 48), "image_position_ids": place}


def _merged_positions(config: PretrainedConfig, draw: Draw) -> dict[str, Any]:
    place = torch.cartesian_prod(torch.arange(2), torch.arange(2)).expand(2, 4, 2)
    return {"pixel_values": draw.normal(2, 4, 192), "image_position_ids": place}


def _sound(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return {"input_features": draw.normal(2, 12, 8), "attention_mask": torch.ones(2, 12).bool()}


def _audio(heads: int) -> dict[str, Any]:
    return audio_tower(heads, downsample_hidden_size=5)


_ROUNDING = "rounding of float32 alone is above the tolerance"

KINDS: dict[str, Kind] = {
    "inkling2": Kind(
        make=vlm(
            "inkling2",
            _INKLING,
            {"posemb_grid_size": 4, "projection_hidden_dim": 26, "text_hidden_size": width, "mlp_ratio": 1.3},
            rope={},
            experts_implementation="eager",
        ),
        inputs=with_images(4, _tokens),
    ),
    "kimi_k25": Kind(
        make=vlm(
            "kimi_k25",
            {"model_type": "deepseek_v3", **_LATENT, **_SPARSE},
            {"pos_emb_height": 4, "pos_emb_width": 4, "merge_kernel_size": [2, 2]},
            rope={},
            projection_hidden_size=width,
            experts_implementation="eager",
        ),
        inputs=with_images(4, grid(4, 3, 4, 4)),
    ),
    "lfm2_vl": Kind(
        make=vlm(
            "lfm2_vl",
            {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
            {"num_patches": 16},
            rope={},
            projector_hidden_size=26,
            downsample_factor=2,
        ),
        inputs=with_images(4, _packed),
    ),
    "lfm3_vl": Kind(
        double=_ROUNDING,
        make=vlm(
            "lfm3_vl",
            {
                "initializer_range": 0.3,
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "sliding_attention"],
                "sliding_window": 4,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
            {"layer_types": ["conv", "full_attention"], "num_key_value_heads": lambda heads: heads // 2},
            rope={},
            projector_hidden_size=26,
        ),
        inputs=with_images(4, grid()),
    ),
    "minicpm_ocr": Kind(
        double=_ROUNDING,
        make=vlm("minicpm_ocr", _QWEN3_5, _MINICPM, _PARTIAL, insert_layer_id=0, downsample_mode="16x"),
        inputs=with_images(1, _target_sizes),
    ),
    "minicpmv4_6": Kind(
        double=_ROUNDING,
        make=vlm("minicpmv4_6", _QWEN3_5, _MINICPM, _PARTIAL, insert_layer_id=0, image_size=16),
        inputs=with_images(1, _target_sizes),
    ),
    "minicpmv4_7": Kind(
        double=_ROUNDING,
        make=vlm("minicpmv4_7", _QWEN3_5, _MINICPM, _PARTIAL, insert_layer_id=0, image_size=16),
        inputs=with_images(1, _target_sizes, "mm_token_type_ids"),
    ),
    "minimax_m3_vl": Kind(
        make=vlm(
            "minimax_m3_vl",
            _MINIMAX,
            {"image_size": 16},
            rope={},
            projector_hidden_size=26,
            experts_implementation="eager",
        ),
        inputs=with_images(4, grid()),
    ),
    "muse_glimmer": Kind(
        double=_ROUNDING,
        make=vlm(
            "muse_glimmer",
            {
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
                "layer_rope_theta": [10000.0, 0],
            },
            {
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "max_position_embeddings": 16,
                "layer_types": ["window_attention", "full_attention"],
            },
            rope={},
            out_hidden_size=lambda heads: 32 * heads,
            projector_hidden_size=26,
        ),
        inputs=with_images(8, grid(8)),
    ),
    "gemma4": Kind(
        double=_ROUNDING,
        make=vlm(
            "gemma4",
            _GEMMA4,
            {"head_dim": 8, "num_key_value_heads": HEADS, "pooling_kernel_size": 2, "position_embedding_size": 16},
            rope={},
            experts_implementation="eager",
            audio_config=None,  # it computes in float32, whatever the weights are
        ),
        inputs=with_images(4, _positions, "mm_token_type_ids"),
        without={"JevForDecision": "its config is that of another model type"},
        variants={
            "experts": {"text_config": _GEMMA4_EXPERTS},
            "clipped": {"vision_config": {"use_clipped_linears": True, "standardize": True}},
            "biases": {"text_config": {"attention_bias": True}},
        },
    ),
    "gemma4_audio": Kind(
        make=flat(
            "gemma4_audio",
            {
                "output_proj_dims": 26,
                "subsampling_conv_channels": [8, 4],
                "attention_chunk_size": 2,
                "attention_context_left": 3,
            },
        ),
        inputs=_sound,
        variants={"unclipped": {"use_clipped_linears": False}},
    ),
    "gemma4_unified": Kind(
        double=_ROUNDING,
        make=vlm(
            "gemma4_unified",
            {n: v for n, v in _GEMMA4.items() if "per_layer" not in n},
            {"pooling_kernel_size": 2, "mm_embed_dim": width, "mm_posemb_size": 4, "output_proj_dims": width},
            rope={},
        ),
        inputs=with_images(4, _merged_positions, "mm_token_type_ids"),
    ),
    "mistral4": Kind(
        make=flat("mistral4", {**_MISTRAL, "n_group": 2, "topk_group": 1, "experts_implementation": "eager"}),
        variants={
            "full-query": {"q_lora_rank": None, "rope_interleave": False},
            "biases": {"attention_bias": True},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    "mistral_large4": Kind(
        make=vlm(
            "mistral_large4",
            {
                **_MISTRAL,
                "num_hidden_layers": 3,
                "kv_source_layers": [0, 1, 1],
                "indexer_types": ["full", "full", "shared"],
                "no_rope_layers": [1, 0, 0],
                "index_topk": 3,
                "index_head_dim": 6,
                "index_n_heads": HEADS,
            },
            {"model_type": "pixtral", "image_size": 16},
            rope={},
            spatial_merge_size=2,
            experts_implementation="eager",
        ),
        inputs=with_images(4, pixels(16, image_sizes=[[16, 16], [16, 16]])),
    ),
    "molmo2": Kind(
        make=vlm(
            "molmo2",
            {"additional_vocab_size": 5},
            {"image_size": [16, 16], "num_position_embeddings": 16, "num_key_value_heads": HEADS, "head_dim": 8},
            rope={},
            adapter_config=lambda heads: {
                "vision_feature_layer": [1, 0],
                "hidden_size": 8 * heads,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "head_dim": 8,
                "intermediate_size": 31,
                "text_hidden_size": 8 * heads,
            },
            image_patch_id=130,
        ),
        inputs=with_images(4, _crops, "mm_token_type_ids"),
        variants={
            "norm-after": {"text_config": {"norm_after": True, "qk_norm_type": "olmo", "attention_bias": True}},
        },
    ),
    "qwen3_omni_moe_thinker": Kind(
        make=vlm(
            "qwen3_omni_moe_thinker",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 19,
                "mlp_only_layers": [0],
            },
            {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            experts_implementation="eager",
            audio_config=_audio,
            vision_start_token_id=8,
            audio_start_token_id=9,
        ),
        inputs=with_images(4, grid()),
    ),
    "step3p7": Kind(
        make=vlm("step3p7", _STEP, {"image_size": 32}, rope={}, experts_implementation="eager"),
        inputs=with_images(4, pixels(32)),
        double="the plain model's own float32 image embeddings are off by 2.7e-5",
    ),
    "ernie4_5_vl_moe": Kind(
        make=vlm(
            "ernie4_5_vl_moe",
            {
                "moe_intermediate_size": [19, 13],
                "moe_k": 2,
                "moe_num_experts": 4,
                "moe_num_shared_experts": 2,
                "mlp_layer_types": ["dense", "sparse"],
            },
            {},
            {**ROPE, "mrope_section": [1, 1, 2]},
            experts_implementation="eager",
        ),
        inputs=with_images(4, grid(4, 48), "mm_token_type_ids", "moe_mm_token_type_ids"),
    ),
}

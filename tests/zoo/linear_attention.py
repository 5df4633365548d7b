"""Linear attention: delta rules and such, alone and in hybrids with softmax attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.flat import HEADS, KV_HEADS, LINEAR_THEN_FULL, MOE, sized
from tests.zoo.form import Draw, Kind, Make

_MLA = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_group": 2,
    "topk_group": 1,
}

# Gated delta net: several value heads use one key head.
_DELTA = {
    "linear_num_key_heads": KV_HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "layer_types": LINEAR_THEN_FULL,
    "head_dim": 8,
    "initializer_range": 0.05,
    "rms_norm_eps": 1e-2,  # a smaller one makes large gradients of small embeddings
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
    **MOE,
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

_SHARED_EXPERT = {"shared_expert_intermediate_size": 13}

_QWEN_MOE_TEXT = {
    **_DELTA,
    **MOE,
    "shared_expert_intermediate_size": 13,
    "rope_parameters": _M_ROPE,
}

_OF_TEXT = {
    "JevForDecision": "its config is that of another model type",
    **{f"{name}ForCausalLM": "its config is the text's" for name in ("Qwen3_5", "Qwen3_5Moe", "Qwen4Exp")},
}

IMAGE, VIDEO, VISION_START, VISION_END = 3, 4, 5, 6


_ROUTER_LOSS = {"router-loss": {"router_aux_loss_coef": 0.5}}  # more than any has by itself


def _router_loss(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """Asks for it with the batch: a config that asks for it cannot generate."""
    return {**batch, "output_router_logits": True} if config.router_aux_loss_coef == 0.5 else batch


def _qwen3_next(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    """Its delta nets are stored per key head: every rank needs one of its own."""
    key_heads = {"linear_num_key_heads": heads // 2}
    make = sized("qwen3_next", **{**_DELTA, **key_heads}, **MOE, **_SHARED_EXPERT, mlp_only_layers=[0])
    return make(heads, kv_heads, vocab, changes)


def _with_vision(model_type: str, **text: Any) -> Make:
    """A Qwen with a vision tower; the variants change the text."""

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        changes = dict(changes)
        tied = changes.pop("tie_word_embeddings", False)
        words = sized(f"{model_type}_text", **text)(heads, kv_heads, vocab, changes)
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
    "qwen3_next": Kind(
        make=_qwen3_next,
        inputs=_router_loss,
        variants={
            "biases": {"attention_bias": True, "mlp_only_layers": [], "tie_word_embeddings": True},
            **_ROUTER_LOSS,
        },
    ),
    "olmo_hybrid": Kind(
        make=sized(
            "olmo_hybrid",
            layer_types=LINEAR_THEN_FULL,
            linear_num_key_heads=KV_HEADS,
            linear_key_head_dim=4,
            linear_value_head_dim=6,
            initializer_range=0.05,
            rms_norm_eps=1e-2,
        ),
        variants={
            "biases": {"attention_bias": True, "linear_allow_neg_eigval": False},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    "qwen3_5_text": Kind(
        make=sized("qwen3_5_text", **_DELTA, rope_parameters=_M_ROPE),
        variants={"biases": {"attention_bias": True, "tie_word_embeddings": True}},
        without={"JevForDecision": "its config is that of another model type"},
    ),
    "qwen3_5_moe_text": Kind(
        make=sized("qwen3_5_moe_text", **_QWEN_MOE_TEXT),
        inputs=_router_loss,
        variants={
            "biases": {"attention_bias": True, "tie_word_embeddings": True},
            **_ROUTER_LOSS,
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
        make=sized(
            "kimi_linear",
            **_MLA,
            **MOE,
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
    "bailing_hybrid": Kind(
        make=sized(
            "bailing_hybrid",
            **_MLA,
            **MOE,
            layer_group_size=2,
            first_k_dense_replace=1,
        ),
        variants={
            "open-gate": {"kda_safe_gate": False},
            "biases": {"attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    "rwkv": Kind(
        settings={"layer_norm_epsilon": 1e-2},
        variants={"wide-attention": {"attention_hidden_size": 60, "use_cache": False}},
    ),
    "xlstm": Kind(
        make=sized(
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
        make=sized("qwen4_exp_text", **_QWEN4),
        variants={"biases": {"attention_bias": True, "tie_word_embeddings": True, "ple_layer_ids": []}},
    ),
    "qwen4_exp": Kind(
        make=_with_vision("qwen4_exp", **_QWEN4),
        inputs=_images,
        without=_OF_TEXT,
        variants={"biases": {"attention_bias": True, "tie_word_embeddings": True}},
    ),
}

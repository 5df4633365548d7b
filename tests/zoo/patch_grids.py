"""Vision-language models whose tower reads patches of images of any size, in one row: Qwen-VL and its like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo.flat import HEADS, KV_HEADS, UNPADDED
from tests.zoo.form import Draw, Kind, Make
from tests.zoo.towers import audio_tower, composite, merge, text, with_images

__all__ = ["KINDS", "ROPE", "grid", "vlm", "width"]

_IDS = ("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id", "audio_token_id")


def grid(tall: int = 4, *shape: int, **more: Any) -> Callable[..., dict[str, Any]]:
    """Two images of ``tall`` x 4 patches, each patch a row of 96 numbers, or of this shape."""

    def patches(config: PretrainedConfig, draw: Draw) -> dict[str, Any]:
        sizes = {"image_grid_thw": torch.tensor([[1, tall, 4]] * 2)} | {
            name: torch.tensor(value) for name, value in more.items()
        }
        return {"pixel_values": draw.normal(8 * tall, *(shape or (96,))), **sizes}

    return patches


_QWEN = with_images(4, grid(), "mm_token_type_ids")

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def _vision(heads: int) -> dict[str, Any]:
    return {
        "depth": 2,
        "num_hidden_layers": 2,
        "hidden_size": 8 * heads,
        "out_hidden_size": 8 * heads,
        "num_heads": heads,
        "num_attention_heads": heads,
        "intermediate_size": 29,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "initializer_range": 0.1,
    }


def vlm(
    model_type: str,
    language: Mapping[str, Any] | None = None,
    tower: Mapping[str, Any] | None = None,
    rope: Mapping[str, Any] | None = ROPE,
    **more: Any,
) -> Make:
    """A composite; values may be functions of the heads."""

    def fields(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
        def sized(values: Mapping[str, Any] | None) -> dict[str, Any]:
            counts = {HEADS: heads, KV_HEADS: kv_heads, UNPADDED: vocab - 3}
            values = {n: counts.get(v, v) if isinstance(v, str) else v for n, v in (values or {}).items()}
            return {name: value(heads) if callable(value) else value for name, value in values.items()}

        words = {**text(heads, kv_heads, vocab), "head_dim": 8, **({"rope_parameters": dict(rope)} if rope else {})}
        return {
            "text_config": merge(words, sized(language)),
            "vision_config": merge(_vision(heads), sized(tower)),
            **{name: vocab - 1 - place for place, name in enumerate(_IDS)},
            **sized(more),
        }

    return composite(model_type, fields)


def width(heads: int) -> int:
    return 8 * heads


def _tower(model_type: str, **more: Any) -> Make:
    """The vision config of a composite."""

    def fields(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
        sized = {name: value(heads) if callable(value) else value for name, value in more.items()}
        return {**_vision(heads), **sized}

    return composite(model_type, fields)


def _tower_inputs(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    sizes = torch.tensor([[1, 4, 4], [1, 8, 4]])
    return {"hidden_states": draw.normal(48, 96), "grid_thw": sizes}


_QWEN3_TOWER = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 19,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
_GLM_TOWER = {"image_size": 16}
_GLM_ROPE = {**ROPE, "partial_rotary_factor": 1.0}
_WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}

KINDS: dict[str, Kind] = {
    "cohere_compass": Kind(
        make=vlm(
            "cohere_compass",
            {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
            _QWEN3_TOWER,
            {"sliding_attention": ROPE, "full_attention": ROPE},
        ),
        inputs=_QWEN,
    ),
    "cosmos3_edge": Kind(
        make=vlm("cosmos3_edge", {}, {"num_patches": 16}, projector_hidden_size=26),
        inputs=with_images(4, grid(4, 48), "mm_token_type_ids"),
    ),
    "cosmos3_omni": Kind(make=vlm("cosmos3_omni", {}, _QWEN3_TOWER), inputs=_QWEN),
    "exaone4_5": Kind(
        make=vlm(
            "exaone4_5",
            {"model_type": "exaone4", "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
            {**_WINDOWS, "num_key_value_heads": lambda heads: heads // 2},
            rope={},
        ),
        inputs=with_images(8, grid(8)),
    ),
    "glm46v": Kind(make=vlm("glm46v", {}, _GLM_TOWER, _GLM_ROPE), inputs=_QWEN),
    "glm4v": Kind(make=vlm("glm4v", {}, _GLM_TOWER, _GLM_ROPE), inputs=_QWEN),
    "glm4v_moe": Kind(
        make=vlm(
            "glm4v_moe",
            {
                "moe_intermediate_size": 19,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "n_shared_experts": 1,
            },
            _GLM_TOWER,
            _GLM_ROPE,
            experts_implementation="eager",
        ),
        inputs=_QWEN,
    ),
    "glm_ocr": Kind(make=vlm("glm_ocr", {}, _GLM_TOWER, _GLM_ROPE), inputs=_QWEN),
    "glmga": Kind(make=vlm("glmga", {}, _GLM_TOWER, _GLM_ROPE), inputs=_QWEN),
    "hyperclovax_vision_v2": Kind(
        make=vlm("hyperclovax_vision_v2", {}, _WINDOWS, rope={}),
        inputs=with_images(8, grid(8)),
    ),
    "paddleocr_vl": Kind(
        make=vlm("paddleocr_vl", {}, {"image_size": 16}), inputs=with_images(4, grid(4, 3, 4, 4), "mm_token_type_ids")
    ),
    "qwen2_5_vl": Kind(
        make=vlm("qwen2_5_vl", {}, _WINDOWS),
        inputs=with_images(8, grid(8), "mm_token_type_ids"),
        variants={
            "sliding": {"text_config": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}}
        },
    ),
    "qwen2_vl": Kind(make=vlm("qwen2_vl", {}, {"embed_dim": width, "mlp_ratio": 2}), inputs=_QWEN),
    "qwen3_vl": Kind(
        make=vlm("qwen3_vl", {}, _QWEN3_TOWER),
        inputs=_QWEN,
        variants={"biases": {"text_config": {"attention_bias": True}}},
    ),
    "qwen3_vl_moe": Kind(
        make=vlm("qwen3_vl_moe", _EXPERTS, _QWEN3_TOWER, experts_implementation="eager"), inputs=_QWEN
    ),
    "video_llama_3": Kind(
        make=vlm("video_llama_3", {}, {"temporal_patch_size": 1}, rope={}),
        inputs=with_images(4, grid(4, 48, image_merge_sizes=[2, 2])),
    ),
    "hunyuan_vl": Kind(
        make=vlm(
            "hunyuan_vl",
            {},
            {
                "temporal_patch_size": 1,
                "max_image_size": 16,
                "text_hidden_size": width,
                "num_key_value_heads": lambda heads: heads,
            },
            ROPE,
        ),
        inputs=with_images(8, grid(4, 48), "mm_token_type_ids"),
    ),
    "qwen2_5_omni_thinker": Kind(
        make=vlm(
            "qwen2_5_omni_thinker",
            {},
            _WINDOWS,
            vision_start_token_id=8,
            audio_start_token_id=9,
            audio_config=audio_tower,
        ),
        inputs=with_images(8, grid(8)),
    ),
    # Towers by themselves.
    **{
        name: Kind(make=_tower(name, **settings), inputs=_tower_inputs)
        for name, settings in {
            "qwen2_vl_vision": {"embed_dim": width, "mlp_ratio": 2, "hidden_size": 20},
            "qwen2_5_vl_vision": _WINDOWS,
            "qwen3_vl_vision": _QWEN3_TOWER,
            "qwen3_vl_moe_vision": _QWEN3_TOWER,
            "qwen3_5_vision": {"num_position_embeddings": 16},
            "qwen3_5_moe_vision": {"num_position_embeddings": 16},
        }.items()
    },
}

"""Vision-language models whose tower reads images of a fixed size: LLaVA and its like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo.form import Draw, Kind, Make
from tests.zoo.towers import composite, image_tower, pixels, text, with_images

_PART = "built from the config of a part"
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def _vlm(
    model_type: str,
    language: str,
    tower: str,
    words: Mapping[str, Any] | None = None,
    image: Mapping[str, Any] | None = None,
    *,
    size: int = 12,
    **more: Any,
) -> Make:
    """A composite of a language model and a tower, by their model types; values may be functions of the heads."""

    def fields(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
        def sized(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value(heads) if callable(value) else value for name, value in values.items()}

        return {
            "text_config": {
                **({"model_type": language} if language else {}),
                **text(heads, kv_heads, vocab),
                "head_dim": 8,
                **sized(words or {}),
            },
            "vision_config": {
                **({"model_type": tower} if tower else {}),
                **image_tower(heads, image_size=size),
                **sized(image or {}),
            },
            "image_token_id": vocab - 1,
            "video_token_id": vocab - 2,
            **sized(more),
        }

    return composite(model_type, fields)


def _llava(model_type: str, language: str, tower: str, **more: Any) -> Make:
    return _vlm(model_type, language, tower, **{"image_seq_length": 9, "vision_feature_layer": -1, **more})


def _width(heads: int) -> int:
    return 8 * heads


def _video_llava(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = with_images(19, pixels(12))(head, config, words, draw)
    batch["input_ids"][:, 10:20] = config.video_token_id  # nine patches of the image; with the class token of the frame
    if "labels" in batch:
        batch["labels"][:, 1:20] = -100
    name = "pixel_values_images" if "pixel_values_images" in batch else "pixel_values"
    return {**batch, name: batch.pop("pixel_values"), "pixel_values_videos": draw.normal(2, 1, 3, 12, 12)}


def _mllama(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = with_images(1, pixels(12, 1, 2))(head, config, words, draw)
    seen = torch.zeros(2, 8, 1, 2, dtype=torch.int64)
    seen[0, 1:] = seen[1, 1:, :, :1] = 1
    tiles = {"aspect_ratio_ids": torch.tensor([[2], [1]]), "aspect_ratio_mask": torch.tensor([[[1, 1]], [[1, 0]]])}
    return {**batch, **tiles, "cross_attention_mask": seen}


def _mllama_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    tower = {
        "max_num_tiles": 2,
        "num_global_layers": 1,
        "attention_heads": heads,
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 24 * heads,
        "supported_aspect_ratios": [[1, 1], [1, 2]],
    }
    layers = {"num_hidden_layers": 3, "cross_attention_layers": [1]}
    return {
        "text_config": {**text(heads, kv_heads, vocab), **layers},
        "vision_config": {**image_tower(heads), **tower},
        "image_token_id": vocab - 1,
    }


def _hybrid(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = with_images(9, pixels(12))(head, config, words, draw)
    return {**batch, "high_res_pixel_values": draw.normal(2, 3, 32, 32)}


def _colpali_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {"vlm_config": _PALIGEMMA(heads, kv_heads, vocab, {}).to_dict(), "embedding_dim": 14}


def _colpali(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return with_images(9, pixels(12))("ColPaliModel", config.vlm_config, words, draw)


_VQ = {
    "embed_dim": 4,
    "num_embeddings": 16,
    "latent_channels": 4,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "num_patches": 4,
    "projection_dim": 12,
    "image_token_embed_dim": 12,
}

_PALIGEMMA = _vlm("paligemma", "gemma", "siglip_vision_model", projection_dim=_width)


def _florence(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = with_images(5, pixels(32))(head, config, words, draw)
    ids, mask = words["input_ids"], words["attention_mask"]
    batch |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {**batch, "labels": ids.masked_fill(mask == 0, -100)} if "For" in head else batch


def _florence_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    tower = {
        "depths": (1, 1),
        "patch_size": (7, 3),
        "patch_stride": (4, 4),
        "patch_padding": (3, 1),
        "patch_prenorm": (False, True),
        "embed_dim": (4 * heads, 8 * heads),
        "num_heads": (heads, heads),
        "num_groups": (heads, heads),
        "window_size": 3,
        "mlp_ratio": 1.3,
        "projection_dim": 8 * heads,
    }
    bart = {"d_model": 8 * heads, "init_std": 0.1, "max_position_embeddings": 64, "vocab_size": vocab}
    for part in ("encoder", "decoder"):
        bart |= {f"{part}_layers": 2, f"{part}_attention_heads": heads, f"{part}_ffn_dim": 37}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return {"vision_config": tower, "text_config": {"model_type": "bart", **bart, **ids}, "image_token_id": vocab - 1}


def _idefics(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids, mask = words["input_ids"], words["attention_mask"]
    seen = torch.ones(2, ids.shape[1], 2, dtype=torch.int64)
    seen[0, :3] = seen[1, :, 1] = 0
    batch = {**words, "pixel_values": draw.normal(2, 2, 3, 12, 12), "image_attention_mask": seen}
    return {**batch, "labels": ids.masked_fill(mask == 0, -100)} if "For" in head else batch


def _idefics_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    latents = {"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": heads, "resampler_head_dim": 6}
    vectors = {"alpha_initializer": "normal", "alphas_initializer_range": 0.7, "alpha_type": "vector"}
    return {
        **text(heads, heads, vocab),
        **vectors,
        "num_hidden_layers": 4,
        "cross_layer_interval": 2,
        "pad_token_id": 2,  # its zero embedding would give gradients without measure at the padding
        "qk_layer_norms": True,
        "freeze_text_layers": False,
        "freeze_vision_layers": False,
        "vision_config": {**image_tower(heads), "embed_dim": 8 * heads},
        "perceiver_config": latents,
    }


def _tiled(model_type: str, language: str, tower: str) -> Kind:
    """Images that are cut into tiles, as their sizes say."""
    return Kind(
        make=_llava(model_type, language, tower, image_grid_pinpoints=[[12, 24], [24, 12]]),
        inputs=with_images(30, pixels(12, 3, image_sizes=[[12, 24], [12, 24]])),
    )


def _cohere2(model_type: str) -> Kind:
    sizes = {"size": 16, "downsample_factor": 2, "alignment_intermediate_size": 44}
    return Kind(
        make=_vlm(model_type, "cohere2", "siglip_vision_model", _SLIDING, **sizes), inputs=with_images(4, pixels(16))
    )


def _gemma3(model_type: str, **more: Any) -> Make:
    return _vlm(model_type, "gemma3_text", "siglip_vision_model", _SLIDING, size=16, mm_tokens_per_image=4, **more)


_SAM = {
    "output_channels": 6,
    "window_size": 3,
    "global_attn_indexes": [1],
    "mlp_dim": 29,
    "num_hidden_layers": 2,
}

_INTERN_TOWER = {"image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": True, "attention_bias": True}
_INTERN_VARIANTS = {"plain-attention": {"vision_config": {"use_qk_norm": False, "attention_bias": False}}}

KINDS: dict[str, Kind] = {
    "aria": Kind(
        make=_vlm(
            "aria",
            "aria_text",
            "idefics3_vision",
            {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2, "intermediate_size": 48},
            projector_patch_to_query_dict={9: 4},
        ),
        inputs=with_images(4, pixels(12, pixel_mask=[[[1] * 12] * 12] * 2)),
    ),
    "aya_vision": _cohere2("aya_vision"),
    "gemma3": Kind(
        make=_gemma3("gemma3", num_labels=3),
        inputs=with_images(4, pixels(16), "token_type_ids"),
        variants={
            "softcaps": {"text_config": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}},
            "biases": {"text_config": {"attention_bias": True}},
        },
    ),
    "got_ocr2": Kind(
        make=_vlm("got_ocr2", "qwen2", "", image=_SAM, size=32, image_seq_length=4),
        inputs=with_images(4, pixels(32)),
        variants={"plain-positions": {"vision_config": {"use_rel_pos": False, "qkv_bias": False}}},
    ),
    "idefics2": Kind(
        make=_vlm(
            "idefics2",
            "mistral",
            "idefics2_vision",
            {"sliding_window": 4},
            perceiver_config=lambda heads: {
                "hidden_size": 8 * heads,
                "resampler_n_latents": 3,
                "resampler_depth": 2,
                "resampler_n_heads": heads,
                "resampler_head_dim": 4,
                "num_key_value_heads": heads // 2,
            },
        ),
        inputs=with_images(3, pixels(12, 1, pixel_attention_mask=[[[[1] * 12] * 12]] * 2)),
    ),
    "idefics3": Kind(
        make=_vlm("idefics3", "llama", "idefics3_vision", size=16, scale_factor=2),
        inputs=with_images(4, pixels(16, 1)),
    ),
    "internvl": Kind(
        make=_vlm("internvl", "qwen2", "internvl_vision", image=_INTERN_TOWER, image_seq_length=4),
        inputs=with_images(4, pixels(16)),
        variants=_INTERN_VARIANTS,
    ),
    "llava": Kind(
        make=_llava("llava", "llama", "clip_vision_model"),
        inputs=with_images(9, pixels(12)),
        variants={
            "layers": {"vision_feature_layer": [-2, -1], "multimodal_projector_bias": False},
            "siglip": {
                "vision_config": {"model_type": "siglip_vision_model"},
                "vision_feature_select_strategy": "full",
                "text_config": {"model_type": "mistral", "sliding_window": 4},
            },
        },
    ),
    "llava_next": _tiled("llava_next", "llama", "clip_vision_model"),
    "llava_next_video": _tiled("llava_next_video", "llama", "clip_vision_model"),
    "llava_onevision": _tiled("llava_onevision", "qwen2", "siglip_vision_model"),
    "mistral3": Kind(
        make=_vlm("mistral3", "mistral", "pixtral", {"sliding_window": 4}, size=16, spatial_merge_size=2),
        inputs=with_images(4, pixels(16, image_sizes=[[16, 16], [16, 16]])),
        variants={"biases": {"multimodal_projector_bias": True}},
    ),
    "mllama": Kind(
        make=composite("mllama", _mllama_config),
        inputs=_mllama,
        without={"MllamaForCausalLM": _PART, "MllamaTextModel": _PART, "MllamaVisionModel": _PART},
    ),
    "paligemma": Kind(
        make=_PALIGEMMA,
        inputs=with_images(9, pixels(12), "token_type_ids"),
        variants={"gemma2": {"text_config": {"model_type": "gemma2", **_SLIDING}}},
    ),
    "smolvlm": Kind(
        make=_vlm("smolvlm", "llama", "smolvlm_vision", size=16, scale_factor=2),
        inputs=with_images(4, pixels(16, 1)),
    ),
    "video_llava": Kind(make=_llava("video_llava", "llama", "clip_vision_model"), inputs=_video_llava),
    "vipllava": Kind(
        make=_llava("vipllava", "llama", "clip_vision_model", vision_feature_layer=[-2, -1]),
        inputs=with_images(9, pixels(12)),
    ),
    "cohere2_vision": _cohere2("cohere2_vision"),
    "deepseek_vl": Kind(make=_vlm("deepseek_vl", "llama", "siglip_vision_model"), inputs=with_images(9, pixels(12))),
    "deepseek_vl_hybrid": Kind(
        make=_vlm(
            "deepseek_vl_hybrid",
            "llama",
            "siglip_vision_model",
            high_res_vision_config=lambda heads: {**image_tower(heads, image_size=32), **_SAM},
        ),
        inputs=_hybrid,
    ),
    "ovis2": Kind(
        make=_vlm(
            "ovis2",
            "qwen2",
            "",
            image={"vocab_size": 21},
            hidden_size=_width,
            visual_indicator_token_ids=[124, 125, 126, 127],
        ),
        inputs=with_images(9, pixels(12)),
    ),
    "granite_docling": Kind(
        make=_vlm(
            "granite_docling",
            "granite_docling_text",
            "",
            image={"out_hidden_size": _width, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
            size=16,
            density_router_hidden_size=10,
        ),
        inputs=with_images(4, pixels(16, 1, pixel_attention_mask=[[True], [True]])),
    ),
    "qianfan_ocr": Kind(
        make=_vlm("qianfan_ocr", "qwen3", "", image=_INTERN_TOWER, image_seq_length=4),
        inputs=with_images(4, pixels(16)),
        variants=_INTERN_VARIANTS,
    ),
    "pp_chart2table": Kind(
        make=_vlm("pp_chart2table", "qwen2", "", image=_SAM, size=32, image_seq_length=4),
        inputs=with_images(4, pixels(32)),
    ),
    "shieldgemma2": Kind(
        make=_gemma3("shieldgemma2", yes_token_index=5, no_token_index=6),
        inputs=with_images(4, pixels(16), "token_type_ids"),
    ),
    "lighton_ocr": Kind(
        make=_vlm("lighton_ocr", "qwen3", "pixtral", size=16, spatial_merge_size=2),
        inputs=with_images(4, pixels(16, image_sizes=[[16, 16], [16, 16]])),
    ),
    "pixtral": Kind(
        settings={"image_size": 16, "patch_size": 4},
        inputs=lambda head, config, words, draw: pixels(16, image_sizes=[[16, 16], [12, 8]])(config, draw),
    ),
    "fuyu": Kind(
        make=_vlm("fuyu", "persimmon", "", patch_size=4, image_size=12),
        inputs=with_images(4, lambda config, draw: {"pixel_values": draw.normal(2, 4, 48)}),
        variants={"no-norms": {"text_config": {"qk_layernorm": False}}},
    ),
    "colpali": Kind(
        make=composite("colpali", _colpali_config),
        inputs=_colpali,
    ),
    "florence2": Kind(make=composite("florence2", _florence_config), inputs=_florence),
    "granite4_vision": Kind(
        make=_llava(
            "granite4_vision",
            "",
            "siglip_vision_model",
            words={"num_hidden_layers": 5},
            image={"hidden_size": lambda heads: 32 * heads},  # its queries have one head per 64
            image_grid_pinpoints=[[16, 32], [32, 16]],
            size=16,
            downsample_rate="2/4",
            deepstack_layer_map=[[-1, 0]],
            spatial_target_layers=[1, 2, 3, 4],
            vision_feature_select_strategy="full",
            qformer_config={"num_hidden_layers": 1, "intermediate_size": 23, "cross_attention_frequency": 1},
        ),
        inputs=with_images(14, pixels(16, 3, image_sizes=[[16, 32], [16, 32]])),
    ),
    "idefics": Kind(
        make=composite("idefics", _idefics_config),
        inputs=_idefics,
        variants={"resampler": {"use_resampler": True, "perceiver_config": {"use_resampler": True}}},
    ),
    "janus": Kind(
        make=_vlm("janus", "llama", "", image={"mlp_ratio": 1.3, "projection_dim": _width}, vq_config=_VQ),
        inputs=with_images(9, pixels(12)),
    ),
}

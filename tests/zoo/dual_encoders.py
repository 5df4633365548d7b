"""Image-text dual encoders and their like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo.form import Draw, Kind, Make
from tests.zoo.towers import composite, image_tower, text

_BACKBONE = "no task head: a tuple of feature maps"
_PART = "a part of the model, no task head"


def _pairs(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """Images beside texts, with the contrastive loss; images only for the classification head."""
    size = config.vision_config.image_size if hasattr(config.vision_config, "image_size") else 12
    pixels = draw.normal(2, 3, size, size)
    if head.endswith("ForImageClassification"):
        return {"pixel_values": pixels, "labels": draw(0, 3, 2)}
    return {"input_ids": words["input_ids"], "attention_mask": words["attention_mask"], "pixel_values": pixels} | (
        {"return_loss": True} if head.endswith("Model") else {}
    )


def _dual(
    model_type: str,
    words: Callable[[int], dict[str, Any]] = lambda heads: {},
    image: Mapping[str, Any] | None = None,
    **more: Any,
) -> Make:
    def fields(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
        return {
            "text_config": {**text(heads, heads, vocab), "hidden_size": 6 * heads, **words(heads)},
            "vision_config": {**image_tower(heads), **(image or {})},
            "num_labels": 3,
            **more,
        }

    return composite(model_type, fields)


def _blip(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids, mask = words["input_ids"], words["attention_mask"]
    batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": draw.normal(2, 3, 12, 12)}
    labels = ids.masked_fill(mask == 0, -100)
    if head.endswith("ForConditionalGeneration"):
        batch["labels"] = labels
    elif head.endswith("ForQuestionAnswering"):
        batch |= {"labels": labels[:, 2:], "decoder_input_ids": ids[:, 2:], "decoder_attention_mask": mask[:, 2:]}
    elif head.endswith("Model"):
        batch["return_loss"] = True
    return batch


def _blip_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    width = {"encoder_hidden_size": 8 * heads, "projection_dim": 20, "sep_token_id": 2}
    return {
        "text_config": {**text(heads, heads, vocab), **width},
        "vision_config": image_tower(heads),
        "image_text_hidden_size": 14,
        "projection_dim": 20,
    }


def _blip_2(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids, mask = words["input_ids"], words["attention_mask"]
    batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": draw.normal(2, 3, 12, 12)}
    if head.endswith("TextModelWithProjection"):
        return {"input_ids": ids, "attention_mask": mask}
    if head.endswith("VisionModelWithProjection"):
        return {"pixel_values": batch["pixel_values"]}
    if head.endswith("ForImageTextRetrieval"):
        return {**batch, "use_image_text_matching_head": True}
    ids = ids.masked_fill(ids == config.image_token_id, 3)
    image = torch.full((2, config.num_query_tokens), config.image_token_id)
    ids, mask = torch.cat([image, ids], 1), torch.cat([torch.ones_like(image), mask], 1)
    labels = ids.masked_fill((mask == 0) | (ids == config.image_token_id), -100)
    return {**batch, "input_ids": ids, "attention_mask": mask, "labels": labels}


def _blip_2_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    opt = {"model_type": "opt", "ffn_dim": 37, "word_embed_proj_dim": 8 * heads}
    return {
        "vision_config": image_tower(heads),
        "qformer_config": {
            **text(heads, heads, vocab),
            "hidden_size": 6 * heads,
            "encoder_hidden_size": 8 * heads,
            "intermediate_size": 23,
            "use_qformer_text_input": True,
        },
        "text_config": {**text(heads, heads, vocab), **opt},
        "num_query_tokens": 3,
        "image_text_hidden_size": 14,
        "image_token_index": vocab - 1,
    }


def _siglip2(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    shapes = torch.tensor([[3, 3], [3, 2]])
    batch = {"pixel_values": draw.normal(2, 9, 48), "pixel_attention_mask": mask, "spatial_shapes": shapes}
    return {**_pairs(head, config, words, draw), **batch}


def _clipseg(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = _pairs(head, config, words, draw)
    if head.endswith("Segmentation"):
        batch["labels"] = draw(0, 2, *batch["pixel_values"][:, 0].shape).float()
    return batch


KINDS: dict[str, Kind] = {
    "aimv2": Kind(
        make=_dual("aimv2", projection_dim=20),
        inputs=_pairs,
        variants={
            "biases": {
                "vision_config": {"qkv_bias": True, "mlp_bias": True, "is_native": True},
                "text_config": {"qkv_bias": True, "mlp_bias": True},
            }
        },
    ),
    "altclip": Kind(make=_dual("altclip", lambda heads: {"project_dim": 20}, projection_dim=20), inputs=_pairs),
    "blip": Kind(make=composite("blip", _blip_config), inputs=_blip),
    "blip-2": Kind(
        make=composite("blip-2", _blip_2_config),
        inputs=_blip_2,
        variants={"no-bias": {"vision_config": {"qkv_bias": False}}},
    ),
    "chinese_clip": Kind(make=_dual("chinese_clip", projection_dim=20), inputs=_pairs),
    "clip": Kind(make=_dual("clip", projection_dim=20), inputs=_pairs),
    "clipseg": Kind(
        make=composite(
            "clipseg",
            lambda heads, kv_heads, vocab: {
                "text_config": {**text(heads, heads, vocab), "hidden_size": 6 * heads},
                "vision_config": image_tower(heads),
                "projection_dim": 20,
                "extract_layers": (0, 1),
                "reduce_dim": 4 * heads,
                "decoder_num_attention_heads": heads,
                "decoder_intermediate_size": 23,
                "initializer_range": 0.1,  # the decoder's; it would be 1
            },
        ),
        inputs=_clipseg,
        without={"CLIPSegDecoder": _PART},
        variants={
            "complex-upsampling": {
                "use_complex_transposed_convolution": True,
                "vision_config": {"image_size": 48, "patch_size": 16},
            }
        },
    ),
    "metaclip_2": Kind(make=_dual("metaclip_2", projection_dim=20), inputs=_pairs),
    "siglip": Kind(make=_dual("siglip", lambda heads: {"projection_size": 8 * heads}), inputs=_pairs),
    "siglip2": Kind(
        make=_dual("siglip2", lambda heads: {"projection_size": 8 * heads}, {"num_patches": 9}), inputs=_siglip2
    ),
    "tipsv2": Kind(
        make=_dual(
            "tipsv2",
            lambda heads: {"hidden_size": 8 * heads},
            image={"num_register_tokens": 1, "mlp_ratio": 1.3, "layerscale_value": 0.7},
            temperature_init_value=0.3,
        ),
        inputs=_pairs,
        without={"Tipsv2VisionBackbone": _BACKBONE},
        variants={"swiglu": {"vision_config": {"use_swiglu_ffn": True, "qkv_bias": False}}},
    ),
}

"""Shapes that the vision and the vision-language types share: small towers, and configs made of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.form import Draw, Inputs, Make

__all__ = ["FFN", "IDS", "SPECIAL", "composite", "image_tower", "merge", "pixels", "text", "with_images"]

FFN = 37
SPECIAL = 8  # so many of the last ids mean images and such
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def text(heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Fields of a text config of two layers; grouped-query where its class knows that."""
    return {
        "hidden_size": 8 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 2,
        "intermediate_size": FFN,
        "max_position_embeddings": 64,
        "vocab_size": vocab,
        "initializer_range": 0.1,
        **IDS,
        **more,
    }


def image_tower(heads: int, **more: Any) -> dict[str, Any]:
    """Fields of a vision config: two layers, images of 3 x 3 patches."""
    return {
        "hidden_size": 8 * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "intermediate_size": 29,
        "image_size": 12,
        "patch_size": 4,
        "initializer_range": 0.1,
        **more,
    }


def audio_tower(heads: int, **more: Any) -> dict[str, Any]:
    return {
        "d_model": 8 * heads,
        "encoder_layers": 1,
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": 23,
        "num_mel_bins": 8,
        "output_dim": 8 * heads,
        **more,
    }


def merge(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with ``changes``; dicts inside are merged too."""
    result = dict(fields)
    for name, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(fields.get(name), Mapping)
        result[name] = merge(fields[name], value) if nested else value
    return result


def composite(model_type: str, fields: Callable[[int, int, int], Mapping[str, Any]]) -> Make:
    """A ``make`` from ``fields(heads, kv_heads, vocab)``; dicts in the changes of a variant go into those of it."""

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        return CONFIG_MAPPING[model_type](**merge(fields(heads, kv_heads, vocab), changes))

    return make


def with_images(tokens: int, pixels: Callable[[PretrainedConfig, Draw], dict[str, Any]], *more: str) -> Inputs:
    """Text with the placeholders of one image after the first token, and what the vision tower gets.

    ``more`` names masks of the placeholders that the model wants: ``mm_token_type_ids``, ``token_type_ids``.
    """

    def inputs(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
        ids, mask = words["input_ids"], words["attention_mask"]
        ids = torch.where(ids >= config.get_text_config().vocab_size - SPECIAL, 5, ids)
        image = torch.full((len(ids), tokens), config.image_token_id)
        ids = torch.cat([ids[:, :1], image, ids[:, 1:]], 1)
        mask = torch.cat([torch.ones_like(image), mask], 1)
        of_image = ids == config.image_token_id
        batch = {"input_ids": ids, "attention_mask": mask, **pixels(config, draw)}
        batch |= {name: of_image.long() for name in more}
        if head.endswith("ForSequenceClassification"):
            batch["labels"] = words["labels"]
        elif "For" in head:
            batch["labels"] = ids.masked_fill((mask == 0) | of_image, -100)
        return batch

    return inputs


def pixels(size: int, *between: int, **more: Any) -> Callable[[PretrainedConfig, Draw], dict[str, Any]]:
    """Two square images, with axes between the batch's and the channels'; ``more`` are tensors as nested lists."""
    return lambda config, draw: {
        "pixel_values": draw.normal(2, *between, 3, size, size),
        **{name: torch.tensor(value) for name, value in more.items()},
    }

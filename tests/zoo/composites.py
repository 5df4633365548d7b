"""Small configs of decoders made of several models: of bytes and patches, of text and images or sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.flat import TOKENS, flat
from tests.zoo.form import Draw, Kind
from tests.zoo.latent import dots3_text
from tests.zoo.mixtures import LLAMA4

_SHARED = {"num_hidden_layers": 2, "intermediate_size": 37, "initializer_range": 0.1}
_IMAGE, _SOUND = 3, 5  # the words that stand for parts of an image or of a sound

Changes = Mapping[str, Any]


def _text(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    text = {"vocab_size": vocab, "hidden_size": 8 * heads, "num_attention_heads": heads, "max_position_embeddings": 32}
    return {**_SHARED, **TOKENS, **text, "num_key_value_heads": kv_heads}


def _stand_in(batch: dict[str, Any], word: int, count: int, start: int = 0) -> dict[str, Any]:
    """``count`` words of each text stand for the parts of something else."""
    ids = batch["input_ids"].clone()
    ids[ids == word] = word + 10
    ids[:, start : start + count] = word
    return {**batch, "input_ids": ids}


def _blt(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    text = {**_text(heads, kv_heads, vocab), "num_key_value_heads": None}
    for name in TOKENS:
        del text[name]
    local = {**text, "hidden_size_global": 20 * heads, "cross_attn_k": 2}
    whole = {**text, "hidden_size": 20 * heads}
    del whole["vocab_size"]
    return CONFIG_MAPPING["blt"](
        **TOKENS,
        vocab_size=vocab,
        patcher_config={**text, "sliding_window": 4},
        encoder_config=local,
        decoder_config=local,
        global_config=whole,
        cross_attn_k=2,
        patching_threshold=4.42,
        max_patch_length=3,
        local_attention_window_len=4,
        encoder_hash_byte_group_size=[3, 4],
        encoder_hash_byte_group_vocab=23,
        max_position_embeddings=32,
        initializer_range=0.1,
        num_hidden_layers=2,  # which the cache asks for
        **changes,
    )


def _emu3(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    words = {f"<|visual token {code:06d}|>": 20 + code for code in range(16)}
    words |= {"<image>": _IMAGE, "<|extra_200|>": 4}
    pixels = {"codebook_size": 16, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
    pixels |= {"attn_resolutions": [1], "hidden_size": 32, "temporal_downsample_factor": 2}
    text = _text(heads, kv_heads, vocab)
    return CONFIG_MAPPING["emu3"](vq_config=pixels, text_config=text, vocabulary_map=words, **changes)


def _emu3_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = _stand_in(batch, _IMAGE, 4)  # two rows of a code and a line break
    batch["input_ids"] = torch.where(batch["input_ids"] == 4, 14, batch["input_ids"])
    return {**batch, "pixel_values": draw.normal(2, 3, 4, 2), "image_sizes": torch.tensor([[4, 2], [4, 2]])}


def _fuyu(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    text = {**_text(heads, kv_heads, vocab), "model_type": "persimmon", "partial_rotary_factor": 0.5}
    del text["num_key_value_heads"]
    return CONFIG_MAPPING["fuyu"](
        **TOKENS, text_config=text, image_size=4, patch_size=2, image_token_id=_IMAGE, initializer_range=0.1, **changes
    )


def _fuyu_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return {**_stand_in(batch, _IMAGE, 4), "pixel_values": draw.normal(2, 4, 12)}


def _moshi(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    text = _text(heads, kv_heads, vocab)
    del text["intermediate_size"]
    text |= {"ffn_dim": 38, "num_codebooks": 3, "audio_vocab_size": 16}
    sound = {"model_type": "mimi", "hidden_size": 8 * heads, "num_attention_heads": heads, "head_dim": 8}
    sound |= {"num_key_value_heads": heads, "num_hidden_layers": 2, "intermediate_size": 37, "num_filters": 4}
    sound |= {"codebook_size": 16, "codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "num_quantizers": 4}
    sound |= {"upsampling_ratios": [2, 2], "sampling_rate": 64, "frame_rate": 8, "upsample_groups": 8 * heads}
    sound |= {"num_semantic_quantizers": 1, "max_position_embeddings": 64, "sliding_window": 16, "kernel_size": 3}
    depth = {**text, "input_size": 8 * heads, "hidden_size": 8 * heads, "max_position_embeddings": 5}
    return CONFIG_MAPPING["moshi"](
        **text, sliding_window=4, audio_encoder_config=sound, depth_decoder_config=depth, **changes
    )


def _moshi_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    if head != "MoshiForConditionalGeneration":
        return batch
    ids = batch["input_ids"]
    codes = {"moshi_audio_codes": draw(0, 16, 2, 3, 7), "user_audio_codes": draw(0, 16, 2, 3, 7)}
    return {"input_ids": ids, "text_labels": ids, "audio_labels": draw(0, 16, 2, 3, 7), **codes}


def _phi4(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    tower = {"hidden_size": 8 * heads, "num_attention_heads": heads, "intermediate_size": 37}
    vision = {**tower, "num_hidden_layers": 3, "image_size": 8, "crop_size": 8, "patch_size": 2}
    vision |= {"image_token_id": _IMAGE}
    sound = {**tower, "num_blocks": 2, "chunk_size": 100, "input_size": 9, "time_reduction": 4, "kernel_size": 3}
    sound |= {"ext_pw_out_channel": 8 * heads, "depthwise_separable_out_channel": 8 * heads, "bias_max_distance": 4}
    sound |= {"nemo_conv_channels": 6, "audio_token_id": _SOUND, "initializer_range": 0.1}
    return CONFIG_MAPPING["phi4_multimodal"](
        **{**_text(heads, kv_heads, vocab), "max_position_embeddings": 64},
        original_max_position_embeddings=64,
        vision_config=vision,
        audio_config=sound,
        **changes,
    )


def _phi4_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """Sound alone for the model without a head: it has projections of its own for sound beside images."""
    parts = torch.full((2, 16), _IMAGE)  # 2 rows of 2 and a line break, twice, and what is between them
    parts[0, 13:], parts[1, 13:15], parts[1, 15] = _SOUND, _SOUND, 20
    parts = parts[:, 13:] if head == "Phi4MultimodalModel" else parts
    result = {"input_ids": torch.cat([parts, batch["input_ids"].masked_fill(batch["input_ids"] < 6, 30)], 1)}
    result["attention_mask"] = torch.cat([torch.ones_like(parts), batch["attention_mask"]], 1)
    if "labels" in batch:
        result["labels"] = torch.cat([torch.full_like(parts, -100), batch["labels"]], 1)
    frames = torch.arange(12) < torch.tensor([[12], [7]])
    result |= {"audio_input_features": draw.normal(2, 12, 9), "audio_attention_mask": frames}
    result["audio_embed_sizes"] = torch.tensor([3, 2])
    if head != "Phi4MultimodalModel":
        seen = torch.ones(2, 2, 4, 4)
        seen[1, 1, :, 3] = 0
        result |= {"image_pixel_values": draw.normal(2, 2, 3, 8, 8), "image_attention_mask": seen}
        result["image_sizes"] = torch.tensor([[8, 8], [8, 8]])
    return result


def _llama4_vision(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    vision = {"hidden_size": 8 * heads, "intermediate_size": 32 * heads, "num_attention_heads": heads}
    vision |= {"num_hidden_layers": 2, "image_size": 8, "patch_size": 2, "initializer_range": 0.1}
    vision |= {"projector_input_dim": 28, "projector_output_dim": 28, "vision_output_dim": 28}
    return CONFIG_MAPPING["llama4_vision_model"](**{**vision, **changes})


def _llama4(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    text = flat("llama4_text", LLAMA4)(heads, kv_heads, vocab, {})
    vision = _llama4_vision(heads, kv_heads, vocab, {})
    tokens = {"image_token_index": _IMAGE, "boi_token_index": 4, "eoi_token_index": 5}
    return CONFIG_MAPPING["llama4"](text_config=text, vision_config=vision, **tokens, **changes)


def _llama4_pixels(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.normal(2, 3, 8, 8)}


def _llama4_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return {**_stand_in(batch, _IMAGE, 4), "pixel_values": draw.normal(2, 3, 8, 8)}


def _dots3_tower(heads: int) -> dict[str, Any]:
    width = 8 * heads
    tower = {"hidden_size": width, "intermediate_size": 37, "num_attention_heads": heads, "num_hidden_layers": 2}
    return tower | {"adapter_out_dim": width, "initializer_range": 0.1}


def _dots3_vision(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    vision = {**_dots3_tower(heads), "patch_size": 2, "moe_intermediate_size": 21, "adapter_in_dim": 8 * heads}
    vision |= {"pyramid_num_routed": [-1, 4], "experts_implementation": "eager"}
    return CONFIG_MAPPING["dots3_note_vision_encoder"](**{**vision, **changes})


def _dots3_audio(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    audio = {**_dots3_tower(heads), "feature_size": 16, "hop_length": 2, "downsample_hidden_size": 9}
    audio |= {"adapter_input_size": 8 * heads}
    return CONFIG_MAPPING["dots3_note_audio_encoder"](**{**audio, **changes})


def _dots3(heads: int, kv_heads: int, vocab: int, changes: Changes) -> PretrainedConfig:
    return CONFIG_MAPPING["dots3_note"](
        experts_implementation="eager",
        text_config=dots3_text(heads, kv_heads, vocab, {}),
        vision_config=_dots3_vision(heads, kv_heads, vocab, {}),
        audio_config=_dots3_audio(heads, kv_heads, vocab, {}),
        image_token_id=_IMAGE,
        video_token_id=4,
        audio_token_id=_SOUND,
        **changes,
    )


def _dots3_pixels(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.normal(16, 12), "grid_thw": torch.tensor([[1, 2, 4], [1, 2, 4]])}


def _dots3_sounds(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return {"input_features": draw.normal(2, 16, 16), "chunk_sample_lengths": torch.tensor([30, 27])}


def _dots3_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = _stand_in(_stand_in(batch, _IMAGE, 2), _SOUND, 2, start=2)
    batch |= {"pixel_values": draw.normal(16, 12), "image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 4]])}
    return {**batch, "input_features": draw.normal(2, 16, 16), "chunk_sample_lengths": torch.tensor([30, 27])}


_OF_TEXT = "takes the config of the text model alone"

KINDS: dict[str, Kind] = {
    "blt": Kind(make=_blt),
    "emu3": Kind(make=_emu3, inputs=_emu3_inputs, without={"Emu3ForCausalLM": _OF_TEXT, "Emu3TextModel": _OF_TEXT}),
    "fuyu": Kind(make=_fuyu, inputs=_fuyu_inputs),
    "moshi": Kind(
        make=_moshi,
        inputs=_moshi_inputs,
        without={"MoshiForConditionalGeneration": "no policy: its codebooks are parameters of three dims inside lists"},
    ),
    "llama4": Kind(
        make=_llama4,
        inputs=_llama4_inputs,
        without={
            "Llama4ForCausalLM": _OF_TEXT,
            "Llama4TextModel": _OF_TEXT,
            "Llama4VisionModel": "takes the config of the vision model alone",
        },
    ),
    "llama4_vision_model": Kind(make=_llama4_vision, inputs=_llama4_pixels),
    "dots3_note_vision_encoder": Kind(make=_dots3_vision, inputs=_dots3_pixels),
    "dots3_note_audio_encoder": Kind(make=_dots3_audio, inputs=_dots3_sounds),
    "dots3_note": Kind(make=_dots3, inputs=_dots3_inputs, without={"Dots3NoteForCausalLM": _OF_TEXT}),
    "phi4_multimodal": Kind(make=_phi4, inputs=_phi4_inputs, double="rounding of float32 alone is above the tolerance"),
}

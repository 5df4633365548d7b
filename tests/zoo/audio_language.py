"""Language models that hear: a text decoder after an audio encoder and a projector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.form import Draw, Inputs, Kind, Make

__all__ = ["KINDS"]

FRAMES, HEARD, MELS, SEQ = 32, 20, 12, 14  # frames of the longer and of the shorter sound; text with sound in it


def _text(model_type: str, heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {"model_type": model_type, "vocab_size": vocab, "hidden_size": 8 * heads}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"intermediate_size": 37, "max_position_embeddings": 64, "initializer_range": 0.1, "head_dim": 8}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {**sizes, **{name: value for name, value in changes.items() if not name.startswith("audio.")}}


def _ear(heads: int, **own: Any) -> dict[str, Any]:
    """An encoder like Whisper's, by the names of newer configs."""
    sizes: dict[str, Any] = {"hidden_size": 12 * heads, "num_hidden_layers": 2, "num_attention_heads": heads}
    sizes |= {"intermediate_size": 31, "num_mel_bins": MELS, "max_source_positions": FRAMES // 2}
    return {**sizes, "initializer_range": 0.1, **own}


def _old_ear(heads: int, **own: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"d_model": 12 * heads, "encoder_layers": 2, "encoder_attention_heads": heads}
    return {**sizes, "encoder_ffn_dim": 31, "num_mel_bins": MELS, "initializer_range": 0.1, **own}


def _hearing(model_type: str, text_type: str, ear: str, **own: Any) -> Make:
    """``ear``: which encoder; ``own``: fields of the outer config."""

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        if ear == "old":
            audio = _old_ear(heads, model_type=f"{model_type}_encoder", max_source_positions=FRAMES // 2)
        elif ear == "windowed":
            audio = _old_ear(heads, model_type=f"{model_type}_encoder", n_window=50, n_window_infer=100)
            audio |= {"output_dim": 8 * heads, "downsample_hidden_size": 6}
        elif ear == "stacked":  # four frames become one whose width the config calls intermediate_size
            audio = _ear(heads, intermediate_size=48 * heads)
        else:
            audio = _ear(heads, **({"model_type": "audioflamingo3_encoder"} if "flamingo" in model_type else {}))
        text = _text(text_type, heads, kv_heads, vocab, changes)
        token = {"audio_token_index" if model_type == "qwen2_audio" else "audio_token_id": vocab - 1}
        outer = {"num_labels": 3, "initializer_range": 0.1, "tie_word_embeddings": False, **own, **token}
        outer |= {name: changes[name] for name in ("tie_word_embeddings",) if name in changes}
        return CONFIG_MAPPING[model_type](audio_config=audio, text_config=text, **outer)

    return make


def _granite(model_type: str) -> Make:
    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        encoder: dict[str, Any] = {"input_dim": MELS, "num_layers": 2, "hidden_dim": 12 * heads, "num_heads": heads}
        encoder |= {"feedforward_mult": 2, "output_dim": 9, "context_size": 5, "max_pos_emb": 8, "dim_head": 10}
        encoder |= {"conv_kernel_size": 3}
        queries: dict[str, Any] = {"model_type": "blip_2_qformer", "hidden_size": 8 * heads, "num_hidden_layers": 2}
        queries |= {"num_attention_heads": heads, "intermediate_size": 29, "encoder_hidden_size": 12 * heads}
        queries |= {"initializer_range": 0.1}
        if model_type == "granite_speech_plus":
            encoder |= {"cat_hidden_layers": [0]}
            queries |= {"encoder_hidden_size": 24 * heads}
        text = _text("granite", heads, kv_heads, vocab, changes)
        text |= {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5}
        return CONFIG_MAPPING[model_type](
            encoder_config=encoder,
            projector_config=queries,
            text_config=text,
            audio_token_index=vocab - 1,
            has_lora_adapter=False,
            downsample_rate=3,
            window_size=6,
            initializer_range=0.1,
        )

    return make


def _inputs(
    lengths: tuple[int, int], *shape: int, mask: str = "", heard: tuple[int, int] = (FRAMES, HEARD), seq: int = SEQ
) -> Inputs:
    """Text with placeholders for ``lengths`` pieces of sound, and the sound; ``mask``: the name of the sound's mask."""

    def inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
        audio_token, place = config.audio_token_id, torch.arange(seq)
        attention = (place < torch.tensor([[seq], [seq - 2]])).long()
        sound = (place >= 2) & (place < torch.tensor(lengths)[:, None] + 2)
        ids = draw(3, audio_token, 2, seq).masked_fill(attention == 0, 0).masked_fill(sound, audio_token)
        text = {"input_ids": ids, "attention_mask": attention, "input_features": draw.normal(2, *shape)}
        frames = (torch.arange(heard[0]) < torch.tensor(heard)[:, None]).long()
        if mask == "pieces":
            text["input_features_mask"] = torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]
        elif mask:
            text[mask] = frames
        if config.model_type == "moss_transcribe_diarize":
            text["padding_mask"] = frames
        if head.endswith("ForTokenClassification"):
            return text | {"labels": draw(0, config.num_labels, 2, seq).masked_fill(attention == 0, -100)}
        if head.endswith("ForConditionalGeneration"):
            return text | {"labels": ids.masked_fill((attention == 0) | sound, -100)}
        return text

    return inputs


_MASKED = _inputs((8, 5), MELS, FRAMES, mask="input_features_mask")
_TIED = {"tied": {"tie_word_embeddings": True}}
_GRANITE_INPUTS = _inputs((4, 3), 10, MELS, mask="pieces")

KINDS: dict[str, Kind] = {
    "qwen2_audio": Kind(
        make=_hearing("qwen2_audio", "qwen2", "old"),
        inputs=_inputs((8, 5), MELS, FRAMES, mask="feature_attention_mask"),
    ),
    "voxtral": Kind(
        make=_hearing("voxtral", "llama", "stacked"),
        inputs=_inputs((4, 4), MELS, FRAMES),
        variants={"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "granite_speech": Kind(
        make=_granite("granite_speech"),
        inputs=_GRANITE_INPUTS,
    ),
    "granite_speech_plus": Kind(
        make=_granite("granite_speech_plus"),
        inputs=_GRANITE_INPUTS,
    ),
    "audioflamingo3": Kind(
        make=_hearing("audioflamingo3", "qwen2", "new"),
        inputs=_MASKED,
    ),
    "musicflamingo": Kind(
        make=_hearing("musicflamingo", "qwen2", "new"),
        inputs=_MASKED,
    ),
    "glmasr": Kind(
        make=_hearing("glmasr", "llama", "stacked"),
        inputs=_inputs((4, 2), MELS, FRAMES, mask="input_features_mask"),
        variants=_TIED,
    ),
    "qwen3_asr": Kind(
        make=_hearing("qwen3_asr", "qwen3", "windowed", timestamp_token_id=1),
        # a whole chunk of 100 frames becomes 13 pieces, hard-coded
        inputs=_inputs((26, 16), MELS, 200, mask="input_features_mask", heard=(200, 120), seq=32),
        variants=_TIED,
    ),
    "moss_transcribe_diarize": Kind(
        make=_hearing("moss_transcribe_diarize", "qwen3", "new", audio_chunk_size=64),
        inputs=_inputs((4, 3), MELS, FRAMES, mask="input_features_mask"),
        variants=_TIED,
    ),
}

"""Speech and audio encoders: the wav2vec2 family, spectrogram transformers, CTC models, CLAP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.form import Draw, Inputs, Kind, Make

__all__ = ["KINDS", "ragged", "wave_config"]

SAMPLES, FRAMES, MELS = 96, 40, 12
_STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}
_QUANTIZER = "training draws Gumbel noise for the codewords"


def ragged(length: int) -> torch.Tensor:
    """The mask of two sequences, the second shorter."""
    return (torch.arange(length) < torch.tensor([[length], [length * 2 // 3]])).long()


# Masks over time and features, drawn from numpy in training.
SPEC_AUGMENT: dict[str, Any] = {"apply_spec_augment": True, "mask_time_prob": 0.4, "mask_time_length": 2}
SPEC_AUGMENT |= {"mask_feature_prob": 0.3, "mask_feature_length": 3}


def wave_config(model_type: str, heads: int, vocab: int, **own: Any) -> PretrainedConfig:
    """Fields of the wav2vec2 family; each config takes those that it has."""
    config_class = CONFIG_MAPPING[model_type]
    fields = {name for base in config_class.__mro__ for name in vars(base).get("__annotations__", {})}
    sizes: dict[str, Any] = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 37, "vocab_size": vocab, "initializer_range": 0.1}
    sizes |= {"conv_dim": (12, 14), "conv_stride": (3, 2), "conv_kernel": (5, 3)}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "conv_depthwise_kernel_size": 3}
    sizes |= {**SPEC_AUGMENT, "ctc_loss_reduction": "mean"}
    sizes |= {"use_weighted_layer_sum": True, "classifier_proj_size": 11, "feature_projection_input_dim": MELS}
    sizes |= {"tdnn_dim": (9, 7), "tdnn_kernel": (3, 1), "tdnn_dilation": (1, 1), "xvector_output_dim": 13}
    sizes |= {"num_codevectors_per_group": 5, "codevector_dim": 6, "proj_codevector_dim": 10, "num_ctc_classes": 17}
    sizes |= {"num_adapter_layers": 2, "max_source_positions": 64, "num_clusters": 7}
    sizes = {name: value for name, value in sizes.items() if name in fields}
    return config_class(num_labels=3, **{**sizes, **own})


def _wave(model_type: str, **own: Any) -> Make:
    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        return wave_config(model_type, heads, vocab, **{**own, **changes})

    return make


def _sound(name: str, *shape: int) -> Inputs:
    """A batch of waves or spectrograms, with labels."""

    def inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
        sound: dict[str, Any] = {name: draw.normal(2, *shape), "attention_mask": ragged(shape[0])}
        if head.endswith("ForCTC"):
            sound["labels"] = draw(1, config.vocab_size, 2, 4).masked_fill(ragged(4) == 0, -100)
        elif head.endswith("ForAudioFrameClassification"):
            frames = shape[0]
            strides = getattr(config, "conv_stride", ())
            for kernel, stride in zip(getattr(config, "conv_kernel", ()), strides, strict=True):
                frames = (frames - kernel) // stride + 1
            sound["labels"] = torch.nn.functional.one_hot(draw(0, config.num_labels, 2, frames), config.num_labels)
        elif "labels" in batch and not head.endswith("ForPreTraining"):
            sound["labels"] = batch["labels"]
        return sound

    return inputs


def _encoded(model_type: str, encoder: Mapping[str, Any]) -> Make:
    """A CTC config around the config of an encoder."""

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        sizes: dict[str, Any] = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_hidden_layers": 2}
        sizes |= {"intermediate_size": 37, "num_mel_bins": MELS, "subsampling_conv_channels": 6}
        sizes |= {"max_position_embeddings": 64, "initializer_range": 0.03, "num_key_value_heads": heads}
        sizes |= {**encoder, **changes}
        return CONFIG_MAPPING[model_type](encoder_config=sizes, vocab_size=vocab, pad_token_id=0)

    return make


def _spectrogram(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    sizes: dict[str, Any] = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 37, "initializer_range": 0.1, "num_labels": 3}
    sizes |= {"patch_size": 4, "frequency_stride": 3, "time_stride": 3, "max_length": FRAMES, "num_mel_bins": MELS}
    return CONFIG_MAPPING["audio-spectrogram-transformer"](**{**sizes, **changes})


def _spectrogram_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    return {"input_values": draw.normal(2, FRAMES, MELS)} | {k: v for k, v in batch.items() if k == "labels"}


def _clap(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    text: dict[str, Any] = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_hidden_layers": 2}
    text |= {"intermediate_size": 37, "vocab_size": vocab, "max_position_embeddings": 32, "projection_dim": 10}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    audio: dict[str, Any] = {"patch_embeds_hidden_size": 8 * heads, "hidden_size": 16 * heads, "depths": [2, 2]}
    audio |= {"num_attention_heads": [heads, 2 * heads], "window_size": 4, "spec_size": 32, "num_mel_bins": 8}
    audio |= {"num_classes": 5, "projection_dim": 10, "mlp_ratio": 1.5, "num_hidden_layers": 2}
    return CONFIG_MAPPING["clap"](text_config=text, audio_config={**audio, **changes}, projection_dim=10)


def _clap_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    fused = config.audio_config.enable_fusion
    sound = {"input_features": draw.normal(2, 4 if fused else 1, 128, 8), "return_loss": True}
    return batch | sound | ({"is_longer": torch.tensor([[True], [True]])} if fused else {})


_WAVE = _sound("input_values", SAMPLES)
_FEATURES = _sound("input_features", FRAMES, MELS)
_ADAPTER = {"add_adapter": True, "output_hidden_size": 26}

KINDS: dict[str, Kind] = {
    "wav2vec2": Kind(
        make=_wave("wav2vec2"),
        inputs=_WAVE,
        variants={"stable": _STABLE, "adapter": _ADAPTER, "attention adapters": {**_STABLE, "adapter_attn_dim": 5}},
        without={"Wav2Vec2ForPreTraining": _QUANTIZER},
    ),
    "hubert": Kind(
        make=_wave("hubert"),
        inputs=_WAVE,
        variants={"stable": _STABLE, "batch norm": {"conv_pos_batch_norm": True, "feat_proj_layer_norm": False}},
    ),
    "wav2vec2-bert": Kind(
        double="rounding of float32 alone is above the tolerance",
        make=_wave("wav2vec2-bert", left_max_position_embeddings=5, right_max_position_embeddings=3),
        inputs=_FEATURES,
        variants={
            "relative": {"position_embeddings_type": "relative"},
            "rotary": {"position_embeddings_type": "rotary"},
            "adapter": {"add_adapter": True, "use_intermediate_ffn_before_adapter": True},
        },
    ),
    "wav2vec2-conformer": Kind(
        make=_wave("wav2vec2-conformer"),
        inputs=_WAVE,
        variants={"rotary": {"position_embeddings_type": "rotary"}, "adapter": _ADAPTER},
        without={"Wav2Vec2ConformerForPreTraining": _QUANTIZER},
    ),
    "wavlm": Kind(
        make=_wave("wavlm", num_buckets=8, max_bucket_distance=6, mask_feature_prob=0.0),  # its config lacks a field
        inputs=_WAVE,
        variants={"stable": _STABLE},
    ),
    "unispeech": Kind(
        make=_wave("unispeech"),
        inputs=_WAVE,
        variants={"stable": _STABLE},
        without={"UniSpeechForPreTraining": _QUANTIZER},
    ),
    "unispeech-sat": Kind(
        make=_wave("unispeech-sat"),
        inputs=_WAVE,
        variants={"stable": _STABLE},
    ),
    "data2vec-audio": Kind(
        make=_wave("data2vec-audio", conv_pos_kernel_size=3, num_conv_pos_embeddings=2),
        inputs=_WAVE,
        variants={"adapter": _ADAPTER},
    ),
    "sew": Kind(
        make=_wave("sew"),
        inputs=_WAVE,
    ),
    "sew-d": Kind(
        make=_wave("sew-d", max_position_embeddings=32, position_buckets=4),
        inputs=_WAVE,
        variants={"own keys": {"share_att_key": False}},
    ),
    "audio-spectrogram-transformer": Kind(
        make=_spectrogram,
        inputs=_spectrogram_inputs,
    ),
    "parakeet_ctc": Kind(
        make=_encoded("parakeet_ctc", {"subsampling_factor": 4, "conv_kernel_size": 3}),
        inputs=_FEATURES,
        variants={"no biases": {"attention_bias": False, "convolution_bias": False}},
    ),
    "lasr_ctc": Kind(
        make=_encoded("lasr_ctc", {"conv_kernel_size": 3}),
        inputs=_FEATURES,
        variants={"biases": {"attention_bias": True, "convolution_bias": True}},
    ),
    "clap": Kind(
        make=_clap,
        inputs=_clap_inputs,
        variants={"fusion": {"enable_fusion": True, "fusion_type": "aff_2d"}},
    ),
}

"""Encoder-decoders that hear or speak: Whisper, SpeechT5, Moonshine, Seamless, Dia, MusicGen and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.audio import FRAMES, MELS, SAMPLES, SPEC_AUGMENT, ragged, wave_config
from tests.zoo.form import Draw, Inputs, Kind, Make
from tests.zoo.seq2seq import bart_like, bert, decoder_inputs, parts, t5_like

__all__ = ["KINDS"]

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_UNTIED = {"tie_word_embeddings": False}


def _heard(name: str, *shape: int, mask: bool = True) -> Inputs:
    """Sound for the encoder, words for the decoder."""

    def inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
        if head.endswith("ForCausalLM"):
            return batch
        sound: dict[str, Any] = {name: draw.normal(2, *shape)}
        if mask:
            sound["attention_mask"] = ragged(shape[-2] if len(shape) == 2 else shape[-1])
        if head.endswith("ForAudioClassification"):
            return sound | {"labels": batch["labels"]}
        vocab = config.get_text_config(decoder=True).vocab_size
        return sound | decoder_inputs(draw, vocab, labels="For" in head or head == "SpeechEncoderDecoderModel")

    return inputs


def _tower(heads: int, kv_heads: int, **own: Any) -> dict[str, Any]:
    """Fields that the flat configs and the parts of composite ones share."""
    sizes: dict[str, Any] = {"hidden_size": 8 * heads, "num_hidden_layers": 2, "intermediate_size": 37}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 64}
    return {**sizes, "initializer_range": 0.1, **own}


def _parakeet(heads: int, **own: Any) -> dict[str, Any]:
    sizes = {"subsampling_factor": 4, "conv_kernel_size": 3, "num_mel_bins": MELS, "subsampling_conv_channels": 6}
    return {"model_type": "parakeet_encoder", **_tower(heads, heads, **sizes), **own}


def _speecht5(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    sizes: dict[str, Any] = {"vocab_size": vocab, "hidden_size": 8 * heads, "initializer_range": 0.1, **_TOKENS}
    sizes |= {"encoder_layers": 2, "encoder_attention_heads": heads, "encoder_ffn_dim": 37}
    sizes |= {"decoder_layers": 2, "decoder_attention_heads": heads, "decoder_ffn_dim": 29}
    sizes |= {"conv_dim": (12, 14), "conv_stride": (3, 2), "conv_kernel": (5, 3), **SPEC_AUGMENT}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_mel_bins": MELS}
    sizes |= {"speech_decoder_prenet_units": 10, "speaker_embedding_dim": 9, "speech_decoder_postnet_layers": 2}
    sizes |= {"speech_decoder_postnet_units": 11, "max_speech_positions": 64, "max_text_positions": 64}
    sizes |= {"encoder_max_relative_position": 4}
    return CONFIG_MAPPING["speecht5"](**{**sizes, **changes})


def _speecht5_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    if head == "SpeechT5Model":  # without the parts that read text or sound
        states = {"input_values": draw.normal(2, 7, config.hidden_size), "attention_mask": batch["attention_mask"]}
        decoder = {"decoder_input_values": draw.normal(2, 5, config.hidden_size), "decoder_attention_mask": ragged(5)}
        return states | decoder
    wave = {"input_values": draw.normal(2, SAMPLES), "attention_mask": ragged(SAMPLES)}
    source = {name: batch[name] for name in ("input_ids", "attention_mask")} if "TextTo" in head else wave
    if head.endswith("ToText"):
        return source | decoder_inputs(draw, config.vocab_size)
    labels = draw.normal(2, 8, MELS).masked_fill(ragged(8)[..., None] == 0, -100.0)
    return source | {"labels": labels, "speaker_embeddings": draw.normal(2, config.speaker_embedding_dim)}


# The attention of both Moonshines shapes the queries by the number of key-value heads, so all counts are equal.
def _moonshine(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    sizes: dict[str, Any] = {"vocab_size": vocab, "hidden_size": 8 * heads, "intermediate_size": 37, **_TOKENS}
    sizes |= {"encoder_num_hidden_layers": 2, "encoder_num_attention_heads": heads}
    sizes |= {"decoder_num_hidden_layers": 2, "decoder_num_attention_heads": heads, "initializer_range": 0.1}
    sizes |= {"encoder_num_key_value_heads": heads, "decoder_num_key_value_heads": heads}
    return CONFIG_MAPPING["moonshine"](**{**sizes, "max_position_embeddings": 64, **changes})


def _moonshine_streaming(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    encoder = _tower(heads, heads, sample_rate=1000, sliding_windows=[[3, 1], [2, 0]], head_dim=6)
    decoder = _tower(heads, heads, vocab_size=vocab, intermediate_size=29, decoder_start_token_id=1, **_TOKENS)
    return CONFIG_MAPPING["moonshine_streaming"](encoder_config=encoder, **{**decoder, **changes})


def _canary(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    decoder = _tower(heads, kv_heads, vocab_size=vocab, intermediate_size=29, head_dim=6, **_TOKENS)
    own = {"vocab_size": vocab, "decoder_start_token_id": 1, **_TOKENS}
    composite = {name: changes[name] for name in _UNTIED if name in changes}
    decoder |= {name: value for name, value in changes.items() if name not in composite}
    return CONFIG_MAPPING["canary"](encoder_config=_parakeet(heads), decoder_config=decoder, **own, **composite)


def _cohere_asr(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    decoder = _tower(heads, kv_heads, vocab_size=vocab, intermediate_size=29, head_dim=6, **_TOKENS)
    encoder = _parakeet(heads, hidden_size=10 * heads)
    return CONFIG_MAPPING["cohere_asr"](encoder_config=encoder, decoder_start_token_id=1, **{**decoder, **changes})


def _dia(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    encoder = _tower(heads, kv_heads, vocab_size=vocab, head_dim=6)
    decoder = _tower(heads, kv_heads, vocab_size=97, intermediate_size=29, head_dim=6, num_channels=3)
    decoder |= {"cross_num_attention_heads": heads, "cross_num_key_value_heads": kv_heads, "cross_head_dim": 10}
    decoder |= {"cross_hidden_size": 8 * heads, **_TOKENS, **changes}
    return CONFIG_MAPPING["dia"](
        encoder_config=encoder, decoder_config=decoder, delay_pattern=[0, 1, 2], **_TOKENS, initializer_range=0.1
    )


def _dia_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    codes, mask = draw(3, 97, 2, 5, 3), ragged(5)
    batch |= {"decoder_input_ids": codes, "decoder_attention_mask": mask}
    labels = codes.masked_fill(mask[..., None] == 0, -100).transpose(1, 2).reshape(6, 5)
    return batch | ({"labels": labels} if "For" in head else {})


def _pop2piano_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    sound = {"input_features": draw.normal(2, 7, config.d_model), "attention_mask": batch["attention_mask"]}
    return sound | decoder_inputs(draw, config.vocab_size)


def _speech_and_bert(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    encoder = wave_config("wav2vec2", heads, vocab, **changes)
    decoder = bert(heads, vocab, intermediate_size=29, is_decoder=True, add_cross_attention=True)
    return CONFIG_MAPPING["speech-encoder-decoder"](
        encoder=encoder.to_dict(), decoder=decoder.to_dict(), pad_token_id=0, decoder_start_token_id=1
    )


def _music_decoder(model_type: str) -> Make:
    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        sizes: dict[str, Any] = {"vocab_size": vocab, "hidden_size": 8 * heads, "num_attention_heads": heads}
        sizes |= {"num_hidden_layers": 2, "ffn_dim": 29, "max_position_embeddings": 64, "initializer_factor": 0.1}
        sizes |= {"num_codebooks": 3, "pad_token_id": vocab, "bos_token_id": vocab, "decoder_start_token_id": vocab}
        return CONFIG_MAPPING[model_type](**{**sizes, **changes})

    return make


def _music(model_type: str, **own: Any) -> Make:
    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        decoder = _music_decoder(f"{model_type}_decoder")(heads, kv_heads, vocab, changes)
        codec = {"model_type": "encodec", "hidden_size": 8, "num_filters": 4, "upsampling_ratios": [2, 2]}
        codec |= {"codebook_size": 128, "codebook_dim": 8, "num_lstm_layers": 1}
        text = t5_like("t5", d_kv=5)(heads, kv_heads, vocab, {"d_model": 10 * heads}).to_dict()
        return CONFIG_MAPPING[model_type](text_encoder=text, audio_encoder=codec, decoder=decoder.to_dict(), **own)

    return make


def _music_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    decoder = getattr(config, "decoder", config)
    codes = draw(0, decoder.vocab_size, 2, 5, decoder.num_codebooks)
    if head.endswith("ForConditionalGeneration"):
        sound = {"input_features": draw.normal(2, 4, config.num_chroma)} if "Melody" in head else {}
        return batch | sound | {"labels": codes.masked_fill(ragged(5)[..., None] == 0, -100)}
    flat = codes.transpose(1, 2).reshape(-1, 5)
    text = {"encoder_hidden_states": draw.normal(2, 4, decoder.hidden_size)}
    if "Melody" not in head:
        text["encoder_attention_mask"] = ragged(4)
    return {"input_ids": flat, "attention_mask": ragged(5), **text} | ({"labels": codes} if "For" in head else {})


def _seamless(model_type: str, **own: Any) -> Make:
    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        sizes: dict[str, Any] = {"vocab_size": vocab, "hidden_size": 8 * heads, "initializer_range": 0.1}
        sizes |= {"t2u_vocab_size": 89, "char_vocab_size": 23, "feature_projection_input_dim": MELS}
        sizes |= {"speech_encoder_layers": 2, "speech_encoder_attention_heads": heads}
        sizes |= {"speech_encoder_intermediate_size": 31, "conv_depthwise_kernel_size": 3}
        for side in ("", "t2u_"):
            sizes |= {f"{side}encoder_layers": 2, f"{side}encoder_attention_heads": heads}
            sizes |= {f"{side}decoder_layers": 2, f"{side}decoder_attention_heads": heads}
            sizes |= {f"{side}encoder_ffn_dim": 37, f"{side}decoder_ffn_dim": 29}
            sizes |= {f"{side}max_position_embeddings": 64}
        sizes |= {"adaptor_kernel_size": 3, "adaptor_stride": 2, "max_source_positions": 64}
        sizes |= {"upsample_initial_channel": 8, "upsample_rates": [2], "upsample_kernel_sizes": [4]}
        sizes |= {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]], "unit_hifi_gan_vocab_size": 89}
        sizes |= {"t2u_variance_predictor_embed_dim": 8 * heads} if "v2" in model_type else {}
        sizes |= {"unit_embed_dim": 8, "lang_embed_dim": 4, "spkr_embed_dim": 4}
        return CONFIG_MAPPING[model_type](**{**sizes, **own, **changes})

    return make


def _seamless_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if "TextToUnit" in head:  # its encoder has no embeddings
        states = {"inputs_embeds": draw.normal(2, 7, config.hidden_size), "attention_mask": batch["attention_mask"]}
        if "v2" in head:
            counts = draw(1, 3, 2, 7) * batch["attention_mask"]
            return states | {"char_input_ids": draw(0, 23, 2, int(counts.sum(1).max())), "char_count_per_id": counts}
        return states | decoder_inputs(draw, config.t2u_vocab_size, labels="For" in head)
    sound = {"input_features": draw.normal(2, FRAMES, MELS), "attention_mask": ragged(FRAMES)}
    return (ids if "TextTo" in head else sound) | decoder_inputs(draw, config.vocab_size)


_MEL_FRAMES = _heard("input_features", FRAMES, MELS)
_SEAMLESS_PARTS = ("SpeechEncoder", "Encoder", "Decoder")
_VOCODER = "the vocoder alone: convolutions"

KINDS: dict[str, Kind] = {
    "whisper": Kind(
        make=bart_like(
            "whisper",
            num_mel_bins=MELS,
            max_source_positions=FRAMES // 2,
            max_target_positions=32,
            use_weighted_layer_sum=True,
            classifier_proj_size=11,
            **SPEC_AUGMENT,
        ),
        inputs=_heard("input_features", MELS, FRAMES, mask=False),
        variants={"untied": _UNTIED, "scaled": {"scale_embedding": True}},
        without=parts("Whisper"),
    ),
    "speech_to_text": Kind(
        make=bart_like(
            "speech_to_text",
            max_source_positions=64,
            max_target_positions=32,
            input_feat_per_channel=MELS,
            conv_kernel_sizes=(3, 3),
            conv_channels=10,
        ),
        inputs=_MEL_FRAMES,
        variants={"untied": _UNTIED},
        without=parts("Speech2Text", "Encoder", "Decoder"),
    ),
    "speecht5": Kind(
        make=_speecht5,
        inputs=_speecht5_inputs,
        variants={"untied": _UNTIED, "stable": {"feat_extract_norm": "layer", "conv_bias": True}},
        without=parts(
            "SpeechT5",
            *(f"{side}{end}" for side in ("Encoder", "Decoder") for end in ("", "WithoutPrenet", "WithSpeechPrenet")),
            *("EncoderWithTextPrenet", "DecoderWithTextPrenet"),
        ),
    ),
    "moonshine": Kind(
        make=_moonshine,
        inputs=_heard("input_values", 2500),
        variants={
            "padded heads": {"pad_head_dim_to_multiple_of": 16},
            "biases": {"attention_bias": True, "tie_word_embeddings": False},
        },
        without=parts("Moonshine", "Encoder", "Decoder"),
    ),
    "moonshine_streaming": Kind(
        make=_moonshine_streaming,
        inputs=_heard("input_values", 200),
        variants={"tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True}},
        without=parts("MoonshineStreaming", "Decoder"),
    ),
    "speech-encoder-decoder": Kind(
        make=_speech_and_bert,
        inputs=_heard("input_values", SAMPLES),
        variants={"adapter": {"add_adapter": True}},
    ),
    "canary": Kind(
        make=_canary,
        inputs=_MEL_FRAMES,
        variants={"untied": _UNTIED, "no biases": {"attention_bias": False}},
    ),
    "cohere_asr": Kind(
        make=_cohere_asr,
        inputs=_MEL_FRAMES,
        variants={"tied": {"tie_word_embeddings": True}, "no biases": {"attention_bias": False}},
        without=parts("CohereAsr", "Decoder"),
        double="a bias in front of a batch norm has no gradient, and the plain model's in float32 is 6e-6",
    ),
    "dia": Kind(
        make=_dia,
        inputs=_dia_inputs,
    ),
    "pop2piano": Kind(
        make=t5_like("pop2piano", composer_vocab_size=5),
        inputs=_pop2piano_inputs,
        variants={"plain": {"feed_forward_proj": "relu"}},
        without=parts("Pop2Piano", "Stack"),
        generates=False,  # it wants a composer
    ),
    "musicgen": Kind(
        make=_music("musicgen"),
        inputs=_music_inputs,
        without=dict.fromkeys(("MusicgenForCausalLM", "MusicgenModel"), "takes the config of musicgen_decoder"),
        generates=False,
    ),
    "musicgen_decoder": Kind(
        make=_music_decoder("musicgen_decoder"),
        inputs=_music_inputs,
        variants={"scaled": {"scale_embedding": True}},
        without=parts("Musicgen", "Decoder"),
        generates=False,
    ),
    "musicgen_melody": Kind(
        make=_music("musicgen_melody", num_chroma=6, chroma_length=3),
        inputs=_music_inputs,
        without=dict.fromkeys(
            ("MusicgenMelodyForCausalLM", "MusicgenMelodyModel"), "takes the config of musicgen_melody_decoder"
        ),
        generates=False,
    ),
    "musicgen_melody_decoder": Kind(
        make=_music_decoder("musicgen_melody_decoder"),
        inputs=_music_inputs,
        without=parts("MusicgenMelody", "Decoder"),
        generates=False,
    ),
    "seamless_m4t": Kind(
        make=_seamless("seamless_m4t", num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2),
        inputs=_seamless_inputs,
        variants={"rotary": {"position_embeddings_type": "rotary"}},
        without={**parts("SeamlessM4T", *_SEAMLESS_PARTS), "SeamlessM4TCodeHifiGan": _VOCODER},
    ),
    "seamless_m4t_v2": Kind(
        make=_seamless(
            "seamless_m4t_v2",
            t2u_variance_predictor_hidden_dim=7,
            speech_encoder_chunk_size=8,
            speech_encoder_left_chunk_num=1,
            left_max_position_embeddings=5,
            right_max_position_embeddings=3,
        ),
        inputs=_seamless_inputs,
        without={
            **parts("SeamlessM4Tv2", *_SEAMLESS_PARTS, "TextToUnitDecoder"),
            "SeamlessM4Tv2CodeHifiGan": _VOCODER,
            "SeamlessM4Tv2TextToUnitModel": "made only by the head around it, which renames fields of the config",
        },
    ),
}

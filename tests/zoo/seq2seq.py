"""Text encoder-decoders: the BART family, the T5 family, composites of two models, Seamless, UDOP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.form import Draw, Kind, Make

__all__ = ["KINDS", "bart_like", "bert", "decoder_inputs", "parts", "t5_like", "text_inputs"]

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def parts(prefix: str, *names: str) -> dict[str, str]:
    """Classes of a modeling file that are no task heads; without names, those of a BART-like model."""
    return {f"{prefix}{name}": "part of the other heads" for name in names or ("Encoder", "Decoder", "DecoderWrapper")}


def decoder_inputs(draw: Draw, vocab: int, *, labels: bool = True, length: int = 5) -> dict[str, torch.Tensor]:
    """Labels, or decoder_input_ids with their mask; shorter than the encoder's sequence, ragged."""
    ids = draw(min(3, vocab - 1), vocab, 2, length)
    mask = (torch.arange(length) < torch.tensor([[length], [length - 2]])).long()
    if labels:
        return {"labels": ids.masked_fill(mask == 0, -100)}
    return {"decoder_input_ids": ids.masked_fill(mask == 0, 0), "decoder_attention_mask": mask}


def text_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """What each head of an encoder-decoder takes beside the ids of the encoder."""
    vocab = getattr(config, "decoder_vocab_size", None) or config.get_text_config(decoder=True).vocab_size
    if head.endswith(("ForSequenceClassification", "ForTokenClassification")):
        batch["labels"] = batch["labels"].clamp(max=config.num_labels - 1)
    if head.endswith("ForSequenceClassification"):  # it reads the state of the last eos
        last = batch["attention_mask"].sum(1, keepdim=True) - 1
        batch["input_ids"] = batch["input_ids"].scatter(1, last, config.eos_token_id)
    length = batch["input_ids"].shape[-1] - 2
    if head.endswith(("ForConditionalGeneration", "MarianMTModel", "EncoderDecoderModel")):
        batch |= decoder_inputs(draw, vocab, length=length)
    elif head.endswith("Model") and not head.endswith("EncoderModel"):
        batch |= decoder_inputs(draw, vocab, labels=False, length=length)
    return batch


def bart_like(model_type: str, **own: Any) -> Make:
    """Fields of the BART family; ``own`` are those of the model type."""

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        sizes: dict[str, Any] = {"vocab_size": vocab, "max_position_embeddings": 32, "num_labels": 3}
        sizes |= {"d_model": 8 * heads, "init_std": 0.1, "decoder_start_token_id": 2, **_TOKENS}
        sizes |= {"encoder_layers": 2, "encoder_attention_heads": heads, "encoder_ffn_dim": 37}
        sizes |= {"decoder_layers": 2, "decoder_attention_heads": heads, "decoder_ffn_dim": 29}
        return CONFIG_MAPPING[model_type](**{**sizes, **own, **changes})

    return make


def _prophetnet(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    sizes: dict[str, Any] = {"vocab_size": vocab, "hidden_size": 8 * heads, "max_position_embeddings": 32}
    sizes |= {"num_encoder_layers": 2, "num_encoder_attention_heads": heads, "encoder_ffn_dim": 37}
    sizes |= {"num_decoder_layers": 2, "num_decoder_attention_heads": heads, "decoder_ffn_dim": 29}
    sizes |= {"ngram": 2, "num_buckets": 8, "relative_max_distance": 6, "init_std": 0.1, **_TOKENS}
    return CONFIG_MAPPING["prophetnet"](**{**sizes, **changes})


def t5_like(model_type: str, **own: Any) -> Make:
    """Fields of the T5 family: heads narrower than width / heads, buckets that the sequence reaches."""

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        sizes: dict[str, Any] = {"vocab_size": vocab, "d_model": 8 * heads, "d_kv": 6, "d_ff": 37, "num_heads": heads}
        sizes |= {"num_layers": 2, "num_decoder_layers": 2, "num_labels": 2, "decoder_start_token_id": 0, **_TOKENS}
        sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
        config = CONFIG_MAPPING[model_type](**{**sizes, **own, **changes})
        if "tie_word_embeddings" in changes:  # their configs force True
            config.tie_word_embeddings = changes["tie_word_embeddings"]
        return config

    return make


def _udop_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = text_inputs(head, config, batch, draw)
    corners = draw(1, 100, *batch["input_ids"].shape, 4).sort(-1).values / 100
    return batch | {"bbox": corners, "pixel_values": draw.normal(2, 3, config.image_size, config.image_size)}


def _led_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = text_inputs(head, config, batch, draw)
    return batch | {"global_attention_mask": (torch.arange(7) < torch.tensor([[1], [2]])).long()}


def _router_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = text_inputs(head, config, batch, draw)
    return batch | ({"output_router_logits": True} if head.endswith("ForConditionalGeneration") else {})


def _fsmt_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    labels = {"labels": batch["labels"][:, :5].contiguous()} if "labels" in batch else {}  # it does not shift them
    return batch | decoder_inputs(draw, config.tgt_vocab_size, labels=False) | labels


def _bigbird_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    if config.attention_type == "block_sparse":  # shorter ones are switched to full attention
        batch["input_ids"] = draw(3, config.vocab_size, 2, 17)
        batch["attention_mask"] = (torch.arange(17) < torch.tensor([[17], [12]])).long()
    return text_inputs(head, config, batch, draw)


def _t5gemma2_inputs(head: str, config: PretrainedConfig, batch: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = text_inputs(head, config, batch, draw)
    batch["input_ids"] = batch["input_ids"].clamp(max=config.eoi_token_id - 1)  # no special ones by chance
    batch["input_ids"][:, :5] = torch.tensor([*[config.image_token_id] * 4, config.eoi_token_id])
    size = config.encoder.vision_config.image_size
    return batch | {"pixel_values": draw.normal(2, 3, size, size)}


def _two_models(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    """BERT and BERT, or GPT-2 as the decoder, which is wider than the encoder."""
    encoder = bert(heads, vocab)
    if changes.get("decoder") == "gpt2":
        width = {"n_embd": 10 * heads, "n_head": heads, "n_layer": 2, "n_inner": 29, "n_positions": 32}
        decoder = CONFIG_MAPPING["gpt2"](**width, vocab_size=vocab, is_decoder=True, add_cross_attention=True)
    else:
        decoder = bert(heads, vocab, intermediate_size=29, is_decoder=True, add_cross_attention=True)
    return CONFIG_MAPPING["encoder-decoder"](
        encoder=encoder.to_dict(), decoder=decoder.to_dict(), pad_token_id=0, decoder_start_token_id=1
    )


def bert(heads: int, vocab: int, **own: Any) -> PretrainedConfig:
    """A small BERT, for composites."""
    sizes: dict[str, Any] = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 37, "max_position_embeddings": 32, "initializer_range": 0.1, **_TOKENS}
    return CONFIG_MAPPING["bert"](vocab_size=vocab, **{**sizes, **own})


def _gemma_tower(heads: int, kv_heads: int, vocab: int, **own: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"vocab_size": vocab, "hidden_size": 8 * heads, "head_dim": 6, "intermediate_size": 37}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "initializer_range": 0.1}
    sizes |= {"query_pre_attn_scalar": 6, "max_position_embeddings": 32, **_TOKENS}
    return {**sizes, **own}


def _t5gemma(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    towers = {name: changes[name] for name in ("attention_bias",) if name in changes}
    return CONFIG_MAPPING["t5gemma"](
        encoder=_gemma_tower(heads, kv_heads, vocab, hidden_size=10 * heads, **towers),
        decoder=_gemma_tower(heads, kv_heads, vocab, intermediate_size=29, **towers),
        **{"vocab_size": vocab, "num_labels": 3, "initializer_range": 0.1, **changes},
    )


def _t5gemma2(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8 * heads, "num_attention_heads": heads}
    vision |= {"num_hidden_layers": 2, "intermediate_size": 31, "image_size": 16, "patch_size": 4}
    vision |= {"vision_use_head": False}
    towers = {name: changes[name] for name in ("attention_bias",) if name in changes}
    softcaps = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0}
    return CONFIG_MAPPING["t5gemma2"](
        encoder={
            "text_config": _gemma_tower(heads, kv_heads, vocab, **softcaps, **towers),
            "vision_config": vision,
            "mm_tokens_per_image": 4,
            "image_token_index": vocab - 1,
            "boi_token_index": vocab - 2,
            "eoi_token_index": vocab - 3,
        },
        decoder=_gemma_tower(heads, kv_heads, vocab, intermediate_size=29, **softcaps, **towers),
        image_token_index=vocab - 1,
        num_labels=3,
        initializer_range=0.1,
        **{name: value for name, value in changes.items() if name not in towers},
    )


_UNTIED = {"tie_word_embeddings": False}
_SWITCH: dict[str, Any] = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
_SWITCH |= {"router_jitter_noise": 0.0, "initializer_factor": 0.5}  # at 1 the gradients are too large for 1e-5
_UDOP = {"image_size": 16, "patch_size": 8, "max_2d_position_embeddings": 64}
_T5_VARIANTS = {"gated": {"feed_forward_proj": "gated-gelu"}, "untied": _UNTIED}

KINDS: dict[str, Kind] = {
    "bart": Kind(
        make=bart_like("bart"),
        inputs=text_inputs,
        variants={"untied": _UNTIED, "scaled": {"scale_embedding": True}},
        without={
            **parts("Bart"),
            "PretrainedBartModel": "abstract, an old name",
            "BartPretrainedModel": "abstract, an old name",
        },
    ),
    "mbart": Kind(
        make=bart_like("mbart"),
        inputs=text_inputs,
        variants={"untied": _UNTIED},
        without=parts("MBart"),
    ),
    "t5": Kind(
        make=t5_like("t5"),
        inputs=text_inputs,
        variants=_T5_VARIANTS,
        without=parts("T5", "Stack"),
    ),
    "mt5": Kind(
        make=t5_like("mt5", initializer_factor=0.5),
        inputs=text_inputs,
        variants={"plain": {"feed_forward_proj": "relu"}, "untied": _UNTIED},
        without=parts("MT5", "Stack"),
    ),
    "umt5": Kind(
        make=t5_like("umt5"),
        inputs=text_inputs,
        variants={"plain": {"feed_forward_proj": "relu"}, "untied": _UNTIED},
        without=parts("UMT5", "Stack"),
    ),
    "pegasus": Kind(
        make=bart_like("pegasus"),
        inputs=text_inputs,
        variants={"untied": _UNTIED, "scaled": {"scale_embedding": True}},
        without=parts("Pegasus"),
    ),
    "marian": Kind(
        make=bart_like("marian"),
        inputs=text_inputs,
        variants={
            "untied": _UNTIED,
            "two vocabularies": {
                "share_encoder_decoder_embeddings": False,
                "decoder_vocab_size": 113,
                "scale_embedding": True,
            },
        },
        without=parts("Marian"),
    ),
    "m2m_100": Kind(
        make=bart_like("m2m_100"),
        inputs=text_inputs,
        variants={"untied": _UNTIED},
        without=parts("M2M100", "Encoder", "Decoder"),
    ),
    "blenderbot": Kind(
        make=bart_like("blenderbot"),
        inputs=text_inputs,
        variants={"untied": _UNTIED},
        without=parts("Blenderbot"),
    ),
    "blenderbot-small": Kind(
        make=bart_like("blenderbot-small"),
        inputs=text_inputs,
        variants={"untied": _UNTIED},
        without=parts("BlenderbotSmall"),
    ),
    "led": Kind(
        make=bart_like(
            "led", max_encoder_position_embeddings=32, max_decoder_position_embeddings=32, attention_window=[4, 8]
        ),
        inputs=_led_inputs,
        variants={"untied": _UNTIED},
        without=parts("LED", "Encoder", "Decoder"),
    ),
    "encoder-decoder": Kind(
        make=_two_models,
        inputs=text_inputs,
        variants={"bert and gpt2": {"decoder": "gpt2"}},
    ),
    "plbart": Kind(
        make=bart_like("plbart"),
        inputs=text_inputs,
        variants={"untied": _UNTIED},
        without=parts("PLBart"),
    ),
    "mvp": Kind(
        make=bart_like("mvp", prompt_length=3, prompt_mid_dim=19),
        inputs=text_inputs,
        variants={"prompts": {"use_prompt": True}, "untied": _UNTIED},
        without=parts("Mvp"),
    ),
    "bigbird_pegasus": Kind(
        make=bart_like("bigbird_pegasus", attention_type="original_full", block_size=2, num_random_blocks=1),
        inputs=_bigbird_inputs,
        variants={
            "block-sparse": {"attention_type": "block_sparse"},
            "biases": {"use_bias": True},
            "untied": _UNTIED,
        },
        without=parts("BigBirdPegasus"),
    ),
    "fsmt": Kind(
        make=bart_like("fsmt", src_vocab_size=149),
        inputs=_fsmt_inputs,
        variants={"tied": {"tie_word_embeddings": True, "src_vocab_size": 131}},
        without={"PretrainedFSMTModel": "abstract"},
    ),
    "longt5": Kind(
        make=t5_like("longt5", local_radius=2, global_block_size=2),
        inputs=text_inputs,
        variants={"global": {"encoder_attention_type": "transient-global"}, **_T5_VARIANTS},
        without=parts("LongT5", "Stack"),
    ),
    "switch_transformers": Kind(
        make=t5_like("switch_transformers", **_SWITCH),
        inputs=_router_inputs,
        variants={"untied": _UNTIED, "full experts": {"expert_capacity": 1}, "router bias": {"router_bias": True}},
        without=parts("SwitchTransformers", "Stack"),
    ),
    "nllb-moe": Kind(
        make=bart_like("nllb-moe", num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2),
        inputs=_router_inputs,
        variants={
            "untied": _UNTIED,
            "router": {"router_bias": True, "batch_prioritized_routing": True, "expert_capacity": 3},
        },
        without=parts("NllbMoe", "Encoder", "Decoder"),
    ),
    "pegasus_x": Kind(
        make=bart_like("pegasus_x", num_global_tokens=3, block_size=4),
        inputs=text_inputs,
        variants={"untied": _UNTIED},
        without=parts("PegasusX"),
    ),
    "prophetnet": Kind(
        make=_prophetnet,
        inputs=text_inputs,
        variants={"untied": _UNTIED, "one token": {"ngram": 1}, "plain loss": {"disable_ngram_loss": True}},
        without=parts("ProphetNet"),
    ),
    "t5gemma": Kind(
        make=_t5gemma,
        inputs=text_inputs,
        variants={"untied": _UNTIED, "biases": {"attention_bias": True}},
        without=parts("T5Gemma", "Encoder", "Decoder"),
    ),
    "t5gemma2": Kind(
        double="rounding of float32 alone is above the tolerance",
        make=_t5gemma2,
        inputs=_t5gemma2_inputs,
        variants={"untied": _UNTIED, "biases": {"attention_bias": True}},
    ),
    "udop": Kind(
        make=t5_like("udop", relative_attention_num_buckets=32, **_UDOP),  # tied to tables of 32 rows, hard-coded
        inputs=_udop_inputs,
        variants={"gated": {"feed_forward_proj": "gated-gelu"}},
        without=parts("Udop", "Stack"),
    ),
}

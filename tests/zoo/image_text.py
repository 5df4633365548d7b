"""Models in which text and image meet by cross-attention, queries or one common sequence, without placeholders."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo.form import Draw, Kind
from tests.zoo.towers import composite, image_tower, text

_PART = "a part of the model, no task head"


def _git(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    frames = (config.num_image_with_embedding,) if config.num_image_with_embedding else ()
    return {**words, "pixel_values": draw.normal(2, *frames, 3, 12, 12)}


def _queries(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """The Kosmos models: places for the queries after the first token."""
    ids, mask = words["input_ids"], words["attention_mask"]
    place = torch.zeros(2, 3 + ids.shape[1], dtype=torch.int64)
    place[:, 1:4] = 1
    ids = torch.cat([ids[:, :1], torch.full((2, 3), 4), ids[:, 1:]], 1)
    mask = torch.cat([torch.ones(2, 3, dtype=torch.int64), mask], 1)
    batch = {"input_ids": ids, "attention_mask": mask, "image_embeds_position_mask": place}
    if "For" in head:
        batch["labels"] = ids.masked_fill((mask == 0) | (place == 1), -100)
    if config.model_type == "kosmos-2":
        return {**batch, "pixel_values": draw.normal(2, 3, 12, 12)}
    rows = torch.arange(9) // 3 + 1
    columns = torch.arange(9) % 3 + 1
    patches = torch.cat([torch.stack([rows, columns], 1).expand(2, 9, 2), draw.normal(2, 9, 48)], 2)
    patches[1, 7:] = 0  # padding
    return {**batch, "flattened_patches": patches, "width": torch.tensor([3, 3]), "height": torch.tensor([3, 3])}


def _kosmos(heads: int, vocab: int) -> dict[str, Any]:
    return {
        "embed_dim": 8 * heads,
        "layers": 2,
        "ffn_dim": 37,
        "attention_heads": heads,
        "vocab_size": vocab,
        "init_std": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 64,
    }


def _instructblip(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids, mask = words["input_ids"], words["attention_mask"]
    frames = (2,) if config.model_type == "instructblipvideo" else ()
    place = config.video_token_id if frames else config.image_token_id
    ids = ids.masked_fill(ids == place, 3)
    batch = {"qformer_input_ids": ids, "qformer_attention_mask": mask}
    image = torch.full((2, config.num_query_tokens * (2 if frames else 1)), place)
    ids, mask = torch.cat([image, ids], 1), torch.cat([torch.ones_like(image), mask], 1)
    if "For" in head:
        batch["labels"] = ids.masked_fill((mask == 0) | (ids == place), -100)
    return {**batch, "input_ids": ids, "attention_mask": mask, "pixel_values": draw.normal(2, *frames, 3, 12, 12)}


def _instructblip_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    opt = {"model_type": "opt", "ffn_dim": 37, "word_embed_proj_dim": 8 * heads}
    queries = {"hidden_size": 6 * heads, "encoder_hidden_size": 8 * heads, "intermediate_size": 23}
    return {
        "vision_config": image_tower(heads),
        "qformer_config": {**text(heads, heads, vocab), **queries},
        "text_config": {**text(heads, heads, vocab), **opt},
        "num_query_tokens": 3,
        "image_token_index": vocab - 1,
        "video_token_index": vocab - 1,
    }


def _vilt(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """Images of one patch: of more, it takes the patches in random order."""
    several = (2,) if "ImagesAndText" in head else ()
    batch = {**words, "pixel_values": draw.normal(2, *several, 3, 4, 4)}
    batch.pop("start_positions", None), batch.pop("end_positions", None)
    if "QuestionAnswering" in head:
        batch["labels"] = draw(0, 2, 2, 3).float()
    elif "Classification" in head and "Token" not in head:
        batch["labels"] = draw(0, 3, 2)
    return batch


def _bridgetower(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    batch = {**words, "pixel_values": draw.normal(2, 3, 12, 12), "pixel_mask": torch.ones(2, 12, 12).long()}
    if head.endswith("ImageAndTextRetrieval"):
        batch["labels"] = draw(0, 2, 2)
    elif head.endswith("ContrastiveLearning"):
        batch["return_loss"] = True
    return batch


def _bridgetower_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    width = 32 * heads  # the vision tower has one head per 64, and all widths are one
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "num_labels": 3,
        "contrastive_hidden_size": 14,
        "initializer_range": 0.1,
        "logit_scale_init_value": 2.6,
        "text_config": {**text(heads, heads, vocab), "hidden_size": width},
        "vision_config": {**image_tower(heads), "hidden_size": width},
    }


def _flava(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids, mask = words["input_ids"], words["attention_mask"]
    batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": draw.normal(2, 3, 12, 12)}
    if head == "FlavaModel":
        return batch
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[:, 1:4] = True
    patches = (torch.arange(9) % 3 == 0).expand(2, 9).clone()
    return {
        **batch,
        "input_ids_masked": ids.masked_fill(hidden, 3),
        "mlm_labels": ids.masked_fill(~hidden, -100),
        "bool_masked_pos": patches,
        "mim_labels": draw(0, 19, 2, 9),
        "itm_labels": torch.tensor([1, 0]),
        "return_loss": True,
        "skip_unmasked_multimodal_encoder": True,
    }


def _flava_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    layers = image_tower(heads)
    return {
        "image_config": {**layers, "vocab_size": 19},
        "text_config": text(heads, heads, vocab),
        "multimodal_config": layers,
        "init_codebook": False,
        "projection_dim": 20,
        "hidden_size": 8 * heads,
    }


def _captions(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids, mask = words["input_ids"], words["attention_mask"]
    batch = {"decoder_input_ids": ids, "decoder_attention_mask": mask, "pixel_values": draw.normal(2, 3, 12, 12)}
    return {**batch, "labels": ids.masked_fill(mask == 0, -100)}


def _captions_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    crossing = {"model_type": "bert", "is_decoder": True, "add_cross_attention": True, "hidden_size": 6 * heads}
    return {
        "encoder": {"model_type": "vit", **image_tower(heads), "pooler_output_size": 22},
        "decoder": {**text(heads, heads, vocab), **crossing},
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
    }


def _evolla(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids, mask = words["input_ids"], words["attention_mask"]
    proteins = {"protein_input_ids": draw(4, 23, 2, 6), "protein_attention_mask": torch.ones(2, 6).long()}
    proteins["protein_attention_mask"][1, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, **proteins}
    return {**batch, "labels": ids.masked_fill(mask == 0, -100)} if "For" in head else batch


def _evolla_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    sizes = {"aligner_num_add_layers": 1, "aligner_ffn_mult": 2, "resampler_depth": 1, "resampler_ff_mult": 2}
    return {
        **text(heads, kv_heads, vocab),
        **sizes,
        "resampler_dim_head": 6,
        "resampler_heads": heads,
        "resampler_num_latents": 3,
        "protein_encoder_config": {**text(heads, heads, 23), "hidden_size": 4 * heads, "intermediate_size": 29},
    }


def _pix2struct(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids, mask = words["input_ids"], words["attention_mask"]
    patches = _queries("", config, words, draw)["flattened_patches"]
    batch = {"flattened_patches": patches, "attention_mask": (patches.sum(-1) != 0).float()}
    batch |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {**batch, "labels": ids.masked_fill(mask == 0, -100)}


def _pix2struct_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "d_kv": 8, "d_ff": 37}
    words = {"hidden_size": 8 * heads, "num_layers": 2, "num_heads": heads, "vocab_size": vocab, **buckets}
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    tower = {**image_tower(heads), **buckets, "patch_embed_hidden_size": 48, "seq_len": 16}
    return {"text_config": {**words, **ids}, "vision_config": tower, "initializer_range": 0.1}


def _formula(head: str, config: PretrainedConfig, words: dict[str, Any], draw: Draw) -> dict[str, Any]:
    ids, mask = words["input_ids"], words["attention_mask"]
    batch = {"pixel_values": draw.normal(2, 3, 32, 32), "decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {**batch, "labels": ids.masked_fill(mask == 0, -100)} if "For" in head else batch


def _formula_config(heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    tower = {"output_channels": 6, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 29}
    convolutions = {"post_conv_in_channels": 6, "post_conv_mid_channels": 10, "post_conv_out_channels": 14}
    decoder = {"decoder_layers": 2, "decoder_ffn_dim": 37, "decoder_attention_heads": heads, "d_model": 8 * heads}
    sizes = {"encoder_layers": 2, "encoder_attention_heads": heads, "vocab_size": vocab, "init_std": 0.1}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    return {
        "vision_config": {
            **image_tower(heads, image_size=32),
            **tower,
            **convolutions,
            "decoder_hidden_size": 8 * heads,
        },
        "text_config": {**decoder, **sizes, **ids},
        "decoder_start_token_id": 1,
    }


KINDS: dict[str, Kind] = {
    # With separate layers the head for contrastive learning calls a list of layers; shared link towers are indexed.
    "bridgetower": Kind(
        make=composite("bridgetower", _bridgetower_config),
        inputs=_bridgetower,
        variants={
            "separate-layers": {"share_cross_modal_transformer_layers": False},
            "scaled-links": {"link_tower_type": "scaled_add", "vision_config": {"share_layernorm": False}},
            "interpolated-links": {"link_tower_type": "interpolate"},
        },
    ),
    "flava": Kind(
        make=composite("flava", _flava_config),
        inputs=_flava,
        without={"FlavaForPreTraining": "no policy: its contrastive loss takes every process for a part of the batch"},
    ),
    "git": Kind(
        make=composite(
            "git",
            lambda heads, kv_heads, vocab: {**text(heads, heads, vocab), "vision_config": image_tower(heads)},
        ),
        inputs=_git,
        variants={"video": {"num_image_with_embedding": 2}},
        generates=False,
    ),
    "instructblip": Kind(
        generates=False,  # the plain one with T5 inside cannot
        make=composite("instructblip", _instructblip_config),
        inputs=_instructblip,
        without={"InstructBlipModel": "returns the outputs of its parts only, each with another inside"},
        variants={"t5": {"text_config": {"model_type": "t5", "d_kv": 8, "d_ff": 37, "decoder_start_token_id": 0}}},
    ),
    "kosmos-2": Kind(
        make=composite(
            "kosmos-2",
            lambda heads, kv_heads, vocab: {
                "text_config": _kosmos(heads, vocab),
                "vision_config": image_tower(heads),
                "latent_query_num": 3,
            },
        ),
        inputs=_queries,
    ),
    "kosmos-2.5": Kind(
        make=composite(
            "kosmos-2.5",
            lambda heads, kv_heads, vocab: {
                "text_config": _kosmos(heads, vocab),
                "vision_config": {
                    **image_tower(heads),
                    "head_dim": 8,
                    "patch_embed_hidden_size": 48,
                    "max_num_patches": 16,
                },
                "latent_query_num": 3,
            },
        ),
        inputs=_queries,
    ),
    "vilt": Kind(
        make=composite(
            "vilt",
            lambda heads, kv_heads, vocab: {
                **text(heads, heads, vocab),
                **image_tower(heads),
                "intermediate_size": 37,
                "num_images": 2,
                "modality_type_vocab_size": 3,
                "num_labels": 3,
            },
        ),
        inputs=_vilt,
    ),
    "vision-encoder-decoder": Kind(
        make=composite("vision-encoder-decoder", _captions_config),
        inputs=_captions,
        variants={"gpt2": {"decoder": {"model_type": "gpt2"}}},
    ),
    "evolla": Kind(make=composite("evolla", _evolla_config), inputs=_evolla),
    "instructblipvideo": Kind(
        make=composite("instructblipvideo", _instructblip_config),
        inputs=_instructblip,
        without={"InstructBlipVideoModel": "returns the outputs of its parts only, each with another inside"},
    ),
    "pix2struct": Kind(make=composite("pix2struct", _pix2struct_config), inputs=_pix2struct),
    "pp_formulanet": Kind(make=composite("pp_formulanet", _formula_config), inputs=_formula),
}

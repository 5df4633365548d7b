"""Masked language models and other encoders of text."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo.flat import HEADS, KV_HEADS, flat
from tests.zoo.form import Draw, Kind

Batch = dict[str, Any]

_CROSS = {"cross-attention": {"is_decoder": True, "add_cross_attention": True}}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def _xlm(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    batch["langs"] = draw(0, 2, *batch["input_ids"].shape)
    if head.endswith("ForQuestionAnswering"):
        batch |= {"is_impossible": torch.tensor([0.0, 1.0]), "cls_index": torch.tensor([0, 1])}
    return batch


def _order(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    if "next_sentence_label" in batch:
        batch["sentence_order_label"] = batch.pop("next_sentence_label")
    return batch


def _replaced(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    if head.endswith("ForPreTraining"):  # which tokens were replaced
        del batch["next_sentence_label"]
        batch["labels"] = draw(0, 2, *batch["input_ids"].shape)
    return batch


def _landmarks(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    """One more token: the landmarks divide the length."""
    batch |= {name: torch.cat([batch[name], batch[name][..., -1:]], -1) for name in ("input_ids", "attention_mask")}
    if "labels" in batch and batch["labels"].ndim > 1:
        batch["labels"] = torch.cat([batch["labels"], batch["labels"][..., -1:]], -1)
    return batch


def _global(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    glob = torch.zeros_like(batch["input_ids"])
    glob[..., 0] = 1
    glob[0, ..., 4] = 1
    return {**batch, "global_attention_mask": glob}


def _entities(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    shape = (*batch["input_ids"].shape[:-1], 3)
    places = draw(0, 5, *shape, 2)
    places[..., 1, 1] = -1  # a mention of one token
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, ..., 2] = 0
    batch |= {"entity_ids": draw(1, config.entity_vocab_size, *shape), "entity_attention_mask": mask}
    batch |= {"entity_position_ids": places, "entity_token_type_ids": draw(0, 2, *shape)}
    if head.endswith("ForMaskedLM"):
        batch["entity_labels"] = batch["entity_ids"].masked_fill(mask == 0, -100)
    elif head.endswith(("ForEntityClassification", "ForEntityPairClassification")):
        batch["labels"] = draw(0, 3, 2)
    elif head.endswith("ForEntitySpanClassification"):
        batch["labels"] = draw(0, 3, *shape)
        batch |= {"entity_start_positions": draw(0, 3, *shape), "entity_end_positions": draw(3, 5, *shape)}
    return batch


def _perceiver(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    size = config.image_size
    if "ForImageClassification" in head:
        return {"pixel_values": draw.normal(2, 3, size, size), "labels": draw(0, 3, 2)}
    if head.endswith("ForOpticalFlow"):
        return {"inputs": draw.normal(2, 2, 27, *config.train_size)}
    if head.endswith("Model"):
        return {"inputs": draw.normal(2, 7, config.d_model), "attention_mask": batch["attention_mask"]}
    return batch


def _table(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    shape = batch["input_ids"].shape
    kinds = torch.stack([draw(0, size, *shape) for size in config.type_vocab_sizes], -1)
    kinds[..., 0] = torch.tensor([0, 0, 1, 1, 1, 1, 1])  # the question, then the table
    kinds[..., 1] = torch.tensor([0, 0, 1, 2, 1, 2, 3])
    kinds[..., 2] = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    batch["token_type_ids"] = kinds
    if head.endswith("ForQuestionAnswering"):
        batch = {name: value for name, value in batch.items() if not name.endswith("_positions")}
        batch["labels"] = torch.tensor([[0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0]])
        batch["aggregation_labels"] = draw(0, config.num_aggregation_labels, 2)
    return batch


def _boxes(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    corners = draw(0, config.max_2d_position_embeddings // 2, *batch["input_ids"].shape, 4)
    return {**batch, "bbox": torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)}


def _page(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    pixels = draw.normal(2, 3, config.input_size, config.input_size)
    return {**_boxes(head, config, batch, draw), "pixel_values": pixels}


def _relations(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    shape = batch["input_ids"].shape
    batch["bbox"] = draw(0, 100, *shape, 4) / 100
    if "Spade" in head:
        first = draw(0, 2, *shape).bool() & batch["attention_mask"].bool()
        first[:, 0] = True
        batch["bbox_first_token_mask"] = first
    if "SpadeEE" in head:
        batch["initial_token_labels"] = batch.pop("labels").clamp(min=0)
        batch["subsequent_token_labels"] = torch.full(shape, shape[1])  # the end of the entity
        batch["subsequent_token_labels"][:, :3] = torch.tensor([1, 2, 3])
    elif "SpadeEL" in head:
        batch["labels"] = torch.full(shape, shape[1])
    return batch


def _paths(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    shape = (*batch["input_ids"].shape, config.max_depth)
    tags = draw(0, config.max_xpath_tag_unit_embeddings, *shape)
    return {**batch, "xpath_tags_seq": tags, "xpath_subs_seq": draw(0, config.max_xpath_subs_unit_embeddings, *shape)}


def _questions(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    if head.endswith("ForPreTraining"):
        batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
        batch |= {"start_positions": draw(1, 5, 2, 2), "end_positions": draw(1, 5, 2, 2)}
        batch["question_positions"] = torch.tensor([[0, 4], [2, 3]])
    elif head.endswith("ForQuestionAnswering"):
        batch["question_positions"] = torch.tensor([1, 3])
    return batch


def _languages(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    many = batch["input_ids"].shape[:-1].numel()
    return {**batch, "lang_ids": torch.arange(many) % 2}


def _document(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    ids = batch["input_ids"]
    ids = torch.where((ids == config.document_token_id) | (ids == config.image_token_id), 9, ids)
    ids[:, 2:5] = config.image_token_id
    if "labels" in batch:
        batch["labels"] = batch["labels"].masked_fill(ids == config.image_token_id, -100)
    return {**batch, "input_ids": ids, "pixel_values": draw.normal(6, config.patch_dim)}


KINDS: dict[str, Kind] = {
    "albert": Kind(
        inputs=_order,
        variants={"groups": {"num_hidden_groups": 2, "inner_group_num": 2}},
    ),
    "bert-generation": Kind(
        settings={"is_decoder": True},
    ),
    "big_bird": Kind(
        settings={"attention_type": "original_full", "rescale_embeddings": True},
        variants={"no-biases": {"use_bias": False}, **_CROSS},
    ),
    "bros": Kind(
        settings={"hidden_size": 192},  # the sizes of its boxes follow from it
        inputs=_relations,
        without={"BrosEncoder": "a part of the model, not a head"},
    ),
    "canine": Kind(
        settings={
            "downsampling_rate": 2,
            "upsampling_kernel_size": 3,
            "local_transformer_stride": 4,
            "num_hash_buckets": 31,
            "num_hash_functions": 4,
        },
    ),
    "clip_text_model": Kind(settings={"projection_dim": 20}),
    "convbert": Kind(
        settings={"conv_kernel_size": 3},
        variants={"groups": {"num_groups": 2}, "wide": {"embedding_size": None}},
    ),
    "deberta": Kind(
        settings={
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "max_relative_positions": 4,
            "position_biased_input": False,
            "type_vocab_size": 2,
        },
        variants={
            "absolute": {"relative_attention": False, "pos_att_type": None, "position_biased_input": True},
            "talking": {"talking_head": True},
            "own-head": {"legacy": False},
        },
    ),
    "deberta-v2": Kind(
        settings={
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "max_relative_positions": 8,
            "position_biased_input": False,
            "type_vocab_size": 2,
        },
        variants={
            "absolute": {"relative_attention": False, "pos_att_type": None, "position_biased_input": True},
            "as-published": {
                "position_buckets": 4,
                "share_att_key": True,
                "norm_rel_ebd": "layer_norm",
                "conv_kernel_size": 3,
                "conv_act": "gelu",
            },
            "own-head": {"legacy": False},
        },
    ),
    "dpr": Kind(
        settings={"projection_dim": 20},
        without={
            "DPREncoder": "a part of the encoders, with tuples for outputs",
            "DPRSpanPredictor": "a part of the reader, with tuples for outputs",
            "DPRPretrainedContextEncoder": "abstract",
            "DPRPretrainedQuestionEncoder": "abstract",
            "DPRPretrainedReader": "abstract",
        },
    ),
    "electra": Kind(
        variants={"wide": {"embedding_size": None}},
    ),
    "ernie": Kind(
        variants={"tasks": {"use_task_id": True}},
    ),
    "esm": Kind(
        settings={
            "position_embedding_type": "rotary",
            "emb_layer_norm_before": True,
            "token_dropout": True,
            "mask_token_id": 4,
        },
        variants={"absolute": {"position_embedding_type": "absolute", "emb_layer_norm_before": False}, **_CROSS},
    ),
    "esmc": Kind(
        settings={"num_key_value_heads": None},
        variants={"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "eurobert": Kind(
        variants={"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "flaubert": Kind(
        settings={"n_langs": 2},
        inputs=_xlm,
        variants={"pre-norm": {"pre_norm": True, "causal": True, "gelu_activation": False}},
    ),
    "fnet": Kind(),
    "funnel": Kind(
        settings={"block_sizes": [1, 2], "num_decoder_layers": 1, "d_head": 6, "d_inner": 37, "initializer_std": 0.2},
        inputs=_replaced,
        variants={
            "factorized": {"attention_type": "factorized", "pooling_type": "max"},
            "pool-all": {"pool_q_only": False, "separate_cls": False, "block_repeats": [1, 2]},
        },
    ),
    "gte": Kind(settings={"type_vocab_size": 2}),
    "ibert": Kind(),
    "jina_embeddings_v3": Kind(),
    "layoutlm": Kind(
        settings={"max_2d_position_embeddings": 16},
    ),
    "layoutlmv3": Kind(
        settings={
            "hidden_size": 48,  # what the coordinates make
            "coordinate_size": 8,
            "shape_size": 8,
            "max_2d_position_embeddings": 16,
            "rel_pos_bins": 8,
            "max_rel_pos": 16,
            "rel_2d_pos_bins": 8,
            "max_rel_2d_pos": 16,
            "input_size": 8,
            "patch_size": 4,
        },
        inputs=_page,
        variants={"absolute": {"has_relative_attention_bias": False, "has_spatial_attention_bias": False}},
    ),
    "lilt": Kind(settings={"max_2d_position_embeddings": 16}, inputs=_boxes),
    "longformer": Kind(settings={"attention_window": 4}, inputs=_global),
    "luke": Kind(
        settings={"entity_vocab_size": 41, "entity_emb_size": 12},
        inputs=_entities,
        variants={"plain-attention": {"use_entity_aware_attention": False, "entity_emb_size": 48}},
    ),
    "markuplm": Kind(
        settings={
            "max_depth": 3,
            "max_xpath_tag_unit_embeddings": 11,
            "max_xpath_subs_unit_embeddings": 13,
            "xpath_unit_hidden_size": 6,
            "tag_pad_id": 10,
            "subs_pad_id": 12,
        },
        inputs=_paths,
    ),
    "mobilebert": Kind(
        settings={"intra_bottleneck_size": 24, "num_feedforward_networks": 2},
        variants={
            "own-keys": {"key_query_shared_bottleneck": False, "normalization_type": "layer_norm"},
            "bottleneck-attention": {"use_bottleneck_attention": True},
            "no-bottleneck": {"use_bottleneck": False, "trigram_input": False},
        },
    ),
    "modernbert": Kind(
        settings={"local_attention": 4},
        variants={
            "biases": {
                "attention_bias": True,
                "mlp_bias": True,
                "norm_bias": True,
                "classifier_bias": True,
                "decoder_bias": False,
            },
            "sparse": {"sparse_prediction": True},
        },
    ),
    "mpnet": Kind(settings={"relative_attention_num_buckets": 8}),
    "neomme": Kind(
        make=flat(
            "neomme",
            {
                **_SLIDING,
                "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}, "sliding_attention": {}},
                "embedding_rank": 20,
                "embedding_dim": 10,
                "patch_size": 2,
                "document_token_id": 3,
                "image_token_id": 4,
            },
        ),
        inputs=_document,
        variants={"biases": {"attention_bias": True, "mlp_bias": True}, "untied": {"tie_word_embeddings": False}},
    ),
    "nomic_bert": Kind(),
    "nystromformer": Kind(
        settings={"segment_means_seq_len": 8, "num_landmarks": 4, "conv_kernel_size": 3},
        inputs=_landmarks,
        variants={
            "exact": {"num_landmarks": 8},
            "coefficients": {"inv_coeff_init_option": "exact", "conv_kernel_size": None},
        },
    ),
    "openai_privacy_filter": Kind(
        make=flat(
            "openai_privacy_filter",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "num_key_value_heads": KV_HEADS},
        ),
        variants={"no-biases": {"attention_bias": False}},
    ),
    "perceiver": Kind(
        make=flat(
            "perceiver",
            {
                "num_latents": 5,
                "d_latents": 48,
                "d_model": 48,
                "num_self_attends_per_block": 2,
                "num_self_attention_heads": HEADS,
                "num_cross_attention_heads": HEADS,
                "qk_channels": 24,
                "v_channels": 48,
                "max_position_embeddings": 7,
                "image_size": 8,
                "train_size": [4, 4],
            },
        ),
        inputs=_perceiver,
    ),
    "reformer": Kind(
        settings={
            "hidden_size": 48,
            "attn_layers": ["local", "lsh"],
            "attention_head_size": 8,
            "axial_pos_shape": [2, 4],
            "axial_pos_embds_dim": [16, 32],
            "feed_forward_size": 37,
            "hash_seed": 1,
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "num_buckets": 2,
        },
        variants={"learned-positions": {"axial_pos_embds": False, "hidden_size": 40, "num_hashes": 2}},
    ),
    "roc_bert": Kind(
        settings={
            "pronunciation_embed_dim": 6,
            "pronunciation_vocab_size": 17,
            "shape_embed_dim": 10,
            "shape_vocab_size": 19,
        },
        variants={"plain-embeddings": {"enable_pronunciation": False, "enable_shape": False}},
    ),
    "roformer": Kind(variants={"rotary-values": {"rotary_value": True, "embedding_size": None}, **_CROSS}),
    "siglip_text_model": Kind(settings={"projection_size": 20}),
    "splinter": Kind(settings={"question_token_id": 3}, inputs=_questions),
    "squeezebert": Kind(
        settings={
            "embedding_size": None,
            "intermediate_size": 42,
            **{f"{name}_groups": 2 for name in ("q", "k", "v", "intermediate", "output")},
        },
        variants={
            "no-groups": {f"{name}_groups": 1 for name in ("q", "k", "v", "intermediate", "output")},
            "four-groups": {
                "intermediate_size": 44,
                **{f"{name}_groups": 4 for name in ("q", "k", "v", "post_attention", "intermediate", "output")},
            },
        },
    ),
    "tapas": Kind(
        settings={
            "type_vocab_sizes": [3, 5, 5, 2, 6, 6, 4],
            "num_aggregation_labels": 3,
            "max_num_rows": 4,
            "max_num_columns": 4,
        },
        inputs=_table,
        variants={"positions": {"reset_position_index_per_cell": False}},
    ),
    "ultrabert": Kind(
        settings={**_SLIDING, "prediction_head_size": 23},
        variants={"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "xlm": Kind(
        settings={"n_langs": 2},
        inputs=_xlm,
        variants={"causal": {"causal": True, "gelu_activation": False, "sinusoidal_embeddings": True}},
    ),
    "xmod": Kind(
        settings={"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
        inputs=_languages,
        variants={
            "pre-norm": {"pre_norm": True, "adapter_layer_norm": True, "adapter_reuse_layer_norm": False},
            "after-adapter": {"ln_before_adapter": False, "adapter_reduction_factor": 3},
            **_CROSS,
        },
    ),
    "yoso": Kind(variants={"convolution": {"conv_window": 3}}),
}

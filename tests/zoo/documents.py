"""Encoders of text with something beside it: layout, tables, markup, entities, images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.flat import HEADS, flat
from tests.zoo.form import Draw, Kind, Make
from tests.zoo.towers import image_tower

Batch = dict[str, Any]

_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


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
    longer = shape[-1] - 7  # words of the last cell
    kinds[..., 0] = torch.tensor([0, 0, 1, 1, 1, 1, 1, *[1] * longer])  # the question, then the table
    kinds[..., 1] = torch.tensor([0, 0, 1, 2, 1, 2, 3, *[3] * longer])
    kinds[..., 2] = torch.tensor([0, 0, 1, 1, 2, 2, 2, *[2] * longer])
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
        batch["labels"] = torch.zeros(shape, dtype=torch.long)
        batch["labels"][:, 0] = shape[1]
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
    else:
        batch["input_ids"][:, 2] = config.question_token_id
    return batch


def _document(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    ids = batch["input_ids"]
    ids = torch.where((ids == config.document_token_id) | (ids == config.image_token_id), 9, ids)
    ids[:, 2:5] = config.image_token_id
    if "labels" in batch:
        batch["labels"] = batch["labels"].masked_fill(ids == config.image_token_id, -100)
    return {**batch, "input_ids": ids, "pixel_values": draw.normal(6, config.patch_dim)}


def _with_pages(model_type: str, text: str, settings: Mapping[str, Any]) -> Make:
    """A text encoder that gets images too; the variants change the text, but for ``vision_use_head``."""

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        words = {name: value for name, value in changes.items() if name != "vision_use_head"}
        return CONFIG_MAPPING[model_type](
            text_config=flat(text, settings)(heads, kv_heads, vocab, words),
            vision_config={
                "model_type": "siglip_vision_model",
                **image_tower(heads, image_size=8, patch_size=2),
                "vision_use_head": changes.get("vision_use_head", False),
            },
            pixel_shuffle_factor=2,
            image_token_id=vocab - 1,
            initializer_range=0.1,
            num_labels=3,
        )

    return make


def _pages(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    """An image of four tokens after the first token."""
    ids = batch["input_ids"].clamp(max=config.image_token_id - 1)
    image = torch.full((2, 4), config.image_token_id)
    batch["input_ids"] = torch.cat([ids[:, :1], image, ids[:, 1:]], 1)
    batch["attention_mask"] = torch.cat([torch.ones_like(image), batch["attention_mask"]], 1)
    if "labels" in batch and batch["labels"].ndim > 1:
        batch["labels"] = torch.cat([batch["labels"][:, :1], torch.full((2, 4), -100), batch["labels"][:, 1:]], 1)
    return {**batch, "pixel_values": draw.normal(2, 1, 3, 8, 8)}


def _objects(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    """LXMERT: features and boxes of objects beside the words."""
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 4:] = 0
    batch |= {"visual_feats": draw.normal(2, 5, config.visual_feat_dim), "visual_pos": draw(0, 9, 2, 5, 4) / 9}
    batch["visual_attention_mask"] = mask
    if head.endswith("ForPreTraining"):
        batch["matched_label"] = batch.pop("next_sentence_label")
        batch["ans"] = draw(0, config.num_qa_labels, 2)
    elif head.endswith("ForQuestionAnswering"):
        batch = {name: value for name, value in batch.items() if not name.endswith("_positions")}
        batch["labels"] = draw(0, config.num_qa_labels, 2)
    return batch


def _regions(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    """VisualBERT: features of regions behind the words."""
    start, count = batch["input_ids"].shape[:-1], 5
    mask = torch.ones(*start, count, dtype=torch.long)
    mask[-1, ..., count - 1 :] = 0
    batch |= {"visual_embeds": draw.normal(*start, count, config.visual_embedding_dim), "visual_attention_mask": mask}
    batch["visual_token_type_ids"] = torch.ones_like(mask)
    batch = {name: value for name, value in batch.items() if not name.endswith("_positions")}
    if head.endswith("ForPreTraining"):
        batch["sentence_image_labels"] = batch.pop("next_sentence_label")
        batch["labels"] = torch.cat([batch["labels"], torch.full((2, count), -100)], -1)
    elif head.endswith("ForQuestionAnswering"):
        batch["labels"] = draw.normal(2, config.num_labels).softmax(-1)
    elif head.endswith("ForVisualReasoning"):
        batch["labels"] = draw(0, config.num_labels, 2)
    elif head.endswith("ForRegionToPhraseAlignment"):
        batch["region_to_phrase_position"] = torch.tensor([[1, 2, -1], [0, 3, 2]])
        batch["labels"] = draw.normal(2, 3, count).softmax(-1)
    return batch


KINDS: dict[str, Kind] = {
    "bros": Kind(
        settings={"hidden_size": 192, "initializer_range": 0.05},  # the sizes of its boxes follow from it
        inputs=_relations,
        without={"BrosEncoder": "a part of the model, not a head"},
    ),
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
    "lilt": Kind(settings={"hidden_size": 96, "max_2d_position_embeddings": 16}, inputs=_boxes),
    "luke": Kind(
        settings={"entity_vocab_size": 41, "entity_emb_size": 12},
        inputs=_entities,
        variants={"plain-attention": {"use_entity_aware_attention": False, "entity_emb_size": 48}},
    ),
    "lxmert": Kind(
        settings={
            "l_layers": 2,
            "x_layers": 2,
            "r_layers": 1,
            "visual_feat_dim": 10,
            "num_qa_labels": 5,
            "num_object_labels": 7,
            "num_attr_labels": 4,
        },
        inputs=_objects,
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
    "modernvbert": Kind(
        make=_with_pages("modernvbert", "modernbert", {"local_attention": 4}),
        inputs=_pages,
        variants={"pooled-image": {"vision_use_head": True}},
    ),
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
                "image_size": 16,
                "train_size": [4, 4],
            },
        ),
        inputs=_perceiver,
        without={"PerceiverForMultimodalAutoencoding": "its widths are fixed, and its inputs whole videos with sound"},
    ),
    "splinter": Kind(settings={"question_token_id": 3}, inputs=_questions),
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
    "ultravbert": Kind(
        make=_with_pages("ultravbert", "ultrabert", {**_SLIDING, "prediction_head_size": 23}),
        inputs=_pages,
    ),
    "visual_bert": Kind(
        settings={"visual_embedding_dim": 10},
        inputs=_regions,
    ),
}

"""Masked language models and other encoders of text."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo.flat import KV_HEADS, flat
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
    if batch.pop("next_sentence_label", None) is not None:
        batch["sentence_order_label"] = draw(0, 2, 3)  # it reads the logits of three labels in pairs
    return batch


def _replaced(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    if head.endswith("ForPreTraining"):  # which tokens were replaced
        del batch["next_sentence_label"]
        batch["labels"] = draw(0, 2, *batch["input_ids"].shape)
    return {**batch, "token_type_ids": draw(0, 2, *batch["input_ids"].shape)}


def _eight(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    """One more token: what the model divides the length by."""
    batch |= {name: torch.cat([batch[name], batch[name][..., -1:]], -1) for name in ("input_ids", "attention_mask")}
    if "labels" in batch and batch["labels"].ndim > 1:
        batch["labels"] = torch.cat([batch["labels"], batch["labels"][..., -1:]], -1)
    return batch


def _sparse(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    """Longer than what sparse attention leaves to full attention."""
    return _eight(head, config, batch, draw) if config.attention_type == "block_sparse" else batch


def _landmarks(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    batch = _eight(head, config, batch, draw)
    if config.num_landmarks < config.segment_means_seq_len:
        del batch["attention_mask"]  # it has the shape for all tokens, the scores are of the landmarks
    return batch


def _global(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    glob = torch.zeros_like(batch["input_ids"])
    glob[..., 0] = 1
    glob[0, ..., 4] = 1
    return {**batch, "global_attention_mask": glob}


def _characters(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    sizes = {"shape": config.shape_vocab_size, "pronunciation": config.pronunciation_vocab_size}
    for begin in ("", *(("attack_", "labels_") if head.endswith("ForPreTraining") else ())):
        shape = batch["input_ids"].shape
        batch |= {f"{begin}input_{name}_ids": draw(1, size, *shape) for name, size in sizes.items()}
    return batch


def _languages(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
    return {**batch, "lang_ids": torch.tensor([1] if head.endswith("ForMultipleChoice") else [0, 1])}


_DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "type_vocab_size": 2,
}
_ABSOLUTE = {"absolute": {"relative_attention": False, "pos_att_type": None, "position_biased_input": True}}

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
        variants={
            "no-biases": {"use_bias": False},
            "cross-attention": {**_CROSS["cross-attention"], "use_cache": False},
            "sparse": {"attention_type": "block_sparse", "block_size": 1, "num_random_blocks": 1, "use_cache": False},
        },
        inputs=_sparse,
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
        variants={"groups": {"num_groups": 2, "intermediate_size": 38}, "wide": {"embedding_size": None}},
    ),
    "deberta": Kind(
        settings={**_DISENTANGLED, "max_relative_positions": 4},
        variants={
            **_ABSOLUTE,
            "talking": {"talking_head": True},
            "own-head": {"legacy": False},
        },
    ),
    "deberta-v2": Kind(
        settings={**_DISENTANGLED, "max_relative_positions": 8},
        variants={
            **_ABSOLUTE,
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
        variants={"projection": {"projection_dim": 20}},
        without={
            "DPREncoder": "a part of the encoders, with tuples for outputs",
            "DPRSpanPredictor": "a part of the reader, with tuples for outputs",
            "DPRPretrainedContextEncoder": "abstract",
            "DPRPretrainedQuestionEncoder": "abstract",
            "DPRPretrainedReader": "abstract",
        },
    ),
    "embedding_gemma2_text": Kind(
        make=flat(
            "embedding_gemma2_text",
            {
                **_SLIDING,
                "hidden_size_per_layer_input": 10,
                "embedding_dim": 20,
                "head_dim": 4,
                "initializer_range": 0.3,  # with small ones its unscaled attention multiplies the noise of rounding
            },
            global_head_dim=6,
        ),
        variants={"biases": {"attention_bias": True}},
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
        variants={"absolute": {"position_embedding_type": "absolute", "emb_layer_norm_before": False}},
    ),
    "esmc": Kind(
        settings={"num_key_value_heads": None},
        variants={"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "eurobert": Kind(
        variants={"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "flaubert": Kind(
        settings={"n_langs": 2, "init_std": 0.1, "embed_init_std": 0.3},
        inputs=_xlm,
        variants={"relu": {"gelu_activation": False}},
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
    "longformer": Kind(settings={"attention_window": 4}, inputs=_global),
    "mobilebert": Kind(
        settings={"intra_bottleneck_size": 24, "num_feedforward_networks": 2},
        variants={
            "layer-norm": {"normalization_type": "layer_norm"},
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
    "mpnet": Kind(),
    "nomic_bert": Kind(),
    "nystromformer": Kind(
        settings={"segment_means_seq_len": 8, "num_landmarks": 4, "conv_kernel_size": 3},
        inputs=_landmarks,
        variants={"exact": {"num_landmarks": 8}},
    ),
    "openai_privacy_filter": Kind(
        make=flat(
            "openai_privacy_filter",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "num_key_value_heads": KV_HEADS},
        ),
        variants={"no-biases": {"attention_bias": False}},
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
        generates=False,  # not with a cache: the shapes of its local attention do not fit
        inputs=_eight,
        variants={"learned-positions": {"axial_pos_embds": False, "hidden_size": 40, "num_hashes": 2}},
    ),
    "roc_bert": Kind(
        settings={
            "pronunciation_embed_dim": 6,
            "pronunciation_vocab_size": 17,
            "shape_embed_dim": 10,
            "shape_vocab_size": 19,
        },
        double="the plain model's own float32 gradient of the contrastive loss is off by 5e-6",
        inputs=_characters,
        variants={"plain-embeddings": {"enable_pronunciation": False, "enable_shape": False}},
    ),
    "roformer": Kind(variants={"rotary-values": {"rotary_value": True, "embedding_size": None}, **_CROSS}),
    "sam3_lite_text_text_model": Kind(
        settings={"num_hidden_layers": 4, "projection_dim": 20, "repmixer_kernel_size": 5}
    ),
    "siglip_text_model": Kind(settings={"projection_size": 20}),
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
    "ultrabert": Kind(
        settings={**_SLIDING, "prediction_head_size": 23},
        variants={"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "xlm": Kind(
        settings={"n_langs": 2, "init_std": 0.1, "embed_init_std": 0.3},
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

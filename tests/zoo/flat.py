"""Flat configs in which more fields follow the number of heads, or of which the engine's settings do not suffice."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.form import Kind, Make

# As the value of a setting: the count itself; and a vocabulary of which the last words are not used.
HEADS, KV_HEADS, UNPADDED = "<heads>", "<kv_heads>", "<vocabulary without padding>"

# Every name that some config has for the same thing; flat configs take those that they know.
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 21,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 23,
    "shared_intermediate_size": 23,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXED = {"mlp_layer_types": ["dense", "sparse"]}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR_THEN_FULL = ["linear_attention", "full_attention"]
MOE = {"moe_intermediate_size": 11, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
BIASES = {"biases": {"attention_bias": True}}
GROUPS = {"n_group": 2, "topk_group": 1}
GRANITE = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
# The product over all experts at once wants widths of sixteen bytes, also when they are cut.
GROUPED = {"grouped": {"experts_implementation": "grouped_mm", "intermediate_size": 48, "moe_intermediate_size": 48}}

_SHARED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 32,
    "head_dim": 8,
    **TOKENS,
    "initializer_range": 0.1,
}


def fields_of(config_class: type[PretrainedConfig]) -> set[str]:
    """Names that a config takes."""
    fields = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    for base in config_class.__mro__:
        fields |= set(vars(base).get("__annotations__", {}))
    return fields


def flat(model_type: str, settings: Mapping[str, Any], **legacy: Any) -> Make:
    """Makes a flat config of the settings that it knows; experts run one by one, so that any width will do.

    ``legacy`` are names that the config takes though it does not declare them.
    """

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        config_class = CONFIG_MAPPING[model_type]
        known, aliases = fields_of(config_class), config_class.attribute_map
        sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": 8 * heads}
        values = {**_SHARED, **sizes, "vocab_size": vocab, **settings, **legacy, **changes}
        values = {name: value for name, value in values.items() if name in known or name in {*legacy, *changes}}
        values = {name: value for name, value in values.items() if aliases.get(name) not in values}
        counts = {HEADS: heads, KV_HEADS: kv_heads, UNPADDED: vocab - 3}
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = [counts.get(item, item) if isinstance(item, str) else item for item in value]
            elif isinstance(value, str):
                values[name] = counts.get(value, value)
        return config_class(**{"experts_implementation": "eager", "num_labels": 3, **values})

    return make


def sized(model_type: str, **settings: Any) -> Make:
    """:func:`flat` of settings that are named."""
    return flat(model_type, settings)


def made_flat(kinds: Mapping[str, Kind], tied: set[str]) -> dict[str, Kind]:
    """Kinds whose settings make the whole config; ``tied`` types tie the embeddings unless they are told otherwise."""
    result = {}
    for name, kind in kinds.items():
        tie = {"untied" if name in tied else "tied": {"tie_word_embeddings": name not in tied}}
        result[name] = replace(kind, make=flat(name, kind.settings), settings={}, variants={**kind.variants, **tie})
    return result

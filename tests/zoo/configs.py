"""Make a config of what the data says: a tree of fields, or a flat one of which the config takes what it knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo.expressions import evaluate, is_size
from tests.zoo.form import Kind
from tests.zoo.merging import merge

__all__ = ["config_of", "fields_of", "with_sizes"]

_SHARED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "hidden_size": "8 * heads",
    "vocab_size": "vocab",
}

Sizes = Mapping[str, int]
KindOf = Callable[[str], Kind]


def fields_of(config_class: type[PretrainedConfig]) -> set[str]:
    """Names that a config takes."""
    fields = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    for base in config_class.__mro__:
        fields |= set(vars(base).get("__annotations__", {}))
    return fields


def config_of(
    model_type: str, how: Mapping[str, Any], sizes: Sizes, changes: Mapping[str, Any], kind_of: KindOf
) -> PretrainedConfig:
    """Make the config of a model type.

    Args:
        how: its entry: ``make``, the whole tree of fields, or ``flat``, those that the type has besides what all share,
            with ``legacy``, which the config takes though it does not declare them; ``known``: like ``flat``, without
            what all share; ``sizes`` in place of the others;
            ``forced``: fields that the class sets by itself, and that variants change all the same.
        changes: those of a variant.
        kind_of: what makes the configs inside.
    """
    sizes = {**sizes, **with_sizes(how.get("sizes", {}), sizes, kind_of)}
    if "known" in how:
        return _known(model_type, how["known"], sizes, {**how.get("legacy", {}), **changes}, kind_of)
    if "make" not in how:
        return _flat(model_type, how["flat"], sizes, {**how.get("legacy", {}), **changes}, kind_of)
    config = CONFIG_MAPPING[model_type](**with_sizes(merge(how["make"], changes), sizes, kind_of))
    for name in how.get("forced", ()):
        if name in changes:
            setattr(config, name, changes[name])
    return config


def with_sizes(value: Any, sizes: Sizes, kind_of: KindOf) -> Any:
    """Return a copy of a value in which expressions over sizes are numbers, and the configs inside are made."""
    if isinstance(value, str):
        return evaluate(value, sizes) if is_size(value) else value
    if isinstance(value, list | tuple):
        return type(value)(with_sizes(each, sizes, kind_of) for each in value)
    if not isinstance(value, Mapping):
        return value
    rest = {name: each for name, each in value.items() if name not in ("from", "is")}
    if "from" in value:  # the config that the entry of another type makes
        make = kind_of(value["from"]).make
        assert make is not None, f"the entry of {value['from']} makes no whole config"
        return make(sizes["heads"], sizes["kv_heads"], sizes["vocab"], rest)
    if "is" in value:  # a flat config of another type
        return _flat(value["is"], rest, sizes, {}, kind_of)
    return {name: with_sizes(each, sizes, kind_of) for name, each in rest.items()}


def _flat(
    model_type: str, settings: Mapping[str, Any], sizes: Sizes, kept: Mapping[str, Any], kind_of: KindOf
) -> PretrainedConfig:
    """A flat config of the settings that it knows and of all that is ``kept``; experts run one by one, so that any
    width will do."""
    config_class = CONFIG_MAPPING[model_type]
    known, aliases = fields_of(config_class), config_class.attribute_map
    values = {**_SHARED, **settings, **kept}
    values = {name: value for name, value in values.items() if name in known or name in kept}
    values = {name: value for name, value in values.items() if aliases.get(name) not in values}
    made = with_sizes(values, sizes, kind_of)
    return config_class(**{"experts_implementation": "eager", "num_labels": 3, **made})


def _known(
    model_type: str, settings: Mapping[str, Any], sizes: Sizes, kept: Mapping[str, Any], kind_of: KindOf
) -> PretrainedConfig:
    """Only those settings that the config declares itself, and all that is ``kept``."""
    config_class = CONFIG_MAPPING[model_type]
    declared = {name for base in config_class.__mro__ for name in vars(base).get("__annotations__", {})}
    values = {**{name: value for name, value in settings.items() if name in declared}, **kept}
    return config_class(num_labels=3, **with_sizes(values, sizes, kind_of))

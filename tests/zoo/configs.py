"""Make a config of what the data says: a tree of fields, or a flat one of which the config takes what it knows."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from autopar.tools.verification.small_models import read_data
from tests.zoo.form import Kind
from tests.zoo.reading import evaluate, is_size, merge

MAKERS = ("make", "flat", "known")  # one of them makes a whole config

_FIELDS = read_data(Path(__file__).with_name("fields.yaml"))
_COMMON: dict[str, Any] = _FIELDS["common"]
_PLAIN: dict[str, Any] = {**_COMMON, **_FIELDS["plain"]}

Sizes = Mapping[str, int]
KindOf = Callable[[str], Kind]


def fields_of(config_class: type[PretrainedConfig]) -> set[str]:
    """Names that a config takes."""
    taken = set(inspect.signature(config_class.__init__).parameters)
    return taken | set(config_class.attribute_map) | _declared(config_class)


def _declared(config_class: type[PretrainedConfig]) -> set[str]:
    return {name for base in config_class.__mro__ for name in vars(base).get("__annotations__", {})}


def plain_fields(model_type: str, settings: Mapping[str, Any], sizes: Sizes, kind_of: KindOf) -> dict[str, Any]:
    """Fields of a flat config that makes its model alone."""
    return with_sizes(_known({**_PLAIN, **settings}, CONFIG_MAPPING[model_type]), sizes, kind_of)


def config_of(
    model_type: str, how: Mapping[str, Any], sizes: Sizes, changes: Mapping[str, Any], kind_of: KindOf
) -> PretrainedConfig:
    """Make the config of a model type.

    Args:
        how: its entry: ``make``, the whole tree of fields; or ``flat``, those that the type has besides what all
            share; or ``known``, all that it has, of which the class takes what it declares itself; with ``legacy``,
            which these two take though they are not declared; ``sizes`` in place of the others; ``forced``: fields
            that the class sets by itself, and that variants change all the same.
        changes: those of a variant.
        kind_of: what makes the configs inside.
    """
    sizes = {**sizes, **with_sizes(how.get("sizes", {}), sizes, kind_of)}
    kept = {**how.get("legacy", {}), **changes}
    if "flat" in how:
        return _flat(model_type, how["flat"], sizes, kept, kind_of)
    if "known" in how:
        declared = _declared(CONFIG_MAPPING[model_type])
        known = {**{name: value for name, value in how["known"].items() if name in declared}, **kept}
        return CONFIG_MAPPING[model_type](num_labels=3, **with_sizes(known, sizes, kind_of))
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
    """A flat config of the settings that it knows and of all that is kept; experts run one by one, so that any width
    will do."""
    config_class = CONFIG_MAPPING[model_type]
    values = with_sizes(_known({**_COMMON, **settings, **kept}, config_class, kept), sizes, kind_of)
    return config_class(**{"experts_implementation": "eager", "num_labels": 3, **values})


def _known(
    values: Mapping[str, Any], config_class: type[PretrainedConfig], kept: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Those that a class takes, and those to keep; by one name only, where it has two for the same."""
    known = fields_of(config_class) | set(kept or {})
    taken = {name: value for name, value in values.items() if name in known}
    return {name: value for name, value in taken.items() if config_class.attribute_map.get(name) not in taken}

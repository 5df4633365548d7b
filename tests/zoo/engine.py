"""Make a :class:`Kind` of each model type from the YAML files beside this module; README.md says what they hold."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from autopar.tools.verification.small_models import read_data
from tests.zoo.configs import MAKERS, config_of
from tests.zoo.form import Inputs, Kind, Make
from tests.zoo.reading import FOLDER, entries, expanded
from tests.zoo.recipes import recipe

_AS_THEY_ARE = ("settings", "variants", "double", "inside", "generates", "crosses")
_OF_MAKERS = (*MAKERS, "legacy", "sizes", "forced")
_KNOWN = {*_AS_THEY_ARE, *_OF_MAKERS, "without", "inputs", "labels", "cross"}


def model_types() -> Iterator[str]:
    """Return every model type that has an entry."""
    return iter(entries())


@functools.cache
def kind_of(model_type: str) -> Kind:
    """What a model type needs beside the settings that all share."""
    if model_type not in entries():
        return Kind()
    fields = expanded(*entries()[model_type])
    if unknown := fields.keys() - _KNOWN:
        raise ValueError(f"the entry of {model_type} has {', '.join(sorted(unknown))}, which means nothing")
    return Kind(
        make=_maker(model_type, fields),
        inputs=recipe(fields["inputs"]) if "inputs" in fields else None,
        labels={what: recipe(steps) for what, steps in fields.get("labels", {}).items()},
        cross=recipe(fields["cross"]) if "cross" in fields else None,
        without={head: reason for reason, heads in fields.get("without", {}).items() for head in heads},
        **{name: fields[name] for name in _AS_THEY_ARE if name in fields},
    )


def _maker(model_type: str, fields: Mapping[str, Any]) -> Make | None:
    how = {name: fields[name] for name in _OF_MAKERS if name in fields}
    if not how.keys() & set(MAKERS):
        return None

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        return config_of(model_type, how, {"heads": heads, "kv_heads": kv_heads, "vocab": vocab}, changes, kind_of)

    return make


@functools.cache
def head_kind(head: str) -> str | None:
    """What a head does, from the ending of its class name; None if it is unknown."""
    kinds = read_data(FOLDER / "heads.yaml")["kinds"]
    fitting = [(len(end), what) for what, told in kinds.items() for end in told["endings"] if head.endswith(end)]
    return max(fitting)[1] if fitting else None


@functools.cache
def labels_of(what: str | None) -> Inputs:
    """What adds the labels that heads of a kind take."""
    told = read_data(FOLDER / "heads.yaml")["kinds"].get(what, {})
    return recipe(told.get("labels", ()))


@functools.cache
def cross_inputs() -> Inputs:
    """What adds the states that decoders with cross-attention read."""
    return recipe(read_data(FOLDER / "heads.yaml")["cross"])

"""Make a :class:`Kind` of each model type from the YAML files beside this module.

Files are read at the first question, and of a type only its own entry is worked out; configs are made when a test
asks for one. ``__init__`` says what the files hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from tests.zoo.configs import config_of
from tests.zoo.form import Kind
from tests.zoo.merging import expanded
from tests.zoo.recipes import recipe

__all__ = ["kind_of", "model_types"]

_FOLDER = Path(__file__).parent
_SHARED = "shared.yaml"  # fragments for all files
_TOLD = ("settings", "variants", "double", "inside", "generates")  # as they are
_MADE = ("flat", "known", "make", "legacy", "sizes", "forced")  # see configs.config_of


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader that knows tuples, which some configs tell from lists."""


_Loader.add_constructor("!tuple", lambda loader, node: tuple(loader.construct_sequence(node, deep=True)))


def model_types() -> Iterator[str]:
    """Return every model type that has an entry."""
    return iter(_entries())


@functools.cache
def kind_of(model_type: str) -> Kind:
    """What a model type needs beside the settings that all share."""
    if model_type not in _entries():
        return Kind()
    entry, fragments = _entries()[model_type]
    fields = expanded(entry, fragments)
    without = {head: reason for reason, heads in fields.pop("without", {}).items() for head in heads}
    steps = fields.pop("inputs", None)
    told = {name: fields[name] for name in _TOLD if name in fields}
    return Kind(
        make=_maker(model_type, fields), inputs=recipe(steps) if steps is not None else None, without=without, **told
    )


def _maker(model_type: str, fields: dict[str, Any]) -> Callable[..., PretrainedConfig] | None:
    how = {name: fields[name] for name in _MADE if name in fields}
    if not {"flat", "known", "make"} & how.keys():
        return None

    def make(heads: int, kv_heads: int, vocab: int, changes: Mapping[str, Any]) -> PretrainedConfig:
        return config_of(model_type, how, {"heads": heads, "kv_heads": kv_heads, "vocab": vocab}, changes, kind_of)

    return make


@functools.cache
def _entries() -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each model type's entry as it is written, and the fragments that it may name."""
    shared = _read(_FOLDER / _SHARED)
    result: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for path in sorted(_FOLDER.glob("*.yaml")):
        if path.name == _SHARED:
            continue
        family = _read(path)
        fragments = {**shared, **family.get("shared", {})}
        for model_type, entry in family["types"].items():
            if model_type in result:
                raise ValueError(f"{path.name} describes {model_type} a second time")
            result[model_type] = (entry or {}, fragments)
    return result


def _read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)

"""Fields of small configs that neither names nor other fields tell, by model type: ``small_fields.yaml``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["read_data", "small_fields"]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader that knows tuples, which some configs tell from lists: ``!tuple [1, 2]``."""


_Loader.add_constructor("!tuple", lambda loader, node: tuple(loader.construct_sequence(node, deep=True)))


@functools.cache
def read_data(path: Path) -> Mapping[str, Any]:
    """Return what a YAML file of data holds; it is read once, so its readers change nothing in it."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)


def small_fields(model_type: str) -> Mapping[str, Any]:
    """Return the fields that a small config of a model type sets besides; for most there are none."""
    return read_data(Path(__file__).with_suffix(".yaml")).get(model_type, {})

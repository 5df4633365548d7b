"""Read the YAML files of this folder, each once and only when it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FOLDER", "entries", "read"]

FOLDER = Path(__file__).parent
_SHARED = "shared.yaml"  # fragments for all families
_NO_FAMILY = (_SHARED, "heads.yaml")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader that knows tuples, which some configs tell from lists."""


_Loader.add_constructor("!tuple", lambda loader, node: tuple(loader.construct_sequence(node, deep=True)))


@functools.cache
def read(path: Path) -> dict[str, Any]:
    """Return what a file holds."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)


@functools.cache
def entries() -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return each model type's entry as it is written, and the fragments that it may name.

    Raises:
        ValueError: two files describe one type.
    """
    result: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        if path.name in _NO_FAMILY:
            continue
        family = read(path)
        fragments = {**read(FOLDER / _SHARED), **family.get("shared", {})}
        for model_type, entry in family["types"].items():
            if model_type in result:
                raise ValueError(f"{path.name} describes {model_type} a second time")
            result[model_type] = (entry, fragments)
    return result

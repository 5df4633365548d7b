"""Read the YAML files of this folder, each once and only when it is asked for."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.tools.verification.small_models import read_data

FOLDER = Path(__file__).parent
_SHARED = "shared.yaml"  # fragments for all families
_NO_FAMILY = (_SHARED, "heads.yaml")


@functools.cache
def entries() -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return each model type's entry as it is written, and the fragments that it may name."""
    result: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        if path.name in _NO_FAMILY:
            continue
        family = read_data(path)
        fragments = {**read_data(FOLDER / _SHARED), **family.get("shared", {})}
        for model_type, entry in family["types"].items():
            if model_type in result:
                raise ValueError(f"{path.name} describes {model_type} a second time")
            result[model_type] = (entry, fragments)
    return result

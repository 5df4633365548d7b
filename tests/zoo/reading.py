"""Read the YAML files of this folder, put fragments together, and evaluate expressions."""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from autopar.tools.verification.small_models import read_data

FOLDER = Path(__file__).parent
_SHARED = "shared.yaml"  # fragments for all families
_NO_FAMILY = (_SHARED, "heads.yaml", "fields.yaml")


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


def merge(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with ``changes``; dicts inside are merged too, but of one with ``only`` nothing else stays."""
    result = dict(fields)
    for name, value in changes.items():
        if not (isinstance(value, Mapping) and isinstance(fields.get(name), Mapping)):
            result[name] = value
        elif "only" in value:
            result[name] = {inner: each for inner, each in value.items() if inner != "only"}
        else:
            result[name] = merge(fields[name], value)
    return result


def expanded(value: Any, fragments: Mapping[str, Any]) -> Any:
    """``value`` with the fragments that it names in the places where it does; what comes later wins."""
    if isinstance(value, list):
        return [each for item in value for each in _items(item, fragments)]
    if not isinstance(value, Mapping):
        return value
    result: dict[str, Any] = {}
    for name, each in value.items():
        if name == "with":
            for fragment in [each] if isinstance(each, str) else each:
                result = merge(result, expanded(fragments[fragment], fragments))
        else:
            result = merge(result, {name: expanded(each, fragments)})
    return result


def _items(item: Any, fragments: Mapping[str, Any]) -> list[Any]:
    """An item of a list; of ``with: name`` alone, which is a list too, all of its."""
    if isinstance(item, Mapping) and item.keys() == {"with"} and isinstance(fragments.get(item["with"]), list):
        return expanded(fragments[item["with"]], fragments)
    return [expanded(item, fragments)]


_SIZE = re.compile(r"(?=.*[a-z])(?:\b(?:heads|kv_heads|vocab)\b|[\d\s+*/%()-])+")


def is_size(text: str) -> bool:
    """Tell an expression over the sizes of a model from any other text: it has no other words."""
    return _SIZE.fullmatch(text) is not None


def evaluate(text: str, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Return the value of an expression."""
    try:
        return eval(_compiled(text), {"__builtins__": {}, **(functions or {})}, names)
    except (NameError, SyntaxError) as error:
        raise ValueError(f"{text!r} has no value: {error}") from error


@functools.cache
def _compiled(text: str) -> CodeType:
    return compile(text.strip(), "tests/zoo", "eval")

"""Put together mappings of the data: fragments that an entry names with ``with``, and changes of a variant."""

from collections.abc import Mapping
from typing import Any


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

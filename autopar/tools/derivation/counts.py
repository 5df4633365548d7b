"""Numbers as a policy writes them: by the name of a config's attribute where one has the value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["count_of", "integers", "integers_of_modules"]

_KEYS = ("key_value", "kv")


def integers(config: Any) -> dict[str, int]:
    """Return the integers of a config, also those that it knows under a second name."""
    found = {name: value for name, value in vars(config).items() if type(value) is int and value > 1 and name[0] != "_"}
    for other in getattr(config, "attribute_map", {}):
        value = getattr(config, other, None)
        if type(value) is int and value > 1:
            found.setdefault(other, value)
    return found


def integers_of_modules(block: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Yield the integer attributes of the modules in a block: path, name, value."""
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if type(value) is int and value > 1 and not name.startswith("_"):
                yield path, name, value


def count_of(
    value: Sequence[int], config: Any, blocks: Sequence[nn.Module], like: str, near: str = "", *, loose: bool = False
) -> str:
    """Return how a policy writes a count that is ``value`` in each block.

    Args:
        like: ``heads``, ``keys`` (heads of keys and values) or ``width``: which names are preferred.
        loose: any attribute will do that is the only one of that value.
        near: a path in the block; attributes of modules near it are preferred.
    """
    if len(set(value)) == 1:
        named = [name for name, number in integers(config).items() if number == value[0] and _fits(name, like)]
        if named:
            return min(named, key=lambda name: _rank(name, like))
    known: set[tuple[str, str]] | None = None
    for number, block in zip(value, blocks, strict=True):
        own = {
            (path, name) for path, name, found in integers_of_modules(block) if found == number and _fits(name, like)
        }
        known = own if known is None else known & own
    if known:
        path, name = min(known, key=lambda one: (_rank(one[1], like), -_common(one[0], near), one))
        return ".".join(part for part in ("block", path, name) if part)
    same = [name for name, number in integers(config).items() if len(set(value)) == 1 and number == value[0]]
    if loose and len(same) == 1:
        return same[0]
    if len(set(value)) == 1 and (found := _quotient(value[0], integers(config))):
        return found
    return str(value[0])


def _fits(name: str, like: str) -> bool:
    if like in ("heads", "keys"):
        return (
            any(part in name for part in ("head", "group", "num_k", "num_v"))
            and "dim" not in name
            and "layer" not in name
        )
    return True


def _rank(name: str, like: str) -> tuple[bool, bool, int]:
    keys = any(part in name for part in _KEYS)
    return keys != (like == "keys"), not name.startswith(("num", "n_")), len(name)


def _common(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _quotient(value: int, known: dict[str, int]) -> str:
    for top, a in known.items():
        for bottom, b in known.items():
            if ("dim" in bottom or "size" in bottom) and a == value * b and b > 1 and "head" in bottom:
                return f"{top} / {bottom}"
    return ""

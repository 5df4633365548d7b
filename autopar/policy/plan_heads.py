"""The heads of an attention module whose plan does not name them: counted on the module and in its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

__all__ = ["Heads", "heads_of"]

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_GROUPS = "num_key_value_groups"
_WIDTH = ("head_dim", "head_size", "attention_head_size")
_SIGNS = (*_HEADS, *_KV_HEADS, _GROUPS, *_WIDTH)


@dataclass(frozen=True)
class Heads:
    """Query and KV heads of an attention module.

    Attributes:
        count, kv_count: how many.
        width: features of a head; None if nothing says it.
        expression, kv_expression: what a policy says of the counts: attributes of the block, or numbers.
    """

    count: int
    kv_count: int
    width: int | None
    expression: str
    kv_expression: str

    def __str__(self) -> str:
        return f"{self.count} heads or {self.kv_count} KV heads"

    def unit_of(self, name: str, features: int, *, latent: bool = False) -> str | None:
        """Return the unit that so many features of a layer are made of; None if neither fits.

        Args:
            latent: keys and values of all heads come out of one small projection.
        """
        if latent:
            return None if features % self.count else "heads"
        of_keys = name.startswith(("k", "v"))
        units = [("heads", self.count), ("kv_heads", self.kv_count)][:: -1 if of_keys else 1]
        exact = (unit for unit, count in units if self.width and features == count * self.width)
        return next(exact, None) or next((unit for unit, count in units if features % count == 0), None)

    def attributes(self, module: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield the counts that the module keeps and that become this rank's, with their unit."""
        for names, unit, count in ((_HEADS, "heads", self.count), (_KV_HEADS, "kv_heads", self.kv_count)):
            yield from ((name, unit) for name in names if _number(module, name) == count)
        if _number(module, _GROUPS) == self.count // self.kv_count:
            yield _GROUPS, "heads / kv_heads"


def heads_of(module: nn.Module, model: PreTrainedModel, inside: str) -> Heads | None:
    """Count the heads of an attention module; None if ``module`` does not look like one.

    Args:
        inside: path of the module in its block; empty outside of blocks.
    """
    if not any(_number(module, sign) for sign in _SIGNS):
        return None
    config: Any = getattr(module, "config", None) or _config_around(module, model)
    count, expression = _counted(module, config, _HEADS, inside)
    if count is None:
        return None
    kv, kv_expression = _counted(module, None, _KV_HEADS, inside)
    groups = _number(module, _GROUPS)
    if kv is None and groups and count % groups == 0:
        kv = count // groups
        kv_expression = f"{expression} / block.{inside}.{_GROUPS}" if inside else str(kv)
    if kv is None:
        kv = _first(config, _KV_HEADS) or count
        kv_expression = str(kv) if kv != count else expression
    width = _first(module, _WIDTH) or _first(config, _WIDTH)
    return Heads(count, kv, width, expression, kv_expression) if count % kv == 0 else None


def _counted(module: nn.Module, config: Any, names: tuple[str, ...], inside: str) -> tuple[int | None, str]:
    """A count, of the module or else of the config, and what a policy says of it."""
    for name in names:
        found = _number(module, name)
        if found:
            return found, f"block.{inside}.{name}" if inside else str(found)
    found = _first(config, names)
    return found, str(found)


def _config_around(module: nn.Module, model: PreTrainedModel) -> Any:
    """The config of the innermost model around a module."""
    inner: Any = model
    for other in model.modules():
        if isinstance(other, PreTrainedModel) and any(part is module for part in other.modules()):
            inner = other
    return inner.config.get_text_config() if inner is model else inner.config


def _first(holder: Any, names: tuple[str, ...]) -> int | None:
    return next((found for name in names if (found := _number(holder, name))), None)


def _number(holder: Any, name: str) -> int | None:
    try:
        found = getattr(holder, name, None)
    except Exception:  # a config that says it layer by layer
        return None
    return found if type(found) is int and found > 0 else None

"""A module's own view of the model's config: the same object state, with some numbers of its own.

Attention that reads ``self.config.num_attention_heads`` must see its share, while everything else (and whatever is
set later, such as the attention implementation) stays that of the model.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

__all__ = ["own_config", "set_own"]


class _View:
    """Before the config's class in the order of classes; transformers shall not make a dataclass of the whole."""

    _autopar_whole: Any
    _autopar_values: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = own_config(deepcopy(type(self)._autopar_whole, memo))
        for name, value in type(self)._autopar_values.items():
            set_own(copied, name, value)
        memo[id(self)] = copied
        return copied


def own_config(config: Any) -> Any:
    """A config that shares its state with ``config``; :func:`set_own` gives it values of its own."""
    kind: Any = type(type(config).__name__, (_View, type(config)), {})
    kind._autopar_whole, kind._autopar_values = config, {}
    view = object.__new__(kind)
    object.__setattr__(view, "__dict__", config.__dict__)
    return view


def set_own(view: Any, name: str, value: Any) -> None:
    """Give a view of :func:`own_config` a value that hides the config's."""
    name = (getattr(view, "attribute_map", None) or {}).get(name, name)
    kind: Any = type(view)
    kind._autopar_values[name] = value
    setattr(kind, name, property(lambda self: type(self)._autopar_values[name]))

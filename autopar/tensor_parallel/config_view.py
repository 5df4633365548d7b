"""A module's view of the model's config: the same object state, with local sizes.

Attention that reads ``self.config.num_attention_heads`` must see this rank's number, while everything else (and what is
set later, such as the attention implementation) stays that of the model.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

__all__ = ["config_view", "set_value"]


class _View:
    """Mixin first in the MRO. Its __init_subclass__ keeps transformers from turning the view into a dataclass."""

    _autopar_whole: Any
    _autopar_values: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = config_view(deepcopy(type(self)._autopar_whole, memo))
        for name, value in type(self)._autopar_values.items():
            set_value(copied, name, value)
        memo[id(self)] = copied
        return copied


def config_view(config: Any) -> Any:
    """Make a config with the state (``__dict__``) of ``config``; :func:`set_value` overrides single values."""
    kind: Any = type(type(config).__name__, (_View, type(config)), {})
    kind._autopar_whole, kind._autopar_values = config, {}
    view = object.__new__(kind)
    object.__setattr__(view, "__dict__", config.__dict__)
    return view


def set_value(view: Any, name: str, value: Any) -> None:
    """Override a value of the config in a view of :func:`config_view`."""
    name = (getattr(view, "attribute_map", None) or {}).get(name, name)
    kind: Any = type(view)
    kind._autopar_values[name] = value
    setattr(kind, name, property(lambda self: type(self)._autopar_values[name]))

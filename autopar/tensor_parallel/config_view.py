"""A module's view of the model's config: the same object state, with local sizes.

Attention that reads ``self.config.num_attention_heads`` must see this rank's number, while everything else (and what is
set later, such as the attention implementation) stays that of the model.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any


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


def view_of_config(module: Any) -> Any:
    """Return the module's view of its config; the config itself is kept as ``_autopar_config``."""
    if "_autopar_config" not in vars(module):
        module._autopar_config = module.config
        module.config = config_view(module.config)
    return module.config


def drop_value(module: Any, name: str) -> None:
    """Undo :func:`set_value` on the module's view; the config itself comes back with the last value."""
    if "_autopar_config" not in vars(module):
        return
    kind: Any = type(module.config)
    if kind._autopar_values.pop(name, None) is not None:
        delattr(kind, name)
    if not kind._autopar_values:
        module.config = vars(module).pop("_autopar_config")

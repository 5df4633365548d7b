"""Methods that a parallelized model has besides those of its class, or instead of them. Each name has one owner.

Tensor parallelism, the pipeline and checkpoints each give the model some. None puts its own over another's, so the
order in which they do it does not matter, and each takes away what it gave.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["bind", "unbind"]

_OWNERS = "_autopar_methods"


def bind(module: nn.Module, owner: str, **methods: Callable[..., Any]) -> None:
    """Give ``module`` methods of its own. They are bound ones: ``copy.deepcopy`` binds them to the copy.

    Raises:
        RuntimeError: another owner has given it one of that name.
    """
    owners: dict[str, str] = module.__dict__.setdefault(_OWNERS, {})
    for name, function in methods.items():
        if owners.setdefault(name, owner) != owner:
            raise RuntimeError(f"{type(module).__name__}.{name} is {owners[name]}'s: {owner} cannot replace it")
        module.__dict__[name] = MethodType(function, module)


def unbind(model: nn.Module, owner: str) -> None:
    """Take away what ``owner`` has given to ``model`` and the modules in it."""
    for module in model.modules():
        owners: dict[str, str] = module.__dict__.get(_OWNERS, {})
        for name in [name for name, other in owners.items() if other == owner]:
            del owners[name]
            module.__dict__.pop(name, None)
        if not owners:
            module.__dict__.pop(_OWNERS, None)

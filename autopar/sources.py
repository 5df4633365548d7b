"""Notes that a lazily built module keeps beside its parameters, which have no memory: where values will come from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.checkpoint.lazy import LazyTensor

__all__ = ["Init", "Sources", "forget", "inits_of", "remember", "sources_of", "swap"]

_SOURCES = "_autopar_sources"


class Init(NamedTuple):
    """One call of ``torch.nn.init``: ``function(tensor, *args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Sources:
    """Where the values of a module's parameters come from. Copies of a module share them: they are only read.

    Attributes:
        values: parameter name -> what to read; None: random initialization.
        inits: parameter name -> what the constructor called on it from ``torch.nn.init``, in order.
    """

    def __init__(self) -> None:
        self.values: dict[str, LazyTensor | None] = {}
        self.inits: dict[str, tuple[Init, ...]] = {}

    def __deepcopy__(self, memo: Any) -> Sources:
        copied = Sources()
        copied.values, copied.inits = dict(self.values), dict(self.inits)
        return copied


def remember(module: nn.Module, name: str, source: LazyTensor | None, inits: Sequence[Init] = ()) -> None:
    """Note where the values of a module's parameter will come from."""
    noted: Sources = vars(module).setdefault(_SOURCES, Sources())
    noted.values[name] = source
    noted.inits[name] = tuple(inits)


def sources_of(module: nn.Module) -> dict[str, LazyTensor | None]:
    """What was noted for the module's own parameters; empty if it was not built lazily."""
    noted = vars(module).get(_SOURCES)
    return noted.values if isinstance(noted, Sources) else {}


def inits_of(module: nn.Module) -> dict[str, tuple[Init, ...]]:
    """What the module's constructor called on its parameters, if it was built lazily."""
    noted = vars(module).get(_SOURCES)
    return noted.inits if isinstance(noted, Sources) else {}


def forget(module: nn.Module) -> None:
    """Drop the notes; the parameters have their values."""
    vars(module).pop(_SOURCES, None)


def swap(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter other storage, also on another kind of device, which ``parameter.data =`` refuses to do.

    The object stays the same one: optimizers, ties and lists of parameters go on pointing to it.
    """
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter))
    if weakref.getweakrefs(parameter):  # an LSTM has some; the object stays, so they go on being right
        torch._C._swap_tensor_impl(parameter, other)
    else:
        torch.utils.swap_tensors(parameter, other)

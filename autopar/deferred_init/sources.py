"""Notes that a lazily built module keeps beside its parameters, which have no memory: where values will come from."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.storage.lazy_tensor import LazyTensor

__all__ = [
    "Init",
    "Sources",
    "by_parameter",
    "forget",
    "inits_of",
    "remember",
    "sources_of",
    "swap",
    "version",
    "versions_of",
]

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
        noted: parameter name -> the parameter itself and its version then, by which later writes into it are found.
    """

    def __init__(self) -> None:
        self.values: dict[str, LazyTensor | None] = {}
        self.inits: dict[str, tuple[Init, ...]] = {}
        self.noted: dict[str, tuple[nn.Parameter, int]] = {}

    def __deepcopy__(self, memo: Any) -> Sources:
        copied = Sources()
        copied.values, copied.inits = dict(self.values), dict(self.inits)
        for name, (parameter, then) in self.noted.items():
            other = copy.deepcopy(parameter, memo)  # counts its own versions
            copied.noted[name] = other, version(other) - (version(parameter) - then)
        return copied


def remember(module: nn.Module, name: str, source: LazyTensor | None, inits: Sequence[Init] = ()) -> None:
    """Note where the values of a module's parameter will come from."""
    noted: Sources = vars(module).setdefault(_SOURCES, Sources())
    noted.values[name] = source
    noted.inits[name] = tuple(inits)
    noted.noted[name] = module._parameters[name], version(module._parameters[name])  # type: ignore[assignment,arg-type]


def version(parameter: torch.Tensor) -> int:
    """How often a parameter was written into; writes into its ``.data``, or under inference mode, do not count."""
    return 0 if parameter.is_inference() else parameter._version


def sources_of(module: nn.Module) -> dict[str, LazyTensor | None]:
    """What was noted for the module's own parameters; empty if it was not built lazily."""
    noted = vars(module).get(_SOURCES)
    return noted.values if isinstance(noted, Sources) else {}


def inits_of(module: nn.Module) -> dict[str, tuple[Init, ...]]:
    """What the module's constructor called on its parameters, if it was built lazily."""
    noted = vars(module).get(_SOURCES)
    return noted.inits if isinstance(noted, Sources) else {}


def versions_of(module: nn.Module) -> dict[str, tuple[nn.Parameter, int]]:
    """The parameters that the notes were made for, and their versions then."""
    noted = vars(module).get(_SOURCES)
    return noted.noted if isinstance(noted, Sources) else {}


def by_parameter(modules: Iterable[nn.Module]) -> dict[int, tuple[LazyTensor | None, int]]:
    """``id(parameter)`` -> where its values come from, and its version when that was noted; tied ones are one."""
    found: dict[int, tuple[LazyTensor | None, int]] = {}
    for module in modules:
        for name, (parameter, then) in versions_of(module).items():
            source, first = found.get(id(parameter), (None, then))
            found[id(parameter)] = sources_of(module)[name] if source is None else source, first
    return found


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

"""Sources of the values of a lazily built module's parameters, which have no memory yet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from autopar.foreign.modules import own_parameters
from autopar.foreign.tensors import version_of
from autopar.storage.lazy_tensor import LazyTensor

__all__ = [
    "Init",
    "Sources",
    "by_parameter",
    "clear_sources",
    "inits_of",
    "set_source",
    "sources_of",
    "versions_of",
]

_SOURCES = "_autopar_sources"


class Init(NamedTuple):
    """One call of ``torch.nn.init``: ``function(tensor, *args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Sources:
    """Sources of the values of a module's parameters. Only read, also by copies of the module.

    Attributes:
        values: parameter name -> what to read; None: random initialization.
        inits: parameter name -> calls of ``torch.nn.init`` on it by the constructor, in order.
        versions: parameter name -> the parameter itself and its version then, to find later writes into it.
    """

    def __init__(self) -> None:
        self.values: dict[str, LazyTensor | None] = {}
        self.inits: dict[str, tuple[Init, ...]] = {}
        self.versions: dict[str, tuple[nn.Parameter, int]] = {}

    def __deepcopy__(self, memo: Any) -> Sources:
        copied = Sources()
        copied.values, copied.inits = dict(self.values), dict(self.inits)
        for name, (parameter, then) in self.versions.items():
            other = copy.deepcopy(parameter, memo)  # counts its own versions
            copied.versions[name] = other, version_of(other) - (version_of(parameter) - then)
        return copied


def set_source(module: nn.Module, name: str, source: LazyTensor | None, inits: Sequence[Init] = ()) -> None:
    """Set the source of a module's parameter."""
    sources: Sources = vars(module).setdefault(_SOURCES, Sources())
    sources.values[name] = source
    sources.inits[name] = tuple(inits)
    sources.versions[name] = own_parameters(module)[name], version_of(own_parameters(module)[name])


def _sources(module: nn.Module) -> Sources:
    found = vars(module).get(_SOURCES)
    return found if isinstance(found, Sources) else Sources()


def sources_of(module: nn.Module) -> dict[str, LazyTensor | None]:
    """Return the sources of the module's own parameters; empty if it was not built lazily."""
    return _sources(module).values


def inits_of(module: nn.Module) -> dict[str, tuple[Init, ...]]:
    """Return the recorded initialization of the module's own parameters."""
    return _sources(module).inits


def versions_of(module: nn.Module) -> dict[str, tuple[nn.Parameter, int]]:
    """Return the parameters that sources were set for, and their versions then."""
    return _sources(module).versions


def by_parameter(modules: Iterable[nn.Module]) -> dict[int, tuple[LazyTensor | None, int]]:
    """Return ``id(parameter)`` -> its source, and its version when that was set; tied parameters are one."""
    found: dict[int, tuple[LazyTensor | None, int]] = {}
    for module in modules:
        for name, (parameter, then) in versions_of(module).items():
            source, first = found.get(id(parameter), (None, then))
            found[id(parameter)] = sources_of(module)[name] if source is None else source, first
    return found


def clear_sources(module: nn.Module) -> None:
    """Remove the sources; the parameters have their values."""
    vars(module).pop(_SOURCES, None)

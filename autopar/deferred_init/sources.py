"""Sources of the values of a lazily built module's parameters, which have no memory yet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from autopar.foreign.modules import own_parameters
from autopar.foreign.tensors import version_of
from autopar.storage.lazy_tensor import LazyTensor

_SOURCES = "_autopar_sources"


class Init(NamedTuple):
    """One call of ``torch.nn.init``: ``function(tensor, *args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where a parameter's values come from.

    Attributes:
        lazy: the tensor to read; None: random initialization.
        inits: calls of ``torch.nn.init`` on it by the constructor, in order.
        parameter, version: itself, and its version then, to find later writes into it.
    """

    lazy: LazyTensor | None
    inits: tuple[Init, ...]
    parameter: nn.Parameter
    version: int

    def __deepcopy__(self, memo: Any) -> Source:
        if type(self.parameter).__deepcopy__ is not nn.Parameter.__deepcopy__:
            return self  # of a library that quantizes it later; such copies have other parameters in its place
        copied = copy.deepcopy(self.parameter, memo)  # counts its own versions
        then = version_of(copied) - (version_of(self.parameter) - self.version)
        return Source(self.lazy, self.inits, copied, then)


def set_source(module: nn.Module, name: str, lazy: LazyTensor | None, inits: Sequence[Init] = ()) -> None:
    """Set the source of a module's parameter."""
    parameter = own_parameters(module)[name]
    vars(module).setdefault(_SOURCES, {})[name] = Source(lazy, tuple(inits), parameter, version_of(parameter))


def sources_of(module: nn.Module) -> Mapping[str, Source]:
    """Return the sources of the module's own parameters; empty if it was not built lazily."""
    found: Mapping[str, Source] = vars(module).get(_SOURCES, {})
    return found


def by_parameter(modules: Iterable[nn.Module]) -> dict[int, tuple[LazyTensor | None, int]]:
    """Return ``id(parameter)`` -> what to read, and its version when that was set; tied parameters are one."""
    found: dict[int, tuple[LazyTensor | None, int]] = {}
    for source in (source for module in modules for source in sources_of(module).values()):
        lazy, first = found.get(id(source.parameter), (None, source.version))
        found[id(source.parameter)] = source.lazy if lazy is None else lazy, first
    return found


def clear_sources(module: nn.Module) -> None:
    """Remove the sources; the parameters have their values."""
    vars(module).pop(_SOURCES, None)

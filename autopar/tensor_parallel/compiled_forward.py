"""The checks before a forward in code that torch.compile traces: one operation of the graph.

Dynamo traces the hooks of a compiled model. Comparing ranks there would break the graph, or, worse, run once while the
graph is made and never again. As an operation that the compiler cannot look into, it runs whenever the graph does. It
returns copies of the tensors that the forward begins with, so that everything else in the graph comes after it.

``torch.compile(model)`` calls the hooks of ``model`` itself outside of its graph; a function that calls the model, or a
model around it, has them inside. So hooks are written for both: see :func:`no_graph_of_its_own`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from autopar.foreign.tensors import leave_alone
from autopar.guards.forward import leaves

_Function = TypeVar("_Function", bound=Callable[..., Any])

_CHECKS: weakref.WeakValueDictionary[int, CompiledCheck] = weakref.WeakValueDictionary()
_KEYS = itertools.count()


def no_graph_of_its_own(function: _Function) -> _Function:
    """Let a hook be traced inside of a graph, and run as it is outside of any instead of beginning one."""
    outside = torch.compiler.disable(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.compiler.is_compiling() else outside)(*args, **kwargs)

    leave_alone(call.__code__)
    return cast("_Function", functools.wraps(function)(call))


class CompiledCheck:
    """Base of what checks a forward and can do so as an operation of a graph; copies have keys of their own."""

    key: int

    def register(self) -> None:
        """Let graphs find this object, by a number."""
        self.key = next(_KEYS)
        _CHECKS[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.copy(self)
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied.register()
        return copied

    def run(self, arguments: Mapping[str, Any]) -> None:
        """Check a forward with these arguments, by name. May be a collective."""
        raise NotImplementedError


def checked_arguments(
    check: CompiledCheck, named: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward as copies that exist once they have been checked; ``named``: the same ones."""
    found = list(leaves(named))
    tensors = [value for _, value in found if isinstance(value, torch.Tensor)]
    names = "\n".join(name for name, value in found if isinstance(value, torch.Tensor))
    others = "\n".join(f"{name}={value!r}" for name, value in found if isinstance(value, bool | int | float | str))
    if not tensors:
        return args, kwargs
    copies = _begin_forward(tensors, check.key, names, others)

    def copied(value: Any) -> Any:
        return next((new for old, new in zip(tensors, copies, strict=True) if old is value), value)

    return tuple(copied(value) for value in args), {name: copied(value) for name, value in kwargs.items()}


def _run(tensors: Sequence[torch.Tensor], key: int, names: str, others: str) -> list[torch.Tensor]:
    check = _CHECKS.get(key)
    if check is not None:  # a graph may outlive its model
        check.run({**dict(zip(names.split("\n"), tensors, strict=True)), "other arguments": others})
    return [tensor.clone() for tensor in tensors]


def _on_meta(tensors: Sequence[torch.Tensor], key: int, names: str, others: str) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    return gradients, None, None, None


_begin_forward: Any = torch.library.custom_op(
    "autopar::begin_forward",
    _run,
    mutates_args=(),
    schema="(Tensor[] tensors, int key, str names, str others) -> Tensor[]",
    tags=[torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else [],
)
_begin_forward.register_fake(_on_meta)
_begin_forward.register_autograd(_backward)

"""Names in the traces of torch.profiler: collectives with their axis and shape, actions of a pipeline, messages.

Nothing is recorded, formatted or allocated while no profiler runs: ``record_function`` alone would cost 8 us a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch.autograd import profiler

from autopar.distributed.axis import Axis
from autopar.foreign.autograd import PROFILER_RUNS

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NOTHING = nullcontext()
_listeners: list[Callable[[str], AbstractContextManager[Any]]] = []


def is_profiling() -> bool:
    """Return whether a profiler of torch runs; False in code that torch.compile traces."""
    return getattr(profiler, PROFILER_RUNS, False) and not torch.compiler.is_compiling()


def record(name: Callable[..., str], *args: Any) -> AbstractContextManager[Any]:
    """Give what runs inside the name ``name(*args)``, which is made only while a profiler runs or someone listens."""
    if _listeners:
        return _listeners[-1](name(*args))
    return profiler.record_function(name(*args)) if is_profiling() else _NOTHING


@contextmanager
def listening(listener: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run what :func:`record` gives a name inside of ``listener(name)``."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


def named_collective(name: str) -> Callable[[_Function], _Function]:
    """Name the calls of a function that takes an axis and a tensor: ``all-reduce over tp [4, 128, 512]: NAME``.

    The axis is an argument, or ``ctx.axis`` of the first one, as in the backward of an autograd function.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not is_profiling():
                return function(*args, **kwargs)
            with profiler.record_function(_described(name, args)):
                return function(*args, **kwargs)

        return cast("_Function", run)

    return decorate


def _described(name: str, args: tuple[Any, ...]) -> str:
    axis = next((arg for arg in args if isinstance(arg, Axis)), None) or getattr(args[0], "axis", None)
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    collective, _, place = name.partition(": ")
    shape = "" if tensor is None else f" {list(tensor.shape)}"
    return f"{collective} over {axis.name if axis else '?'}{shape}" + (f": {place}" if place else "")

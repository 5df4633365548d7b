"""Shared parts of the autograd functions of sharded layers: second derivatives, and names in profiler traces.

Collectives are linear, so the backward of each is another collective, which is differentiable again: the backward of
``copy`` is ``reduce``, and vice versa. A function that saves memory or overlaps communication has two backwards: a fast
one, and a differentiable one for ``create_graph=True`` (:func:`any_order`).

torch's ``once_differentiable`` raises for a missing second derivative only if ``backward()`` reaches it;
``torch.autograd.grad`` silently leaves the term out. So a function without a second backward raises in the first one
with ``create_graph=True`` (:func:`single_backward`). torch.func (grad, vmap, jvp) and dual tensors raise, because they
need more than a backward.

Names are formatted only while a profiler runs: ``record_function`` alone costs 8 us per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad, profiler

from autopar.compat.tensors import PROFILER_RUNS, dispatch_modes, is_functorch_active, is_transformed, tree_leaves
from autopar.distributed.axis import Axis
from autopar.errors import ConfigError
from autopar.tensor_tracking import TensorTracking

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NOTHING = nullcontext()
_listeners: list[Callable[[str], AbstractContextManager[Any]]] = []


def is_profiling() -> bool:
    """Return whether torch's profiler runs; False in code that torch.compile traces."""
    return getattr(profiler, PROFILER_RUNS, False) and not torch.compiler.is_compiling()


def record(name: Callable[..., str], *args: Any) -> AbstractContextManager[Any]:
    """Record the block under the name ``name(*args)``, which is formatted only for a profiler or a listener."""
    if _listeners:
        return _listeners[-1](name(*args))
    return profiler.record_function(name(*args)) if is_profiling() else _NOTHING


@contextmanager
def listening(listener: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter ``listener(name)`` around each block of :func:`record`."""
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
            if not getattr(profiler, PROFILER_RUNS, False) or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with profiler.record_function(_described(name, args)):
                return function(*args, **kwargs)

        return cast("_Function", run)

    return decorate


def _described(name: str, args: tuple[Any, ...]) -> str:
    axis = next((arg for arg in args if isinstance(arg, Axis)), getattr(args[0], "axis", None))
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    collective, _, place = name.partition(": ")
    shape = "" if tensor is None else f" {list(tensor.shape)}"
    return f"{collective} over {axis.name if axis else '?'}{shape}" + (f": {place}" if place else "")


def keep_none(ctx: Any) -> None:
    """Pass missing gradients to the backward as None instead of zeros, for :func:`any_order`."""
    if type(ctx) is not NoGraph and not torch.compiler.is_compiling():  # a compiled graph has no missing gradients
        ctx.set_materialize_grads(False)


class NoGraph:
    """A replacement of autograd's context for calls without a backward."""

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        pass


def any_order(again: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorate the backward of an autograd function so that ``again`` runs with ``create_graph=True``.

    If all gradients are None, neither runs. The graph is identical on all ranks, so all of them skip the collective.

    Args:
        again: A function ``again(ctx, *gradients)`` that is differentiable in the saved tensors and the gradients.
    """

    def decorate(backward: _Function) -> _Function:
        @functools.wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            if all(gradient is None for gradient in gradients):
                return (None,) * len(ctx.needs_input_grad)
            refuse_transforms(lambda: gradients)
            twice = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            return (again if twice else backward)(ctx, *gradients)

        return cast("_Function", run)

    return decorate


def refuse_again(*gradients: Any) -> Any:
    """Raise ConfigError instead of a second backward."""
    raise ConfigError(
        "create_graph=True is not supported with context_parallel_size: exchanges between ranks have no second "
        "derivative\n  Use tensor_parallel_size or replicas for a penalty on gradients, a Hessian or a meta-gradient."
    )


single_backward: Callable[[_Function], _Function] = any_order(refuse_again)
"""A decorator for the backward of an autograd function without second derivatives."""


def refuse_transforms(given: Callable[[], Any]) -> None:
    """Check that no transform of torch.func and no forward-mode derivative runs where ranks exchange tensors.

    Raises:
        ConfigError: A transform runs, or a tensor in ``given()`` has a tangent. Raised on every rank that calls it.
    """
    if not is_transformed():
        return
    tensors = (x for x in tree_leaves(given()) if isinstance(x, torch.Tensor))
    if is_functorch_active() or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ConfigError(
            "torch.func (grad, vmap, jvp, ...) and dual tensors are not supported on a sharded model.\n"
            "  Use loss.backward() or torch.autograd.grad (create_graph=True works) for each sample, or replicas of\n"
            "  the full model."
        )


def is_watched(x: torch.Tensor) -> bool:
    """Return whether a dispatch mode may keep the results of operations, as selective checkpointing does."""
    if x.is_meta or torch.compiler.is_compiling():
        return False
    modes = dispatch_modes()
    return bool(modes) and not all(isinstance(mode, TensorTracking) for mode in modes)

"""Shared parts of the autograd functions of sharded layers: second derivatives, and names in profiler traces.

Collectives are linear, so the backward of each is another one, which can be differentiated in turn: ``copy``'s is
``reduce``, and the other way round. A function that saves memory or waits next to other work has two backwards: its
own, and a plain one that is run with ``create_graph=True`` (:func:`any_order`).

torch's ``once_differentiable`` reports a missing second derivative only to a ``backward()`` that walks into it;
``torch.autograd.grad`` goes around it and leaves the term out. Without a second backward here, the first one
with ``create_graph=True`` raises (:func:`single_backward`). torch.func (grad, vmap, jvp) and dual tensors need more of
an autograd function than a backward: they are refused.

No name is formatted while no profiler runs: ``record_function`` alone would cost 8 us a call.
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
    """Let :func:`any_order` see in this forward's backward that no gradient came: torch makes zeros otherwise."""
    if type(ctx) is not NoGraph and not torch.compiler.is_compiling():  # a graph has no such gradients
        ctx.set_materialize_grads(False)


class NoGraph:
    """Takes the place of autograd's context where no gradient will come back."""

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        pass


def any_order(again: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorate the backward of an autograd function: with ``create_graph=True`` ``again(ctx, *gradients)`` runs.

    Without any gradient neither runs: the graph is identical on all ranks, and so is the collective that they skip.

    Args:
        again: The same gradients, differentiable in the saved tensors and in the gradients.
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
    """Raise ConfigError in the place of a backward that cannot be differentiated again."""
    raise ConfigError(
        "create_graph=True with context_parallel_size: its ranks exchange rows and states in the backward, and that is "
        "not\n  differentiated again: a penalty on gradients, a Hessian or a meta-gradient would be another number "
        "than the plain\n  model's. tensor_parallel_size goes with it, and so do replicas of the whole model."
    )


single_backward: Callable[[_Function], _Function] = any_order(refuse_again)
"""Decorates the backward of an autograd function whose gradients cannot be differentiated again."""


def refuse_transforms(given: Callable[[], Any]) -> None:
    """Check that no transform of torch.func and no forward mode runs where ranks exchange tensors.

    Raises:
        ConfigError: a transform runs, or a tensor in ``given()`` has a tangent; on every rank that calls it.
    """
    if not is_transformed():
        return
    tensors = (x for x in tree_leaves(given()) if isinstance(x, torch.Tensor))
    if is_functorch_active() or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ConfigError(
            "torch.func (grad, vmap, jvp, ...) and dual tensors are not supported on a sharded model.\n"
            "  Use loss.backward() or torch.autograd.grad (create_graph=True works), for one sample at a time; or\n"
            "  replicas of the full model."
        )


def is_watched(x: torch.Tensor) -> bool:
    """Return whether a dispatch mode sees what operations return, and may keep it, as selective checkpointing does."""
    if x.is_meta or torch.compiler.is_compiling():
        return False
    modes = dispatch_modes()
    return bool(modes) and not all(isinstance(mode, TensorTracking) for mode in modes)

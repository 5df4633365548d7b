"""The hooks that torch keeps for a whole process, passed on to the listeners that are alive.

torch goes through them while they run, and a hook that a garbage collection takes away in between ends that with an
error. So there is one of each kind, registered once and never removed; listeners are held weakly.

[Note: what is noticed in a step] Optimizers were tried: reads of shards are silent while they step. Those in hooks of
the user's before a step are told, and those of a class that could not be tried (SAM around another optimizer).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.call_site import is_of_library
from autopar.distributed.shard_reads import switch
from autopar.foreign.autograd import step_hooks
from autopar.guards.optimizer_probe import probe

_Kind = TypeVar("_Kind")

_listeners: list[weakref.ref[Any]] = []  # in the order in which they began to listen
_tried: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
_muting: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()  # the last of its hooks


def listen(listener: object) -> None:
    """Call methods of ``listener`` as long as it lives, those of these that it has.

    ``before_step(optimizer, args, kwargs)``: before the step of any optimizer; ``args`` begin with it.
    ``after_step(optimizer, args, kwargs)``: after it.
    ``before_registration(module, name, submodule)``: before a module becomes part of another one.
    """
    _register()
    forget(None)  # those that live no longer
    _listeners.append(weakref.ref(listener))


def forget(listener: object) -> None:
    """Call ``listener`` no longer."""
    _listeners[:] = [other for other in _listeners if other() not in (None, listener)]


def listeners(kind: type[_Kind]) -> list[_Kind]:
    """Return the listeners of a class that are alive, in the order in which they began to listen."""
    return [found for other in _listeners if isinstance(found := other(), kind)]


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    register_module_module_registration_hook(functools.partial(_call, "before_registration"))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled step is checked, too
def _before_step(optimizer: Optimizer, *arguments: Any) -> None:
    switch.off = True
    _call("before_step", optimizer, *arguments)
    noticed = not _is_tried(optimizer)
    if not noticed and not all(map(is_of_library, step_hooks(optimizer))):
        noticed = True
        if optimizer not in _muting:  # a step that failed leaves it
            _muting[optimizer] = optimizer.register_step_pre_hook(_mute)
    switch.off, switch.in_hook = not noticed, noticed


def _mute(*_: Any) -> None:
    switch.off, switch.in_hook = True, False


def _is_tried(optimizer: Optimizer) -> bool:
    """Return whether it is known how an optimizer of shards steps."""
    if optimizer not in _tried:
        held = any(
            hasattr(parameter, "autopar_shard") for group in optimizer.param_groups for parameter in group["params"]
        )
        _tried[optimizer] = not held or all(probe(optimizer, group) is not None for group in optimizer.param_groups)
    return _tried[optimizer]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: Optimizer, *arguments: Any) -> None:
    handle = _muting.pop(optimizer, None)
    if handle is not None:
        handle.remove()
    switch.off, switch.in_hook = True, False
    _call("after_step", optimizer, *arguments)
    switch.off = False


def _call(method: str, *arguments: Any) -> None:
    for listener in [other() for other in _listeners]:
        if hasattr(listener, method):
            getattr(listener, method)(*arguments)

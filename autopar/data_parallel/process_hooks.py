"""The hooks that torch keeps for a whole process, passed on to the listeners that are alive.

torch goes through them while they run, and a hook that a garbage collection takes away in between ends that with an
error. So there is one of each kind, registered once and never removed; listeners are held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["forget", "listen_to_registrations", "listen_to_steps"]


class StepListener(Protocol):
    """Is called before every optimizer's step."""

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the step; ``args`` begin with the optimizer."""


class RegistrationListener(Protocol):
    """Is called before a module becomes part of another one."""

    def before_registration(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        """Look at what ``module`` is about to get as ``name``."""


_steps: list[weakref.ref[Any]] = []  # in the order in which they began to listen
_registrations: list[weakref.ref[Any]] = []
_registered: set[Callable[..., Any]] = set()


def listen_to_steps(listener: StepListener) -> None:
    """Call ``listener.before_step`` as long as the listener lives."""
    _listen(_steps, listener, register_optimizer_step_pre_hook, _before_step)


def listen_to_registrations(listener: RegistrationListener) -> None:
    """Call ``listener.before_registration`` as long as the listener lives."""
    _listen(_registrations, listener, register_module_module_registration_hook, _before_registration)


def forget(listener: object) -> None:
    """Call ``listener`` no longer."""
    for listeners in (_steps, _registrations):
        listeners[:] = [other for other in listeners if other() not in (None, listener)]


def _listen(listeners: list[weakref.ref[Any]], listener: object, register: Any, hook: Callable[..., Any]) -> None:
    forget(None)  # those that live no longer
    listeners.append(weakref.ref(listener))
    if hook not in _registered:
        _registered.add(hook)
        register(hook)


def _before_step(*step: Any) -> None:
    for listener in [other() for other in _steps]:
        if listener is not None:
            listener.before_step(*step)


def _before_registration(*registration: Any) -> None:
    for listener in [other() for other in _registrations]:
        if listener is not None:
            listener.before_registration(*registration)

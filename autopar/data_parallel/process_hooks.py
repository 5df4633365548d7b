"""The hooks that torch keeps for a whole process, passed on to whatever of ours is alive.

torch goes through them while they run, and a hook that a garbage collection takes away in between ends that with an
error. So there is one of each kind, registered once and never removed; who listens is held weakly.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["forget", "listen_to_registrations", "listen_to_steps"]


class StepListener(Protocol):
    """Hears of every optimizer's step before it is made."""

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the step; ``args`` begin with the optimizer."""


class RegistrationListener(Protocol):
    """Hears of every module that becomes part of another one."""

    def before_registration(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        """Look at what ``module`` is about to get as ``name``."""


_steps: list[weakref.ref[Any]] = []  # in the order in which they began to listen
_registrations: list[weakref.ref[Any]] = []
_registered: set[str] = set()


def listen_to_steps(listener: StepListener) -> None:
    """Call ``listener.before_step`` as long as the listener lives."""
    _add(_steps, listener)
    if "steps" not in _registered:
        _registered.add("steps")
        register_optimizer_step_pre_hook(_before_step)


def listen_to_registrations(listener: RegistrationListener) -> None:
    """Call ``listener.before_registration`` as long as the listener lives."""
    _add(_registrations, listener)
    if "registrations" not in _registered:
        _registered.add("registrations")
        register_module_module_registration_hook(_before_registration)


def forget(listener: object) -> None:
    """Tell ``listener`` nothing any more."""
    for listeners in (_steps, _registrations):
        listeners[:] = [other for other in listeners if other() is not None and other() is not listener]


def _add(listeners: list[weakref.ref[Any]], listener: object) -> None:
    listeners[:] = [other for other in listeners if other() is not None]
    listeners.append(weakref.ref(listener))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in [other() for other in _steps]:
        if listener is not None:
            listener.before_step(optimizer, args, kwargs)


def _before_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    for listener in [other() for other in _registrations]:
        if listener is not None:
            listener.before_registration(module, name, submodule)

"""torch.nn: what a module holds itself, its hooks, and base classes that have no public name; schedulers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout

__all__ = [
    "CALL",
    "HELD",
    "SAVE_STATE",
    "BatchNorm",
    "Convolution",
    "Dropout",
    "add_state_dict_hook",
    "called_instead",
    "convolve",
    "forward_hooks",
    "hooks_of",
    "hooks_of_all",
    "hooks_with_kwargs",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "remove_forward_hooks",
    "state_dict_hooks",
    "steps_of",
    "unsaved_buffers",
]

HELD = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""Attributes of a module that hold its tensors and children."""

CALL = nn.Module._call_impl.__code__  # runs wherever a module is called
SAVE_STATE = nn.Module._save_to_state_dict.__code__  # and where its state dict is made

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def own_parameters(module: Any) -> dict[str, Any]:
    """Return a module's own parameters by name, None for one that was left out: the dict itself, to change."""
    return module._parameters


def own_buffers(module: Any) -> dict[str, Any]:
    """Return a module's own buffers likewise."""
    return module._buffers


def own_modules(module: Any) -> dict[str, nn.Module | None]:
    """Return a module's children likewise."""
    return cast("dict[str, nn.Module | None]", module._modules)


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of buffers that a state dict leaves out."""
    return module._non_persistent_buffers_set


def hooks_of(module: nn.Module, kind: str) -> dict[int, Any]:
    """Return a module's hooks of a kind: ``forward``, ``forward_pre``, ``backward``, ``backward_pre``."""
    return cast("dict[int, Any]", vars(module)[f"_{kind}_hooks"])


def hooks_with_kwargs(module: nn.Module, kind: str) -> set[int]:
    """Return the keys of a module's hooks of a kind that are given keyword arguments too."""
    return set(vars(module).get(f"_{kind}_hooks_with_kwargs", ()))


def hooks_of_all(kind: str) -> tuple[dict[int, Any], set[int]]:
    """Return the hooks of a kind on every module, and the keys of those that are given keyword arguments too."""
    with_kwargs = vars(torch_modules).get(f"_global_{kind}_hooks_with_kwargs", ())
    return vars(torch_modules)[f"_global_{kind}_hooks"], set(with_kwargs)


def forward_hooks(module: nn.Module) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """Yield the hooks around a module's forward: the dict that holds it, its key, the hook."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            yield hooks, key, hook


def remove_forward_hooks(module: nn.Module, kinds: type | tuple[type, ...]) -> None:
    """Remove the hooks of these classes around a module's forward."""
    for hooks, key, hook in forward_hooks(module):
        if isinstance(hook, kinds):
            hooks.pop(key)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def add_state_dict_hook(module: nn.Module, hook: _Hook) -> None:
    """Let a module call ``hook(module, state_dict, prefix, metadata)``, the first of them before public ones."""
    module._register_state_dict_hook(hook)


def state_dict_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks that save a module's state, and those before it is loaded."""
    return module._state_dict_hooks, module._load_state_dict_pre_hooks


def steps_of(scheduler: Any) -> int:
    """Return how many steps a learning-rate scheduler has made."""
    return int(scheduler._step_count)


def convolve(module: Any, x: Any, weight: Any, bias: Any) -> Any:
    """Convolve as a module of torch does, with another weight and bias."""
    return module._conv_forward(x, weight, bias)


@contextlib.contextmanager
def called_instead(functions: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Let a call of each module, inside, be one of its function instead of the module's forward and hooks.

    A function is given what the call would have run, and its arguments.
    """
    name, before = "_compiled_call_impl", list[tuple[dict[str, Any], Any]]()
    try:
        for module, function in functions:
            own = vars(module)
            before.append((own, own.get(name)))
            own[name] = functools.partial(function, own.get(name) or module._call_impl)
        yield
    finally:
        for own, earlier in reversed(before):
            if earlier is None:
                own.pop(name, None)
            else:
                own[name] = earlier

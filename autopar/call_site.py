"""Find the caller of autopar: user code, or a known library."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from autopar.compat.tensors import HOOKS, hooks_of
from autopar.errors import ShardWarning

LOCAL_HOOKS = "_autopar_local_hooks"
"""The attribute of a module whose user hooks expect this rank's shards."""
LIBRARIES = {"autopar", "torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "trl"}
LIBRARIES |= {"diffusers", "safetensors"}
OURS = __file__.rpartition("/")[0] + "/"


def is_ours(frame: FrameType) -> bool:
    """Return whether the code of the frame belongs to autopar."""
    return frame.f_code.co_filename.startswith(OURS)


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file


def is_library(frame: FrameType) -> bool:
    """Return whether the code of the frame belongs to autopar, an installed package, or a model's files on the hub."""
    place = frame.f_code.co_filename
    return (
        is_ours(frame)
        or is_installed(place)
        or place.startswith("<")  # made at run time: dataclasses, torch.fx
        or str(frame.f_globals.get("__name__")).startswith("transformers_modules")
    )


def is_of_library(function: Any) -> bool:
    """Return whether a function, such as a hook, belongs to autopar or a known library."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] in LIBRARIES


def user_hooks(hooks: Mapping[int, Any]) -> list[Any]:
    """Return the user hooks in one of torch's dicts; for a replaced hook, the original one."""
    found = [getattr(hook, "user_hook", hook) for hook in hooks.values()]
    return [hook for hook in found if not is_of_library(hook)]


def hooks_below(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, hook)`` for user hooks on a model's submodules that expect full tensors."""
    for path, module in model.named_modules():
        if path and LOCAL_HOOKS not in vars(module):
            yield from ((path, hook) for kind in HOOKS for hook in user_hooks(hooks_of(module, kind)))


def described(hook: Any) -> str:
    """Return the name of a hook with its file and line."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    code = getattr(hook, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return getattr(hook, "__name__", type(hook).__name__) + place


def calls() -> Iterator[tuple[str, str]]:
    """Yield ``(module, function)`` of the calls that led to autopar, innermost first, up to another call of autopar."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame):
        frame = frame.f_back
    while frame is not None and not is_ours(frame):
        yield str(frame.f_globals.get("__name__")), frame.f_code.co_name
        frame = frame.f_back


def frames_of(module: str) -> Iterator[tuple[FrameType, str]]:
    """Yield the running calls of ``module``, innermost first, with the names of the functions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            yield frame, frame.f_code.co_name
        frame = frame.f_back


def warn_user(message: str) -> None:
    """Warn at the line of user code that led here."""
    warnings.warn(message, ShardWarning, stacklevel=_users()[1])


def place_of_user(frame: FrameType | None = None) -> tuple[str, int]:
    """Return file and line of the user code that led here, or to ``frame``."""
    users = _users(frame)[0]
    return users.f_code.co_filename, users.f_lineno


def _users(frame: FrameType | None = None) -> tuple[FrameType, int]:
    """Return the innermost frame of user code, and the ``stacklevel`` of a warning at it by the caller."""
    level, frame = 2, frame or sys._getframe(2)
    while is_library(frame) and frame.f_back is not None:
        frame = frame.f_back
        level += 1
    return frame, level

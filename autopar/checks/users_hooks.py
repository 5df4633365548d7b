"""Hooks of the user's that see rows of the sequence, where ranks share sequences (context parallelism): a warning.

autopar's own hooks are on the right side of the border. Those of libraries (adapters, offloading, profilers) look at
whole modules and are left alone. Under tensor and sequence parallelism hooks see whole tensors
(:mod:`autopar.tensor_parallel.whole_hooks`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.call_site import is_of_library, warn_user
from autopar.foreign.modules import hooks_of

__all__ = ["UsersHooks"]

_KINDS = ("forward", "forward_pre", "backward", "backward_pre")
_FIRST, _EVERY = 3, 10  # forwards in which hooks are looked for


class UsersHooks:
    """Looks for hooks in the first forwards of a model, and in some later ones, and warns once of each function."""

    def __init__(self) -> None:
        self._forwards = 0
        self._told: set[Any] = set()  # code, or class
        self._parts: list[tuple[str, nn.Module]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> UsersHooks:
        return UsersHooks()

    def look(self, model: nn.Module) -> None:
        """Warn of hooks that are new, where a part of the model has rows."""
        number, self._forwards = self._forwards, self._forwards + 1
        if number >= _FIRST and number % _EVERY:
            return
        if self._parts is None:
            self._parts = list(_parts_with_rows(model))
        for path, part in self._parts:
            for name, module in part.named_modules(prefix=path):
                for kind in _KINDS:
                    self._tell(name, hooks_of(module, kind))

    def _tell(self, name: str, hooks: dict[int, Any]) -> None:
        for hook in hooks.values():
            function = _function(hook)  # the same for partials and closures that a loop makes
            key = getattr(function, "__code__", type(function))
            if key not in self._told and not is_of_library(hook):
                self._told.add(key)
                warn_user(
                    f"the hook {_described(function)} on {name} sees the rows of the sequence that this rank computes, "
                    "not all of them: context_parallel_size shards\n  the sequence there. (With tensor_parallel_size "
                    "too, features inside of attention and MLP.) Position 5 is not row 5, and what it changes or "
                    "trains is changed in these\n  rows only. Hooks on the whole model see the whole sequence; so do "
                    "all of them without context parallelism, and output_hidden_states=True."
                )


def _parts_with_rows(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks, and what stands behind them in the module that holds their list."""
    for path, block in model.named_modules():
        if not hasattr(block, "_autopar_place"):
            continue
        yield path, block
        if block._autopar_rows.plan.through and block._autopar_place[2]:  # rows stay so up to the head
            above, _, listed = path.rpartition(".")[0].rpartition(".")
            named = list(model.get_submodule(above).named_children())
            place = [name for name, _ in named].index(listed)
            for name, part in named[place + 1 :]:
                if not hasattr(part, "_autopar_own"):
                    yield f"{above}.{name}".strip("."), part


def _function(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _described(function: Any) -> str:
    code = getattr(function, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return getattr(function, "__name__", type(function).__name__) + place

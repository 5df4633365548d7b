"""Hooks of the user's inside of blocks that compute with rows of the sequence: they are told what they see.

autopar's own hooks are on the right side of the border. Those of libraries (adapters, offloading, profilers) look at
whole modules and are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.call_site import warn_user

__all__ = ["UsersHooks"]

_LIBRARIES = {"autopar", "torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "trl"}
_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FIRST, _EVERY = 3, 10  # forwards in which hooks are looked for


class UsersHooks:
    """Looks for hooks in the first forwards of a model, and in some later ones, and warns once of each."""

    def __init__(self) -> None:
        self._forwards = 0
        self._told: set[int] = set()
        self._parts: list[tuple[str, nn.Module, str]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> UsersHooks:
        return UsersHooks()

    def look(self, model: nn.Module) -> None:
        """Warn of hooks that are new, where a part of the model has rows."""
        number, self._forwards = self._forwards, self._forwards + 1
        if number >= _FIRST and number % _EVERY:
            return
        if self._parts is None:
            self._parts = list(_parts_with_rows(model))
        for path, part, axis in self._parts:
            for name, hook in _hooks_in(path, part):
                if id(hook) not in self._told:
                    self._told.add(id(hook))
                    _tell(name, hook, axis)


def _parts_with_rows(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the blocks, and what stands behind them in the module that holds their list, with what shards rows."""
    for path, block in model.named_modules():
        over_cp = hasattr(block, "_autopar_place")
        if over_cp or hasattr(block, "rows_list"):
            yield path, block, "context_parallel_size" if over_cp else "sequence_parallel"
        if over_cp and block._autopar_rows.plan.through and block._autopar_place[2]:  # rows stay so up to the head
            above, _, listed = path.rpartition(".")[0].rpartition(".")
            named = list(model.get_submodule(above).named_children())
            place = [name for name, _ in named].index(listed)
            for name, part in named[place + 1 :]:
                if not hasattr(part, "_autopar_own"):
                    yield f"{above}.{name}".strip("."), part, "context_parallel_size"


def _hooks_in(path: str, block: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in block.named_modules(prefix=path):
        for kind in _KINDS:
            for hook in vars(module)[kind].values():
                if _home(hook) not in _LIBRARIES:
                    yield name, hook


def _home(hook: Any) -> str:
    """Return the package of the function that a hook is made of."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0]


def _tell(name: str, hook: Any, axis: str) -> None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    called = getattr(hook, "__name__", type(hook).__name__)
    code = getattr(hook, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    warn_user(
        f"the hook {called}{place} on {name} sees the rows of the sequence that this rank computes, not all of them: "
        f"{axis} shards\n  the sequence there. Position 5 is not row 5, and what it changes or trains is changed in "
        "these rows only. Hooks on the whole model see the\n  whole sequence; so do all of them with "
        "tensor_parallel_size alone, and output_hidden_states=True."
    )

"""Hooks of the user's that see a part of what the plain model's see: rows of the sequence, or this rank's features.

autopar's own hooks are on the right side of the border. Those of libraries (adapters, offloading, profilers) look at
whole modules and are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.call_site import is_of_library, warn_user
from autopar.foreign.modules import hooks_of, own_parameters
from autopar.plan.plan import ModulePlan

__all__ = ["UsersHooks"]

_KINDS = ("forward", "forward_pre", "backward", "backward_pre")
_SEEN = {"column": ("forward", "backward_pre", "backward"), "row": ("forward_pre", "backward")}
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_ROWS = (
    "the rows of the sequence that this rank computes, not all of them: {axis} shards\n  the sequence there. "
    "Position 5 is not row 5, and what it changes or trains is changed in these rows only. Hooks on the whole model "
    "see the\n  whole sequence; so do all of them with tensor_parallel_size alone, and output_hidden_states=True."
)
_FEATURES = (
    "{here} of the {whole} features that the plain model has there: tensor_parallel_size\n  shards them. Sums, norms "
    "and numbers of features are those of this rank. Hooks on the attention, the MLP or the block\n"
    "  as a whole see all features."
)
_INPUT = (
    "all features in its output, and {here} of the {whole} features in its input:\n  tensor_parallel_size shards them "
    "there. What reads the output only is right."
)
_FIRST, _EVERY = 3, 10  # forwards in which hooks are looked for


_Shard = tuple[str, list[dict[int, Any]], str, int, int]  # path, hooks that see a part, words, features here, in all


class UsersHooks:
    """Looks for hooks in the first forwards of a model, and in some later ones, and warns once of each function."""

    def __init__(self) -> None:
        self._forwards = 0
        self._told: set[tuple[Any, str]] = set()  # code or class, and the words for it
        self._parts: list[tuple[str, nn.Module, str]] | None = None
        self._shards: list[_Shard] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> UsersHooks:
        return UsersHooks()

    def look(self, model: nn.Module) -> None:
        """Warn of hooks that are new, where a part of the model has rows."""
        number, self._forwards = self._forwards, self._forwards + 1
        if number >= _FIRST and number % _EVERY:
            return
        if self._parts is None:
            self._parts, self._shards = list(_parts_with_rows(model)), list(_modules_with_shards(model))
        for path, part, axis in self._parts:
            for name, module in part.named_modules(prefix=path):
                for kind in _KINDS:
                    self._tell(name, hooks_of(module, kind), _ROWS, axis=axis)
        for name, found, words, here, whole in self._shards:
            for hooks in found:
                if hooks:
                    self._tell(name, hooks, words, here=here, whole=whole)

    def _tell(self, name: str, hooks: dict[int, Any], words: str, **sizes: Any) -> None:
        for hook in hooks.values():
            function = _function(hook)  # the same for partials and closures that a loop makes
            key = getattr(function, "__code__", type(function)), words
            if key not in self._told and not is_of_library(hook):
                self._told.add(key)
                warn_user(f"the hook {_described(function)} on {name} sees {words.format(**sizes)}")


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


def _modules_with_shards(model: nn.Module) -> Iterator[_Shard]:
    """Yield sharded layers and the activations beside them, with the kinds of hooks that see this rank's features."""
    for path, module in model.named_modules():
        plan: ModulePlan | None = vars(module).get("autopar")
        if plan is None or plan.layout is None or plan.rule not in _SEEN or plan.gather_output:
            continue
        weight = own_parameters(module).get("weight")
        here, whole = 0 if weight is None else weight.shape[plan.layout.dim], plan.layout.size
        if here in (0, whole):
            continue
        yield path, [hooks_of(module, kind) for kind in _SEEN[plan.rule]], _FEATURES, here, whole
        if plan.rule == "row":
            yield path, [hooks_of(module, "forward")], _INPUT, here, whole
        above = path.rpartition(".")[0]
        for name, beside in model.get_submodule(above).named_children() if plan.rule == "column" else ():
            if type(beside).__module__ in _ACTIVATIONS:
                yield f"{above}.{name}".strip("."), [hooks_of(beside, kind) for kind in _KINDS], _FEATURES, here, whole


def _function(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _described(function: Any) -> str:
    code = getattr(function, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return getattr(function, "__name__", type(function).__name__) + place

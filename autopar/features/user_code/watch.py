"""The step that watches user code around a sharded model: its hooks, and its reads of shards between two forwards."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.compat.tensors import disabled_torch_function
from autopar.distributed.axis import Axis
from autopar.features.user_code.reads import NOTICING, Sharded, unwatch, watch
from autopar.guards.step import untried
from autopar.setup.steps import Given, Parallelized

if TYPE_CHECKING:
    from autopar.features.user_code.hooks import WholeHooks


_running: weakref.WeakSet[Watched] = weakref.WeakSet()
"""Models whose forward runs now."""


def watch_user_code(model: nn.Module, state: Parallelized, given: Given) -> None:
    """On the parameters that stay."""
    if state.plan.shards > 1:
        watched = state.features["user_code"] = Watched(state.mpu.tp)
        state.region.beginning.append(watched.begin)
        state.region.ending.append(watched.end)
        watch(model, state.plan, state.mpu)
        _watch_steps()
        state.undo.append(lambda model, own: own.features.pop("user_code").undo(model))


class Watched:
    """A model, or its copy, whose forwards read shards as plain tensors, and call user hooks with full ones."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self._found = axis, False
        self._hooks: dict[nn.Module, WholeHooks] = {}  # of the model, and of each inside that was called by itself

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        copied = memo[id(self)] = Watched(self.axis)
        copied._found = self._found
        return copied

    def begin(self, model: nn.Module) -> dict[str, str]:
        """Begin a forward; return where user hooks are, for ranks to compare before any of them gathers."""
        _running.add(self)
        Sharded.__torch_function__ = disabled_torch_function  # no Python is called for each function
        if self.axis.size == 1:
            return {}
        hooks = self._hooks.get(model)
        if hooks is None:
            from autopar.features.user_code.hooks import WholeHooks

            hooks = self._hooks[model] = WholeHooks(model, self.axis)
        if not self._found and not any(hooks.dicts):
            return {}
        seen = {one: each.wrap() for one, each in self._hooks.items()}
        self._found = any(seen.values())  # if all are removed now, the next forward still looks
        return seen[model]

    def end(self) -> None:
        """End the forward."""
        _running.discard(self)
        if not _running:
            Sharded.__torch_function__ = NOTICING

    def undo(self, model: nn.Module) -> None:
        """Put the user hooks themselves back in their places, and give parameters torch's class again."""
        for hooks in self._hooks.values():
            hooks.unwrap()
        for parameter in model.parameters():
            unwatch(parameter)


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer not in untried:  # one that could not be tried may read shards
        Sharded.__torch_function__ = disabled_torch_function


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(*_: Any) -> None:
    Sharded.__torch_function__ = NOTICING

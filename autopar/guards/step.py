"""Watch ``optimizer.step()``: count the steps of a model's optimizers, and notify the listeners.

torch calls global hooks before and after the step of any optimizer, including optimizers that were not passed to
``initialize``.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autopar.compat.tensors import no_overrides
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError

_Kind = TypeVar("_Kind")

_PARAMETERS = operator.itemgetter("params")
_PLAIN = (bool, int, float, str, tuple, type(None))

# -- global hooks ------------------------------------------------------------------------------------------------------
# torch iterates over its hooks while they run, and raises if a garbage collection removes a hook at that time. So there
# is one hook of each kind, which is never removed, with weak references to its listeners.

untried: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose way of stepping could not be tested."""

_listeners: list[weakref.ref[Any]] = []  # in order of registration
_known: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # optimizer -> number of parameters


def listen(listener: object) -> None:
    """Call these methods of ``listener``, if it has them, while it exists.

    ``when_new(optimizer)``: before the first step of an optimizer, and before the first step with new parameters.
    ``before_step(optimizer, args, kwargs)``: before each step; ``args`` begin with the optimizer.
    ``before_registration(module, name, submodule)``: before a module becomes a submodule of another one.
    """
    _register()
    forget(None)  # removes listeners that no longer exist
    _listeners.append(weakref.ref(listener))
    _known.clear()


def forget(listener: object) -> None:
    """Stop calling ``listener``."""
    _listeners[:] = [other for other in _listeners if other() not in (None, listener)]


def listeners(kind: type[_Kind]) -> list[_Kind]:
    """Return the existing listeners of a class, in order of registration."""
    return [found for other in _listeners if isinstance(found := other(), kind)]


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_module_module_registration_hook(functools.partial(_call, "before_registration"))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # so that a compiled step is checked too
def _before_step(optimizer: Optimizer, *arguments: Any) -> None:
    count = sum(map(len, map(_PARAMETERS, optimizer.param_groups)))
    if _known.get(optimizer) != count:
        _call("when_new", optimizer)
        _known[optimizer] = count
    _call("before_step", optimizer, *arguments)


def _call(method: str, *arguments: Any) -> None:
    for listener in [other() for other in _listeners]:
        if hasattr(listener, method):
            getattr(listener, method)(*arguments)


# -- the guard ---------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """The progress of one optimizer.

    Attributes:
        number: The number of the optimizer in order of first steps; -1 before its first step.
        held: The names and parameters of the model that it steps.
        sharded: The held parameters of which each tensor-parallel rank has a different shard.
        steps: The number of steps.
    """

    number: int = -1
    held: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    sharded: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    steps: int = 0


class StepCheck:
    """Watch the optimizers of one parallelized model. Created on every rank.

    Args:
        alike: ``id(parameter)`` -> the ranks of a stage that hold the same shard.
        comparison: The comparison of steps over the data-parallel replicas; None only counts steps.
        look: A function ``look(optimizer, held)``, called before the first step of each optimizer of the model.

    Attributes:
        made: The number of optimizer steps with parameters of the model.
        settings: The settings of the optimizer in the last step (such as learning rates), as text.
        sample: A function of the sharded weights, the number of the step and the optimizer, set by the check of
            forwards. It samples the gradient and the state of one weight, a different weight each time.
        last_shard: The result of ``sample`` in the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        mpu: MPU,
        failures: FailureLog,
        alike: Mapping[int, tuple[int, ...]],
        comparison: Any = None,
        look: Callable[[Optimizer, list[tuple[str, nn.Parameter]]], None] = lambda *_: None,
    ) -> None:
        self._look = look
        self.mpu, self.failures, self.made, self._comparison = mpu, failures, 0, comparison
        self.settings = ""
        self.sample: Callable[[list[tuple[str, nn.Parameter]], int, Optimizer], Any] | None = None
        self.last_shard: Any = None
        self._model = weakref.ref(model)
        tp, own = mpu.tp.size, mpu.shards.rank // mpu.tp.size
        self._sharded = {key for key, ranks in alike.items() if sum(rank // tp == own for rank in ranks) == 1}
        self._names: set[str] | None = None  # names in a copied model, until its parameters exist
        self._progress: weakref.WeakKeyDictionary[Optimizer, Progress] = weakref.WeakKeyDictionary()
        self._count = 0
        listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCheck:
        """Return a check for the copied model; a copy of a submodule has none.

        It does not compare replicas, because each may train its copy on different data (Reptile, local SGD).
        """
        model = self._model()
        if model is None or id(model) not in memo:
            return self
        copied = memo[id(self)] = copy.copy(self)
        copied._model = weakref.ref(memo[id(model)])
        copied._names = {name for name, p in model.named_parameters() if id(p) in self._sharded}
        copied._progress, copied._count, copied.made = weakref.WeakKeyDictionary(), 0, 0
        copied.settings, copied.last_shard, copied._comparison = "", None, None
        listen(copied)
        return copied

    # -- at a step -------------------------------------------------------------------------------------------------

    def when_new(self, optimizer: Optimizer) -> None:
        """Find the parameters of the model that ``optimizer`` steps."""
        model = self._model()
        if model is None:
            return
        if self._names is not None:
            self._sharded = {id(p) for name, p in model.named_parameters() if name in self._names}
            self._names = None
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        held = [(name, p) for name, p in model.named_parameters() if id(p) in stepped]
        if held:
            progress = self._progress.setdefault(optimizer, Progress())
            progress.held, progress.sharded = held, [(name, p) for name, p in held if id(p) in self._sharded]
            if progress.steps == 0 and not is_inside_another_step():
                self._look(optimizer, held)

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step of ``optimizer``, and compare it with the other replicas' steps.

        With a closure, gradients are computed inside of the step, so only weights are compared.

        Raises:
            ConfigError: An optimizer that was passed to ``initialize`` gets a closure.
            ConsistencyError: Gradients or weights differ between the replicas, or were not averaged in ``no_sync``.
            PipelineError: Another rank does not make the first step within ``pipeline.timeout``.
        """
        model, progress = self._model(), self._progress.get(optimizer)
        if model is None or progress is None or is_inside_another_step():
            return
        closure = args.count(None) < len(args) - 1 or kwargs.get("closure") is not None  # step(None) has no closure
        if closure and hasattr(optimizer, "_autopar"):
            raise ConfigError(
                f"{type(optimizer).__name__}.step(closure) is not supported: gradients inside of step() cannot be "
                "averaged, unscaled or clipped\n  Call backward first, then step() without a closure."
            )
        if progress.number < 0:
            progress.number, self._count = self._count, self._count + 1
        if getattr(getattr(vars(model).get("_autopar"), "pp", None), "unaveraged", False):
            raise ConsistencyError(
                f"the gradients of the {replicas_in_words(self.mpu)} were not averaged: the last execute_pipeline "
                "before step() ran inside no_sync.\n  Run the last execute_pipeline of a step outside of no_sync."
            )
        if self._comparison is not None:
            own = getattr(optimizer, "_autopar", None)
            apart, scaled = closure or getattr(own, "reduces", False), getattr(own, "scale", None) is not None
            with no_overrides():
                self._comparison.compare(type(optimizer).__name__, progress, closure=apart, scaled=scaled)
        progress.steps += 1
        self.made += 1
        if self.mpu.tp_cp.size > 1:
            plain = ({key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups)
            self.settings = repr([{key: x for key, x in group.items() if isinstance(x, _PLAIN)} for group in plain])
            with no_overrides():
                taken = None if closure or self.sample is None else self.sample(progress.sharded, self.made, optimizer)
            self.last_shard = taken

    def watch(self, apart: set[int]) -> None:
        """Digest only the gradients of these parameters (``id``), whose shards differ."""
        self._sharded &= apart


_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__


def is_inside_another_step() -> bool:
    """Return whether the step of another optimizer calls this step (ZeroRedundancyOptimizer, a wrapper)."""
    frame, found = sys._getframe(1), 0
    while frame is not None and found < 2:
        found += frame.f_code is _WRAPPER
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


def group_call(mpu: MPU) -> str:
    """Return the expression for the process group over which gradients are averaged."""
    return f"model.mpu.{mpu.dp_cp.name}.group"  # dp without context parallelism


def replicas_in_words(mpu: MPU) -> str:
    """Return the number of ranks with the same weights, as text."""
    return f"{mpu.dp_cp.size} " + (
        "data-parallel replicas" if mpu.cp.size == 1 else "ranks with the same weights (dp x cp)"
    )

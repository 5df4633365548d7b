"""Check at ``optimizer.step()`` that replicas step alike: that gradients are averaged, none skips, weights are equal.

torch calls hooks of the process before and after the step of any optimizer. They reach those that hold parameters of
the model, whether they were given to ``initialize`` or not. Ranks that hold the same (one place of every data-parallel
replica) write digests of gradients and weights into torch.distributed's key-value store, and each reads those of the
other ranks: no collective, in which a rank that skips its step would leave the others waiting. The first step waits for
the digests of the other ranks, later ones wait only some seconds, and what comes late is compared late.

Reads of shards are silent in a step, except in optimizers that could not be tried (:data:`untried`).
"""

from __future__ import annotations

import copy
import functools
import json
import operator
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.compat.c10d import PrefixStore, default_store
from autopar.distributed.digest import of_tensor, of_text, sum_of_bits
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.distributed.shard_reads import switch
from autopar.errors import ConfigError, ConsistencyError
from autopar.guards.messages import group_call, unlike_gradients, unlike_weights

_Kind = TypeVar("_Kind")

_WHOLE = 3  # first steps, of which all gradients and weights are compared
_DEADLINES = (5.0, 1.0, 1.0, 0.0)  # seconds that a later step waits for another rank, by how often that was late
_KEPT = 64  # steps that are remembered to be compared with what comes late
_GPU_INTERVAL = 10  # steps between two comparisons where reading a digest waits for the GPU
_BUSY = 16  # ranks from which on the store is read less often
OVERFLOW = -1  # the digest of a gradient that is not finite
_OF_STEP = (4, 4096)  # weights of one step's sample, and elements of each: replicas may hold shards of other sizes
_OF_SHARD = 2048  # elements of the gradient and state of a sharded weight
_PARAMETERS = operator.itemgetter("params")
_PLAIN = (bool, int, float, str, tuple, type(None))

# -- hooks of the process ----------------------------------------------------------------------------------------------
# torch goes through its hooks while they run, and a hook that a garbage collection takes away in between ends that with
# an error. So there is one of each kind, registered once and never removed; listeners are held weakly.

untried: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers of which it is not known how they step."""

_listeners: list[weakref.ref[Any]] = []  # in the order in which they began to listen
_known: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # and how many parameters they had


def listen(listener: object) -> None:
    """Call methods of ``listener`` as long as it lives, those of these that it has.

    ``when_new(optimizer)``: before the first step of any optimizer, and the first after parameters were added.
    ``before_step(optimizer, args, kwargs)``: before each step; ``args`` begin with the optimizer.
    ``before_registration(module, name, submodule)``: before a module becomes part of another one.
    """
    _register()
    forget(None)  # those that live no longer
    _listeners.append(weakref.ref(listener))
    _known.clear()


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
    switch.hide(True)
    count = sum(map(len, map(_PARAMETERS, optimizer.param_groups)))
    if _known.get(optimizer) != count:
        _call("when_new", optimizer)
        _known[optimizer] = count
    _call("before_step", optimizer, *arguments)
    if optimizer in untried:
        switch.hide(False)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(*_: Any) -> None:
    switch.hide(False)


def _call(method: str, *arguments: Any) -> None:
    for listener in [other() for other in _listeners]:
        if hasattr(listener, method):
            getattr(listener, method)(*arguments)


class ClassHook:
    """Forward pre-hook that calls ``then(module)`` where the class of ``module`` has changed: ``fully_shard`` does."""

    def __init__(self, module: nn.Module, then: Callable[[nn.Module], None]) -> None:
        self._kind, self._then = type(module), then

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Compare the class; what raises once raises in the next forward, too."""
        if type(module) is not self._kind:
            self._then(module)
            self._kind = type(module)


# -- the guard ---------------------------------------------------------------------------------------------------------


@dataclass
class _Progress:
    """The progress of one optimizer: what it steps, and which of its steps were compared.

    Attributes:
        number: Place among the optimizers of this model, in the order of their first steps; -1 before.
        held: Name and parameter of those of the model that it steps.
        sharded: Those of which each tensor-parallel rank has another shard.
        published: Comparison -> whether it is of all weights, and digests of this rank as JSON, while those of other
            ranks are missing.
        late: Steps in a row in which the digests of another rank did not come in time.
    """

    number: int = -1
    held: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    sharded: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    steps: int = 0
    compared: int = 0
    published: dict[int, tuple[bool, str]] = field(default_factory=dict)
    late: int = 0


class StepCheck:
    """Watches the optimizers of one parallelized model. Every rank makes it.

    Args:
        alike: ``id(parameter)`` -> the ranks of a stage that hold the same shard.
        experts: Names of parameters that are sharded over replicas, too.
        look: Called with each optimizer of the model, and what it steps, before its first step.
        compare: Whether to compare over the data-parallel replicas; False only counts steps.
        whole_every: Steps between two comparisons of all gradients and weights; 0: in the first steps only.

    Attributes:
        made: Optimizer steps so far with parameters of the model.
        settings: Settings of the optimizer in the last step (learning rates and the like), as text.
        last_shard: Part of the gradient and of the state of a sharded weight in the last step; another one each time.
    """

    def __init__(
        self,
        model: nn.Module,
        mpu: MPU,
        failures: FailureLog,
        alike: Mapping[int, tuple[int, ...]],
        *,
        compare: bool,
        whole_every: int = 0,
        experts: frozenset[str] = frozenset(),
        look: Callable[[Optimizer, list[tuple[str, nn.Parameter]]], None] = lambda *_: None,
    ) -> None:
        self._look = look
        self.mpu, self.failures, self.made, self.whole_every = mpu, failures, 0, whole_every
        self.settings = ""
        self.last_shard: ShardSample | None = None
        self._model = weakref.ref(model)
        tp, own = mpu.tp.size, mpu.shards.rank // mpu.tp.size
        self._sharded = {key for key, ranks in alike.items() if sum(rank // tp == own for rank in ranks) == 1}
        self._experts = experts
        self._names: set[str] | None = None  # of those in a model that is copied, until its parameters are there
        self._progress: weakref.WeakKeyDictionary[Optimizer, _Progress] = weakref.WeakKeyDictionary()
        self._count = 0
        self._replicas = "data-parallel replicas" if mpu.cp.size == 1 else "ranks with the same weights (dp x cp)"
        self._compare = compare and mpu.dp_cp.size > 1
        if self._compare:
            self._store = PrefixStore(f"autopar steps {failures.name}", default_store())
            self._before = mpu.dp_cp.ranks[mpu.dp_cp.rank - 1]
            self._others = [rank for rank in mpu.dp_cp.ranks if rank != mpu.rank]
        self._interval = (1 if mpu.device.type == "cpu" else _GPU_INTERVAL) * max(1, mpu.world_size // _BUSY)
        listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCheck:
        """Return one for the copied model; a copy of a part of it has none.

        It compares nothing over the replicas: each may train a copy on data of its own (Reptile, local SGD).
        """
        model = self._model()
        if model is None or id(model) not in memo:
            return self
        copied = memo[id(self)] = copy.copy(self)
        copied._model = weakref.ref(memo[id(model)])
        copied._names = {name for name, p in model.named_parameters() if id(p) in self._sharded}
        copied._progress, copied._count, copied.made = weakref.WeakKeyDictionary(), 0, 0
        copied.settings, copied.last_shard, copied._compare = "", None, False
        listen(copied)
        return copied

    # -- at a step -------------------------------------------------------------------------------------------------

    def when_new(self, optimizer: Optimizer) -> None:
        """Look up which parameters of the model ``optimizer`` steps."""
        model = self._model()
        if model is None:
            return
        if self._names is not None:
            self._sharded = {id(p) for name, p in model.named_parameters() if name in self._names}
            self._names = None
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        held = [(name, p) for name, p in model.named_parameters() if id(p) in stepped]
        if held:
            progress = self._progress.setdefault(optimizer, _Progress())
            progress.held, progress.sharded = held, [(name, p) for name, p in held if id(p) in self._sharded]
            if progress.steps == 0 and not is_inside_another_step():
                self._look(optimizer, held)

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step of ``optimizer``, and compare it with that of the other replicas.

        With a closure gradients are computed inside of the step, and only weights can be compared.

        Raises:
            ConfigError: a closure for the optimizer that ``initialize`` was given.
            ConsistencyError: gradients or weights differ between the replicas, or were left unaveraged by ``no_sync``.
            PipelineError: in the first step, if the other rank does not step within ``pipeline.timeout``.
        """
        model, progress = self._model(), self._progress.get(optimizer)
        if model is None or progress is None or is_inside_another_step():
            return
        closure = args.count(None) < len(args) - 1 or kwargs.get("closure") is not None  # step(None) has none
        if closure and hasattr(optimizer, "_autopar"):
            raise ConfigError(
                f"{type(optimizer).__name__}.step(closure): its gradients come inside of step, where they can neither "
                "be averaged, unscaled nor clipped. Call backward first, then step() without a closure."
            )
        if progress.number < 0:
            progress.number, self._count = self._count, self._count + 1
        pipeline: Any = getattr(vars(model).get("_autopar"), "pp", None)
        if pipeline is not None and pipeline.unaveraged:
            raise ConsistencyError(
                f"the gradients of the {self.mpu.dp_cp.size} {self._replicas} were not averaged: the last "
                "execute_pipeline before step() ran inside no_sync, too.\n  Run the last one of a step outside of it."
            )
        if self._compare:
            scaled = getattr(getattr(optimizer, "_autopar", None), "scale", None) is not None  # may overflow, and skip
            self._compare_now(type(optimizer).__name__, progress, closure=closure, scaled=scaled)
        progress.steps += 1
        self.made += 1
        if self.mpu.tp_cp.size > 1:
            plain = ({key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups)
            self.settings = repr([{key: x for key, x in group.items() if isinstance(x, _PLAIN)} for group in plain])
            self.last_shard = None if closure else sample_shard(progress.sharded, self.made, optimizer)

    def watch(self, apart: set[int]) -> None:
        """Digest gradients of these parameters (``id``) only: their shards differ."""
        self._sharded &= apart

    def _compare_now(self, optimizer: str, progress: _Progress, *, closure: bool, scaled: bool = False) -> None:
        """Publish the digests of this step, and compare those of the other ranks that are there.

        Args:
            optimizer: Its name, for errors.
            closure: Whether gradients are computed inside of the step: then only weights are compared.
            scaled: Whether a step that overflows is skipped.
        """
        step = progress.steps
        whole = step < _WHOLE or (self.whole_every > 0 and (step + 1) % self.whole_every == 0)
        if not whole and step % self._interval:
            return
        held = [(name, p) for name, p in progress.held if not isinstance(p, DTensor) and not p.is_meta]
        turn, progress.compared = progress.compared, progress.compared + 1
        digests = digest_step(held, None if whole else turn, closure, scaled)
        mine = json.dumps([of_text(repr([name for name, _ in held])), step, digests, len(held)])
        self._store.set(self._key(progress, turn, self.mpu.rank), mine)
        progress.published[turn] = whole, mine
        self._compare_with_others(optimizer, progress)
        old = turn - _KEPT
        progress.published.pop(old, None)
        if old >= 0:
            self._store.delete_key(self._key(progress, old, self.mpu.rank))

    def _key(self, progress: _Progress, turn: int, rank: int) -> str:
        return f"{progress.number}/{turn}/{rank}"

    def _compare_with_others(self, optimizer: str, progress: _Progress) -> None:
        """Compare with all replicas where all weights are, so that all raise alike; samples with the one before."""
        for turn, (whole, mine) in list(progress.published.items()):
            keys = {rank: self._key(progress, turn, rank) for rank in (self._others if whole else [self._before])}
            seconds = _DEADLINES[min(progress.late, len(_DEADLINES) - 1)] if turn else self.failures.timeout
            for rank, key in keys.items():
                if not self._wait_for(rank, key, seconds):
                    if turn == 0:
                        self._missing(optimizer, rank)
                    progress.late += 1
                    return
            del progress.published[turn]
            for rank, key in keys.items():
                theirs = self._store.get(key).decode()
                if theirs != mine:
                    self._refuse(optimizer, json.loads(mine), json.loads(theirs), rank)
        progress.late = 0

    def _wait_for(self, rank: int, key: str, seconds: float) -> bool:
        deadline, pause = time.monotonic() + seconds, 0.0002
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            if pause > 0.05 and self.failures.has_ended(rank):
                return bool(self._store.check([key]))
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return True

    def _missing(self, optimizer: str, rank: int) -> None:
        replica, place = divmod(self.mpu.dp_cp.ranks.index(rank), self.mpu.cp.size)
        where = f"replica {replica}" + (f" (context-parallel rank {place})" if self.mpu.cp.size > 1 else "")
        raise self.failures.failure(
            f"the first {optimizer}.step() waited for rank {rank}, which holds the same weights in data-parallel "
            f"{where} and has not stepped.",
            [rank],
            TimeoutError(f"{self.failures.timeout:g} s (pipeline.timeout)"),
        )

    def _refuse(self, optimizer: str, mine: Any, theirs: Any, rank: int) -> None:
        (names, step, ours, count), (other_names, _, others, other_count) = mine, theirs
        if names != other_names and ours.keys().isdisjoint(others):
            return  # each steps parameters of its own, as in ZeRO
        pair = sorted([self.mpu.rank, rank])
        first, second = (ours, others) if self.mpu.rank == pair[0] else (others, ours)
        place = f"  Ranks {pair[0]} and {pair[1]}, step {step + 1} of {optimizer}"
        replicas = f"{self.mpu.dp_cp.size} {self._replicas}"
        if rank not in self.mpu.copies.ranks:  # it holds other experts
            ours = {name: two for name, two in ours.items() if name not in self._experts}
        weights = {name: (first[name][1], second[name][1]) for name in ours if name in others}
        weights = {name: two for name, two in weights.items() if two[0] != two[1]}
        gradients = ((name, ours[name][0], others[name][0]) for name in ours if name in others)
        different = [name for name, one, two in gradients if one != two and OVERFLOW not in (one, two)]
        if names != other_names:
            counts = (count, other_count) if self.mpu.rank == pair[0] else (other_count, count)
            text = (
                f"the {replicas} step different parameters of the model.\n{place}: it holds {counts[0]} and "
                f"{counts[1]} parameters.\n  Add the same parameter groups to the optimizer on every replica."
            )
        elif weights:
            text = unlike_weights(replicas, place, pair, weights)
        elif different:
            text = unlike_gradients(replicas, place, different, group_call(self.mpu))
        else:
            return
        self.failures.publish(text)
        raise ConsistencyError(text)


_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__


def is_inside_another_step() -> bool:
    """Return whether an optimizer's step is called by that of another one (ZeroRedundancyOptimizer's, a wrapper's)."""
    frame, found = sys._getframe(1), 0
    while frame is not None and found < 2:
        found += frame.f_code is _WRAPPER
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


# -- samples of a step -------------------------------------------------------------------------------------------------


class ShardSample(NamedTuple):
    """Some rows of the gradient of a sharded weight, and of its optimizer state; None where they tell nothing."""

    name: str
    gradient: torch.Tensor | None
    state: torch.Tensor | None

    def digests(self, apart: int) -> list[int]:
        """Digest both; ``apart`` stands for what tells nothing."""
        return [_digest_of(self.gradient, apart), _digest_of(self.state, apart)]


@torch.no_grad()
def sample_shard(sharded: list[tuple[str, nn.Parameter]], turn: int, optimizer: Optimizer) -> ShardSample | None:
    """Copy some rows of the gradient and of the state of one weight, of another one each turn; None without any."""
    if not sharded:
        return None
    name, parameter = sharded[turn % len(sharded)]
    shape, state = parameter.shape, optimizer.state.get(parameter, {}).values()
    moments = next((value for value in state if isinstance(value, torch.Tensor) and value.shape == shape), None)
    return ShardSample(name, _first_rows(parameter.grad), _first_rows(moments))


def _first_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.is_sparse or isinstance(tensor, DTensor) or tensor.numel() < 2:
        return None
    return tensor[: max(1, _OF_SHARD * len(tensor) // tensor.numel())].detach().clone()


def _digest_of(part: torch.Tensor | None, apart: int) -> int:
    """Digest it; ``apart`` if it is all the same number, or no numbers."""
    if part is None:
        return apart
    part = part.cpu()
    known = (part != part.flatten()[0]).any() & torch.isfinite(part).all()
    return of_tensor(part) if known else apart


def some_rows(tensor: torch.Tensor, turn: int, most: int) -> torch.Tensor:
    """Return at most some rows of a tensor, of ``most`` elements, other ones each turn."""
    if tensor.numel() <= most or tensor.ndim == 0:
        return tensor
    rows = max(1, most * len(tensor) // tensor.numel())
    return tensor.narrow(0, turn * rows % (len(tensor) - rows + 1), rows)


@torch.no_grad()
def digest_step(
    held: list[tuple[str, nn.Parameter]], turn: int | None, closure: bool, scaled: bool
) -> dict[str, tuple[int, int]]:
    """Return by name the digests of (part of) each gradient and weight; with ``turn`` of a sample that moves with it.

    Args:
        scaled: Whether the loss has a scale: a step with gradients that are not finite is skipped, and not compared.
    """
    names, sums, (count, most) = [], list[torch.Tensor](), _OF_STEP

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        return sum_of_bits(tensor if turn is None or tensor.is_sparse else some_rows(tensor, turn, most))

    chosen = range(min(count, len(held))) if turn is not None else ()
    for name, parameter in held if turn is None else [held[(count * turn + n) % len(held)] for n in chosen]:
        gradient = None if closure else parameter.grad
        if gradient is None or isinstance(gradient, DTensor):
            found = torch.zeros((), dtype=torch.int64, device=parameter.device)
        else:
            found = summed(gradient)
        if scaled and gradient is not None:
            found = torch.where(torch.isfinite(gradient).all(), found, OVERFLOW)
        names.append(name)
        sums += [found, summed(parameter.detach())]
    numbers = torch.stack(sums).tolist() if sums else []
    return {name: (numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(names)}

"""The optimizer steps that stages of one replica have made, compared when a pass begins.

Which optimizers there are may differ by stage: one that holds weights of a single stage may exist on that stage only,
one for each weight steps as often as there are weights, and each phase of a training may have a new one. So for each
optimizer the passes are counted that a step of it came after. Optimizers that have first stepped after the same pass
are compared between the stages; those that began at different times are not the same one.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from autopar.call_site import warn_user
from autopar.errors import ConfigError, ConsistencyError
from autopar.guards.step import listen

_PATIENCE = 8  # passes without a step after which a stage is told, once, if another stage goes on


class StepReport(NamedTuple):
    """The steps of one stage's optimizers, for the other stages to compare.

    Attributes:
        counts: of each optimizer the first pass, and the number of passes that a step came after.
        idle: passes since the last step.
        trained: weights that have a gradient and that no optimizer steps, if it is time to tell.
    """

    counts: frozenset[tuple[int, int]]
    idle: int
    trained: str


@dataclass
class _Steps:
    """One optimizer's: its first pass, how many passes a step came after, the last of these, its parameters."""

    parameters: int
    ours: bool
    first: int = 0
    count: int = 0
    last: int = -1


class StepCount:
    """Counts, for every optimizer of the model, the training passes of this rank that a step of it came after.

    Args:
        model: with the weights of this rank's stages.
        released: ``id`` of those of other stages, whose objects an optimizer may hold, too.

    Attributes:
        expected: whether the optimizer that ``initialize`` was given steps weights of this rank's stages.
    """

    def __init__(self, model: nn.Module, released: Collection[int] = ()) -> None:
        self.expected = False
        self._model, self._released = model, released
        self._optimizers: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self._held: set[int] | None = None  # ids of the model's weights, looked up once in a pass
        self._passes, self._running, self._last, self._stepped_once = 0, 0, 0, False
        self._patience = _PATIENCE  # twice the longest interval between two steps, at least
        self._trained = ""  # weights with a gradient after a pass that no step was to come after
        listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCount:
        """Return one that begins to count the steps of a copied model."""
        return StepCount(copy.deepcopy(self._model, memo))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the first step of ``optimizer`` behind a pass: called by torch before that of any optimizer.

        Raises:
            ConfigError: a hook steps weights of the model inside of a pass.
        """
        if self._running and not self._stepped(optimizer).isdisjoint(self._weights()):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() inside of execute_pipeline: the gradients are those of some of its "
                f"{self._running} micro-batches,\n  and the others use the weights as they were. Step when "
                "execute_pipeline has returned: an optimizer in the backward (a hook of\n  "
                "register_post_accumulate_grad_hook) needs pipeline_parallel_size: 1."
            )
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        steps = self._optimizers.get(optimizer)
        if steps is None or steps.parameters != size:
            ours = not self._stepped(optimizer).isdisjoint(self._weights() | set(self._released))
            steps = self._optimizers.setdefault(optimizer, _Steps(size, ours, self._begin(ours)))
            steps.parameters, steps.ours = size, steps.ours or ours
        if steps.ours and steps.last != self._passes:
            steps.count, steps.last = steps.count + 1, self._passes
            self._patience = max(self._patience, 2 * (self._passes - self._last))
            self._last, self._stepped_once, self._trained = self._passes, True, ""

    def _begin(self, ours: bool) -> int:
        """Return the pass that a new optimizer begins after; 0 for the one that ``initialize`` was given."""
        given = ours and self.expected and not any(steps.ours for steps in self._optimizers.values())
        return 0 if given else self._passes

    def _stepped(self, optimizer: Any) -> set[int]:
        return {id(p) for group in optimizer.param_groups for p in group["params"]}

    def _weights(self) -> set[int]:
        if self._held is None:
            self._held = {id(p) for p in self._model.parameters()}
        return self._held

    def begin_pass(self, microbatches: int) -> StepReport:
        """Return what stages compare. ``microbatches``: that are differentiated."""
        self._held = None
        idle = self._passes - self._last
        if microbatches:
            self._passes, self._running = self._passes + 1, microbatches
        counts = {(steps.first, steps.count) for steps in self._optimizers.values() if steps.count}
        if self.expected and not self._stepped_once:
            counts = {(0, 0)}
        told = idle == self._patience if self._stepped_once else not self.expected
        return StepReport(frozenset(counts), idle, self._trained if told else "")

    def end_pass(self) -> None:
        """End it, also one that failed; where no step seems to follow, note which weights have got a gradient."""
        trained, self._running = self._running, 0
        waits = self._passes - self._last >= self._patience or not self._stepped_once
        if trained and waits:
            names = [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is not None]
            self._trained = f"{len(names)} weights, {names[0]} first" if names else ""


def warn_of_idle(said: Mapping[int, StepReport], own: int) -> None:
    """Warn if rank ``own`` has never stepped, or not for some passes, and another one of its replica goes on."""
    going_on = any(report.counts and report.idle < _PATIENCE for report in said.values())
    if own in said and said[own].trained and going_on:
        since = f" in the last {said[own].idle} passes" if said[own].counts else ""
        warn_user(
            f"rank {own} has stepped no optimizer{since}, and other stages of its replica have: {said[own].trained}, "
            "have gradients there and stay as they are. If they are not to be trained, requires_grad_(False) says "
            "so; else make the optimizer on every rank, and step it there."
        )


def check_steps(said: Mapping[int, StepReport]) -> None:
    """Compare what :meth:`StepCount.begin_pass` returned on two ranks.

    Raises:
        ConsistencyError: an optimizer has stepped behind other numbers of passes.
    """
    counts = {rank: _by_first(report.counts) for rank, report in said.items()}
    one, other = counts.values()
    for first in one.keys() & other.keys():
        if one[first].isdisjoint(other[first]):
            raise ConsistencyError(_unlike({rank: max(found[first]) for rank, found in counts.items()}))


def _by_first(counts: Collection[tuple[int, int]]) -> dict[int, set[int]]:
    """Return for each first pass how often the optimizers that began after it have stepped."""
    found: dict[int, set[int]] = {}
    for first, count in counts:
        found.setdefault(first, set()).add(count)
    return found


def _unlike(counts: Mapping[int, int]) -> str:
    return (
        f"two stages of one model replica (ranks {' and '.join(map(str, counts))}) have made different numbers of "
        "optimizer steps:\n"
        f"  optimizer steps so far: {', '.join(f'rank {rank}: {count}' for rank, count in counts.items())}\n"
        "  Every rank steps after the same execute_pipeline: put no rank's optimizer.step() behind an if.\n"
        "  consistency_check: {enable: false} turns this check off."
    )

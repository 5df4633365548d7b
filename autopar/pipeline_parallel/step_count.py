"""The optimizer steps that stages of one replica have made, compared when a pass begins.

Which optimizers there are may differ by stage: one that holds weights of a single stage may exist on that stage only,
one for each weight steps as often as there are weights, and each phase of a training may have a new one. So for each
optimizer the passes are counted that a step of it came after. Optimizers that have first stepped after the same pass
are compared between the stages; those that began at different times are not the same one.

Groups cut by place (``params[:10]`` of ``model.parameters()``) hold other weights on each stage than in the plain
model. Such groups are runs of that list on several stages, with the same settings: rates that decay from layer to layer
are other ones on each stage. The first group goes on with a later stage, although the second one has begun on the
earlier one, and a block is parted: groups of the first and the last layers, or of every other, do not. If they part
weights that blocks have alike, too, as groups by name do not, it is a guess, of which stages are warned.

It is certain where the groups part as many weights from the front of each stage's list, or from its end, and other
weights of a block there, since the lists begin with other ones (embeddings). Groups that follow from names would have
to go by blocks and by the weights in them, and change from stage to stage in both: by none of them do the places agree.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from autopar.call_site import warn_user
from autopar.checks.process_hooks import listen
from autopar.checks.samples import plain_settings
from autopar.errors import ConfigError, ConsistencyError
from autopar.pipeline_parallel.gradient_scale import GradientScale

__all__ = ["StepCount", "StepReport", "check_places", "check_steps", "cut_by_place", "warn_of_idle"]


class _Places(NamedTuple):
    """Groups that may have been cut by place.

    Attributes:
        settings: of the groups, in their order.
        ends, begins: last weight of the first one, first weight of the next.
        front, back: weights in front of the cut, and behind it.
        alike: whether they part weights that blocks of this stage have alike.
        frozen: whether one of them is what is frozen, and the other one what is trained.
    """

    settings: list[str]
    ends: str
    begins: str
    front: int
    back: int
    alike: bool
    frozen: bool = False


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a block, in the path of a weight


def cut_by_place(optimizer: Any, model: nn.Module, released: Collection[int]) -> _Places | None:
    """Describe the groups of an optimizer if they may have been cut by place on this stage; else return None.

    Args:
        model: with the weights of this stage.
        released: ``id`` of those of other stages: an optimizer that holds some was made of the whole list.
    """
    if len(optimizer.param_groups) == 1:
        return None
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    held = [(name, group_of[id(p)]) for name, p in model.named_parameters() if id(p) in group_of]
    order = [number for _, number in held]
    groups_of: dict[str, set[int]] = {}
    for name, number in held:
        groups_of.setdefault(_NUMBER.sub("*", name), set()).add(number)
    parts_alike = any(len(groups) > 1 for groups in groups_of.values())
    is_run = order in (sorted(order), sorted(order, reverse=True))
    if len(set(order)) < 2 or not is_run or group_of.keys() & set(released):
        return None
    settings = [repr(sorted(plain_settings(group).items())) for group in optimizer.param_groups]
    if len(set(settings)) == 1:
        return None
    place = next(place for place, number in enumerate(order) if number != order[0])
    in_order = [settings[number] for number in dict.fromkeys(order)]
    return _Places(in_order, held[place - 1][0], held[place][0], place, len(held) - place, parts_alike)


class _Frozen(NamedTuple):
    """Weights that are trained, and that are frozen, as groups of an optimizer."""

    param_groups: list[dict[str, Any]]


def frozen_by_place(model: nn.Module, released: Collection[int]) -> _Places | None:
    """Describe which weights are frozen, if that may go by place, as :func:`cut_by_place` does groups."""
    groups = [[p for p in model.parameters() if p.requires_grad is trained] for trained in (True, False)]
    described = [{"params": params, "requires_grad": not place} for place, params in enumerate(groups)]
    found = cut_by_place(_Frozen(described), model, released)
    return None if found is None else found._replace(frozen=True)


def check_places(said: Mapping[int, _Places | None], own: int) -> None:
    """Check the groups of an optimizer on two stages; ``said``: by rank. The second one, if ``own``, warns of a guess.

    Raises:
        ConsistencyError: they are cut by place on both.
    """
    found = {rank: places for rank, places in said.items() if places}
    if len(found) < 2 or not _is_by_place(*found.values()):
        return
    if _agree_in_place(*found.values()):
        raise ConsistencyError(_cut_by_place(found))
    if own == max(said) and all(places.alike for places in found.values()):
        where = ", ".join(f"on rank {rank} at {places.begins}" for rank, places in sorted(found.items()))
        frozen = found[own].frozen
        what = "weights seem to be frozen" if frozen else "groups of the optimizer seem to be cut"
        advice = _FROZEN_BY_PLACE if frozen else _BY_PLACE
        warn_user(f"{what} by place in model.parameters(): one {'part' * frozen}{' ' * frozen}ends {where}. {advice}")


_BY_PLACE = (
    "Each stage lists its own weights, so a place is another weight than in the plain model. Make groups by name, or "
    "make the optimizer before autopar.initialize and give it (optimizer=)."
)


_FROZEN_BY_PLACE = (
    "Each stage lists its own weights, so a place is another weight than in the plain model. Freeze by name, or before "
    "autopar.initialize."
)


def _cut_by_place(found: Mapping[int, _Places]) -> str:
    ranks = " and ".join(map(str, found))
    if any(places.frozen for places in found.values()):
        return (
            f"weights are frozen by place in model.parameters(): on two stages (ranks {ranks}) the {_parted(found)}"
            f"  {_FROZEN_BY_PLACE}\n  consistency_check: {{enable: false}} turns this check off."
        )
    return (
        f"groups of the optimizer are cut by place in model.parameters(): on two stages (ranks {ranks}) the "
        f"{_parted(found)}  {_BY_PLACE}\n  Begin again: a step was made with them. consistency_check: "
        "{enable: false} turns this check off."
    )


def _parted(found: Mapping[int, _Places]) -> str:
    (_, one), (_, other) = sorted(found.items())
    front = one.front == other.front
    count, side = (one.front, "first") if front else (one.back, "last")
    lines = "".join(
        f"  rank {rank}: one ends at {p.ends}, the next begins at {p.begins}\n" for rank, p in found.items()
    )
    return (
        f"{side} {count} weights are a group\n  of their own, and these are not the {side} {count} of the plain "
        f"model.\n{lines}"
    )


def _agree_in_place(one: _Places, other: _Places) -> bool:
    """Check whether the cuts are at one place of both lists, from the front or the end, and at other weights."""
    same = one.front == other.front or (one.back == other.back and one.settings == other.settings)
    return same and _NUMBER.sub("*", one.begins) != _NUMBER.sub("*", other.begins)


def _is_by_place(one: _Places, other: _Places) -> bool:
    """Check whether the second group begins on one stage before the first ends on the other, within a block."""
    first, second = sorted((one, other), key=lambda each: _numbers(each.ends))
    parted = any(_numbers(each.ends) == _numbers(each.begins) for each in (one, other))
    return first.settings[:2] == second.settings[:2] and parted and _numbers(first.begins) < _numbers(second.ends)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


_FIRST, _EVERY = 3, 10  # passes behind which gradients are looked at
_PATIENCE = 8  # passes without a step after which a stage is told, once, if another stage goes on


class StepReport(NamedTuple):
    """The steps of one stage's optimizers, for the other stages to compare.

    Attributes:
        counts: of each optimizer the first pass, and the number of passes that a step came after.
        idle: passes since the last step.
        places: of the groups of a new optimizer that may have been cut by place.
        trained: weights that have a gradient and that no optimizer steps, if it is time to tell.
        scale: by which all gradients were multiplied between the pass and its step; None if there is no such factor.
        frozen: places of frozen weights that may have been chosen by place, in the first passes.
    """

    counts: frozenset[tuple[int, int]]
    idle: int
    places: _Places | None
    trained: str
    scale: float | None = None
    frozen: _Places | None = None


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
        self._places: _Places | None = None  # of a new optimizer
        self._frozen: _Places | None = None  # that was told last
        self._scale = GradientScale()
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
            self._places = cut_by_place(optimizer, self._model, self._released) or self._places
        if steps.ours:
            self._scale.look()
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
        places, self._places = self._places, None
        told = idle == self._patience if self._stepped_once else not self.expected
        trained, factor = self._trained if told else "", self._scale.factor()
        return StepReport(frozenset(counts), idle, places, trained, factor, self._newly_frozen())

    def _newly_frozen(self) -> _Places | None:
        if not self._running or self._passes > _FIRST:
            return None
        before, self._frozen = self._frozen, frozen_by_place(self._model, self._released)
        return None if self._frozen == before else self._frozen

    def end_pass(self) -> None:
        """End it, also one that failed; where no step seems to follow, note which weights have got a gradient."""
        trained, self._running = self._running, 0
        if trained and (self._passes <= _FIRST or self._passes % _EVERY == 0):
            self._scale.note(self._model)
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


def check_steps(said: Mapping[int, StepReport], own: int) -> None:
    """Compare what :meth:`StepCount.begin_pass` returned on two ranks; the second of them, if ``own``, warns.

    Raises:
        ConsistencyError: an optimizer has stepped behind other numbers of passes.
    """
    check_places({rank: report.places for rank, report in said.items()}, own)
    check_places({rank: report.frozen for rank, report in said.items()}, own)
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

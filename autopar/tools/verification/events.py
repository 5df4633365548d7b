"""Events of two recordings, of the plain model and of this rank's: compared one by one; the first that differs.

Events come in the order in which the plain model makes them. Forward: what each module is given and what it returns.
Backward: gradients of outputs, of parameters, in the order of the backward pass. A module whose input is wrong while
everything before it was right is not to blame: the code around it is, that of the module which holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.plan.matching import around
from autopar.plan.plan import ModulePlan
from autopar.plan.stages import StagePlan
from autopar.tools.verification.outputs import OF_GRADIENTS, Distance, local, local_part, measure
from autopar.tools.verification.recording import Entry, Recording
from autopar.tools.verification.session import Session

_PARTIAL = ("region", "experts", "expert_modules", "once")  # what runs inside of them has parts of sums
_SMALL = 0.05  # of the largest gradient: what is smaller is measured by this


class Event(NamedTuple):
    """Something that was compared.

    Attributes:
        path: of the module.
        kind: ``input``, ``output``, ``gradient`` (of the output) or ``parameter`` (its gradient).
        verdict: True: as in the plain model; False: not; None: unknown (a form that has no counterpart there).
        name: of the tensor among those of the module; of a parameter its own.
        difference: as a part of the largest element.
        call: how often the module was called before.
        readers: paths of modules that were given this output, for a gradient.
    """

    path: str
    kind: str
    verdict: bool | None
    name: str = ""
    difference: float = 0.0
    call: int = 0
    readers: tuple[str, ...] = ()


class Found(NamedTuple):
    """The first difference.

    Attributes:
        event: where it shows.
        module: that is to blame.
        since: paths of modules between the last event that was right and this one.
    """

    event: Event
    module: str
    since: tuple[str, ...] = ()


def first_difference(events: Sequence[Event]) -> Found | None:
    """Return the first event that differs, and the module to blame for it; None if there is none."""
    place = next((number for number, event in enumerate(events) if event.verdict is False), None)
    if place is None:
        return None
    event, before = events[place], events[:place]
    last = next((n for n, earlier in reversed(list(enumerate(before))) if earlier.verdict is True), -1)
    since = [event.path for event in events[max(last, 0) : place]]
    module = event.path
    if event.kind == "input":
        module = event.path.rpartition(".")[0]
        since.append(event.path)  # what it is given may be made by the code that calls it
    elif event.kind == "gradient" and event.readers:
        module = event.readers[0] if len(event.readers) == 1 else _common(event.readers)
    return Found(event, module, tuple(dict.fromkeys(path for path in since if path != module)))


def _common(paths: Sequence[str]) -> str:
    """The innermost module that holds all of them."""
    split = [path.split(".")[:-1] for path in paths]
    common: list[str] = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


class Comparison:
    """Compares what was recorded of one rank's model with what was recorded of the plain one."""

    def __init__(self, session: Session) -> None:
        self.plan, self.stages, self.slices = session.plan, session.stages, session.slices
        self.rank, self.tolerance = session.mpu.pp.rank, session.tolerance
        self._partial = [path for path, module in self.plan.modules.items() if module.rule in _PARTIAL]

    def forward(self, plain: Recording, mine: Recording) -> list[Event]:
        """Return an event for each tensor that a module was given or returned, in the plain model's order."""
        pairs = _paired(plain, mine)
        here = _owners(plain.entries, self.stages)
        events: list[Event] = []
        for entry, owner in zip(plain.entries, here, strict=True):
            other = pairs.get(entry.key) if owner == self.rank else None
            for name, expected in entry.tensors.items():
                actual = None if other is None else other.tensors.get(name)
                distance = None if actual is None else self._compare(entry.path, actual, expected, 0.0)
                events.append(self._event(entry, entry.kind, name, distance))
        return events

    def backward(
        self, plain: Recording, mine: Recording, models: tuple[nn.Module, nn.Module], largest: float
    ) -> list[Event]:
        """Return an event for each gradient of an output or a parameter, in the order of the backward pass.

        Args:
            models: the plain one, and this rank's, whose parameters have their gradients.
            largest: element of all gradients of parameters.
        """
        pairs = _paired(plain, mine)
        here = _owners(plain.entries, self.stages)
        scale = max((float(g.abs().max()) for e in plain.entries for g in e.gradients.values() if g.numel()), default=0)
        events: list[Event] = []
        for entry, owner in reversed(list(zip(plain.entries, here, strict=True))):
            other = pairs.get(entry.key) if owner == self.rank else None
            for name, expected in entry.gradients.items():
                actual = None if other is None else other.gradients.get(name)
                partial = self._is_partial_gradient(entry.path)
                if actual is not None and self.slices.mpu.cp.size > 1:  # of own rows, as many times as there are ranks
                    actual = None if actual.shape == expected.shape else actual / self.slices.mpu.cp.size
                distance = None if actual is None else self._compare(entry.path, actual, expected, _SMALL * scale)
                unknown = partial and distance is not None and distance.relative > OF_GRADIENTS * self.tolerance
                readers = [entry.path] if entry.kind == "input" else _innermost(entry.readers.get(name, []))
                events.append(self._event(entry, "gradient", name, None if unknown else distance, tuple(readers)))
            if entry.kind == "input" and entry.call == 0:
                events += self._of_parameters(entry, models, _SMALL * largest)
        return events

    def _of_parameters(self, entry: Entry, models: tuple[nn.Module, nn.Module], floor: float) -> Iterator[Event]:
        plain, mine = (dict(model.named_parameters()) for model in models)
        for name, parameter in plain.items():
            if name.rpartition(".")[0] != entry.path:
                continue
            other = mine.get(name)
            if other is None or other.is_meta:
                yield self._event(entry, "parameter", name, None)  # another stage's
            elif (parameter.grad is None) != (other.grad is None):
                yield self._event(entry, "parameter", name, Distance(float("inf"), "has a gradient in one of both"))
            elif parameter.grad is not None and other.grad is not None:
                expected = local_part(self.plan, name, parameter.grad, self.slices.mpu.shards.rank)
                yield self._event(entry, "parameter", name, measure(local(other.grad), expected, floor))

    def _compare(self, path: str, actual: torch.Tensor, expected: torch.Tensor, floor: float) -> Distance | None:
        planned: ModulePlan | None = self.plan.modules.get(path)
        distance = self.slices.compare(actual, expected, planned, floor)
        if distance is None or distance.relative <= self.tolerance:
            return distance
        inside = any(path.startswith(f"{outer}.") for outer in self._partial)
        once = planned is not None and planned.rule == "once"
        return None if inside or once else distance

    def _is_partial_gradient(self, path: str) -> bool:
        """Return whether gradients of what a module returns may be parts, which are summed later."""
        planned = self.plan.modules.get(path)
        if planned is None:
            return False
        replicated = planned.layout is not None and planned.layout.replicated
        return replicated or bool(planned.summed) or planned.aside or planned.enter_output

    def _event(
        self, entry: Entry, kind: str, name: str, distance: Distance | None, readers: tuple[str, ...] = ()
    ) -> Event:
        allowed = self.tolerance * (OF_GRADIENTS if kind in ("gradient", "parameter") else 1)
        verdict = None if distance is None else distance.relative <= allowed
        difference = 0.0 if distance is None else distance.relative
        return Event(entry.path, kind, verdict, name, difference, entry.call, readers)


def _owners(entries: Sequence[Entry], stages: StagePlan) -> list[int]:
    """Return for each entry the pipeline rank that computes it: that of the last block that began before."""
    places = {path: place for place, path in enumerate(stages.elements) if place != stages.encoder}
    result: list[int] = []
    stage = 0
    for entry in entries:
        if not entry.path and entry.kind == "input":
            stage = 0
        block = next((path for path in (entry.path, *around(entry.path)) if path in places), None)
        if block is not None:
            stage = stages.stage_of(places[block])
        result.append(stages.rank_of[stage])
    return result


def _paired(plain: Recording, mine: Recording) -> dict[Any, Entry]:
    """The entries of this rank by their key in the plain recording: of more calls than there the last ones."""
    counts: dict[tuple[str, str], list[int]] = {}
    for which, recording in enumerate((plain, mine)):
        for entry in recording.entries:
            counts.setdefault((entry.path, entry.kind), [0, 0])[which] += 1
    result = {}
    for entry in mine.entries:
        expected, found = counts[entry.path, entry.kind]
        result[entry.path, entry.kind, entry.call - max(0, found - expected)] = entry
    return result


def _innermost(paths: Sequence[str]) -> list[str]:
    listed = list(dict.fromkeys(paths))
    return [path for path in listed if not any(other.startswith(f"{path}.") for other in listed)]


def over_ranks(everyone: Sequence[Sequence[Event]]) -> list[Event]:
    """Return the events with the verdict of all ranks: wrong if it is on one, right if it is on one that knows it."""
    found: dict[tuple[str, str, str, int], list[Event]] = {}
    for events in sorted(everyone, key=len, reverse=True):  # replicas may be given other arguments (a mask)
        for event in events:
            found.setdefault((event.path, event.kind, event.name, event.call), []).append(event)
    result = []
    for same in found.values():
        verdicts = {event.verdict for event in same}
        verdict = False if False in verdicts else True if True in verdicts else None
        worst = max(same, key=lambda event: (event.verdict is False, event.difference))
        result.append(worst._replace(verdict=verdict))
    return result

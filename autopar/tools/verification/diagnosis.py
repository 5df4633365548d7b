"""Diagnose a failed check: run both models again, record every module, and find the first difference.

Events have the order of the reference model: inputs and outputs of modules in the forward, then gradients of outputs
and parameters in the backward. If the first difference is an input of a module, the parent's code is to blame. The
diagnosis names the module to blame, with the policy lines about it.
"""

from __future__ import annotations

import copy
import itertools
import math
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from autopar.distributed.collectives import gathered
from autopar.dry_run.activation_tracking import line_of
from autopar.errors import ConsistencyError, PolicyError, clip, first_line, listed, type_and_text
from autopar.plan.matching import around
from autopar.plan.plan import ModulePlan, Plan
from autopar.plan.stages import StagePlan
from autopar.tools.planner.parallelized import rule_of
from autopar.tools.verification.checks import Named, generated, gradients, prompt_of
from autopar.tools.verification.outputs import OF_GRADIENTS, Distance, reseed
from autopar.tools.verification.recording import ModuleCall, Recording, recorded
from autopar.tools.verification.report import Culprit, Row
from autopar.tools.verification.session import Session
from autopar.tools.verification.unit_rules import contradicting_layers

_PARTIAL = ("region", "experts", "expert_modules", "once")  # modules inside have partial sums
_SMALL = 0.05  # fraction of the largest gradient; the minimum scale of differences


class Event(NamedTuple):
    """One comparison of the tensor ``name`` of a module, or of a parameter.

    Attributes:
        kind: ``input``, ``output``, ``gradient`` (of the output) or ``parameter`` (its gradient).
        verdict: True if the tensor equals the reference model's tensor, None without a counterpart.
        difference: The difference, relative to the largest element.
        call: The number of earlier calls of the module.
        readers: The paths of the modules that read the output, for a gradient.
    """

    path: str
    kind: str
    verdict: bool | None
    name: str = ""
    difference: float = 0.0
    call: int = 0
    readers: tuple[str, ...] = ()


class Found(NamedTuple):
    """The first difference: its event, the module to blame, and the modules ``since`` the last correct event."""

    event: Event
    module: str
    since: tuple[str, ...] = ()


def first_difference(events: Sequence[Event]) -> Found | None:
    """Return the first event that differs, with the module to blame, or None."""
    place = next((number for number, event in enumerate(events) if event.verdict is False), None)
    if place is None:
        return None
    event, before = events[place], events[:place]
    last = next((n for n, earlier in reversed(list(enumerate(before))) if earlier.verdict is True), -1)
    since = [event.path for event in events[max(last, 0) : place]]
    module = event.path
    if event.kind == "input":
        module = event.path.rpartition(".")[0]
        since.append(event.path)  # its rule may be wrong for the parent's code
    elif event.kind == "gradient" and event.readers:
        module = event.readers[0]
        if len(event.readers) > 1:  # the innermost module that contains all readers
            split = [path.split(".")[:-1] for path in event.readers]
            same = itertools.takewhile(lambda names: len({*names}) == 1, zip(*split, strict=False))
            module = ".".join(names[0] for names in same)
    return Found(event, module, tuple(dict.fromkeys(path for path in since if path != module)))


class Comparison:
    """Comparison of the recordings of the reference model and one rank's model."""

    def __init__(self, session: Session) -> None:
        self.plan, self.stages, self.slices = session.plan, session.stages, session.slices
        self.rank, self.tolerance = session.mpu.pp.rank, session.tolerance
        self._partial = [path for path, module in self.plan.modules.items() if module.rule in _PARTIAL]

    def forward(self, plain: Recording, mine: Recording) -> list[Event]:
        """Return an event for each input and output of a module, in the reference model's order."""
        events: list[Event] = []
        for entry, other in self._paired(plain, mine):
            for name, expected in entry.tensors.items():
                actual = None if other is None else other.tensors.get(name)
                distance = None if actual is None else self._compare(entry.path, actual, expected, 0.0)
                events.append(self._event(entry, entry.kind, name, distance))
        return events

    def _paired(self, plain: Recording, mine: Recording) -> list[tuple[ModuleCall, ModuleCall | None]]:
        """Return the reference model's calls, each with this rank's call. Extra calls at the start are skipped."""
        expected, found = (Counter((entry.path, entry.kind) for entry in each.entries) for each in (plain, mine))
        more = {place: max(0, count - expected[place]) for place, count in found.items()}
        own = {(each.path, each.kind, each.call - more[each.path, each.kind]): each for each in mine.entries}
        owners = zip(plain.entries, _owners(plain.entries, self.stages), strict=True)
        return [(e, own.get((e.path, e.kind, e.call)) if owner == self.rank else None) for e, owner in owners]

    def backward(self, plain: Recording, mine: Recording, parameters: Sequence[Named]) -> list[Event]:
        """Return an event for each gradient of an output or of the ``parameters``, in the order of the backward."""
        scale = max((float(g.abs().max()) for e in plain.entries for g in e.gradients.values() if g.numel()), default=0)
        events: list[Event] = []
        for entry, other in reversed(self._paired(plain, mine)):
            for name, expected in entry.gradients.items():
                actual = None if other is None else other.gradients.get(name)
                if actual is not None and self.slices.mpu.cp.size > 1:  # a sequence shard, scaled by cp
                    actual = None if actual.shape == expected.shape else actual / self.slices.mpu.cp.size
                distance = None if actual is None else self._compare(entry.path, actual, expected, _SMALL * scale)
                large = distance is not None and distance.relative > OF_GRADIENTS * self.tolerance
                unknown = large and self._is_partial_gradient(entry.path)
                listed = dict.fromkeys([entry.path] if entry.kind == "input" else entry.readers.get(name, ()))
                readers = [path for path in listed if not any(other.startswith(f"{path}.") for other in listed)]
                events.append(self._event(entry, "gradient", name, None if unknown else distance, tuple(readers)))
            if entry.kind == "input" and entry.call == 0:
                own = [each for each in parameters if each.name.rpartition(".")[0] == entry.path]
                events += [self._event(entry, "parameter", *each) for each in own]
        return events

    def _compare(self, path: str, actual: torch.Tensor, expected: torch.Tensor, floor: float) -> Distance | None:
        planned: ModulePlan | None = self.plan.modules.get(path)
        distance = self.slices.compare(actual, expected, planned, floor)
        if distance is None or distance.relative <= self.tolerance:
            return distance
        inside = any(path.startswith(f"{outer}.") for outer in self._partial)
        once = planned is not None and planned.rule == "once"
        return None if inside or once else distance

    def _is_partial_gradient(self, path: str) -> bool:
        """Return whether gradients of a module's outputs may be partial sums."""
        planned = self.plan.modules.get(path)
        if planned is None:
            return False
        replicated = planned.layout is not None and planned.layout.replicated
        return replicated or bool(planned.summed) or planned.aside or planned.enter_output

    def _event(
        self, entry: ModuleCall, kind: str, name: str, distance: Distance | None, readers: tuple[str, ...] = ()
    ) -> Event:
        allowed = self.tolerance * (OF_GRADIENTS if kind in ("gradient", "parameter") else 1)
        verdict = None if distance is None else distance.relative <= allowed
        difference = 0.0 if distance is None else distance.relative
        return Event(entry.path, kind, verdict, name, difference, entry.call, readers)


def _owners(entries: Sequence[ModuleCall], stages: StagePlan) -> list[int]:
    """Return for each call the pipeline rank that computes it, the rank of the last block before it."""
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


_ORDER = (None, True, False)  # of verdicts


def over_ranks(everyone: Sequence[Sequence[Event]]) -> list[Event]:
    """Return the events with the verdict over all ranks: False if one rank has False, else True if one has True."""
    found: dict[tuple[str, str, str, int], list[Event]] = {}
    for events in sorted(everyone, key=len, reverse=True):  # replicas may get different arguments (a mask)
        for event in events:
            found.setdefault((event.path, event.kind, event.name, event.call), []).append(event)
    return [max(same, key=lambda event: (_ORDER.index(event.verdict), event.difference)) for same in found.values()]


def diagnose(session: Session, check: str, rows: Sequence[Row]) -> Culprit | None:
    """Return the first module that differs, or None, after ``check`` failed with ``rows``. All ranks must call it."""
    culprit = _first_culprit(session, check, rows)
    if culprit is None or session.mpu.tp.size == 1 or check not in ("forward", "generate", "backward"):
        return culprit
    return _with_contradicting(culprit, contradicting_layers(session.plain, session.plan), session.plan)


def _with_contradicting(culprit: Culprit, layers: Sequence[str], plan: Plan) -> Culprit:
    """Add the layers with contradicting rules. If several blocks have equal layers, add only the first."""
    first = {line_of(plan, path): path for path in reversed(layers)}
    shown = [path for path in layers if path in first.values()]
    if not shown:
        return culprit
    rules = tuple(_lines_of(plan, shown[: 1 + _FOLLOWING], ""))
    contradiction = (
        f"the rule of {shown[0]} gives a rank different units than the rules of the layers it is combined with"
        if len(shown) == 1
        else f"the rules of {listed(shown)} give a rank different units, although these layers compute together"
    )
    return replace(
        culprit,
        found=f"{culprit.found}\n  {contradiction}",
        lines=(*rules, *(line for line in culprit.lines if line not in rules)),
        modules=(*culprit.modules, *(path for path in shown if path not in culprit.modules)),
    )


def _first_culprit(session: Session, check: str, rows: Sequence[Row]) -> Culprit | None:
    failed = [row for row in rows if row.holds is False]
    found = None
    if check == "backward":
        found = first_difference(over_ranks(gathered(_training(session))))
    elif check in ("forward", "generate"):
        inputs, recordings = session.batches[0] if check == "forward" else prompt_of(session), []
        for model in (session.plain, session.parallel):
            with recorded(model) as recording:
                session.evaluate(model, inputs) if check == "forward" else generated(model, dict(inputs))
            recordings.append(recording)
        found = first_difference(over_ranks(gathered(Comparison(session).forward(*recordings))))
    if found is not None:
        return _culprit_of_found(found, session.plan, session.policy)
    if check == "backward" and any(row.what == "loss" for row in failed):
        text = "the loss of the batch differs, but no module's output: micro-batches have different weights"
        return Culprit("", text)
    parameters = dict(session.plain.named_parameters())
    named = next((row for row in failed if row.name in parameters), None)
    if named is not None and check in ("backward", "step") and 2 * named.failing > named.of:
        what = "the optimizer's steps" if check == "step" else "no module's output, but the gradients"
        why = "" if check == "step" else ": their weights, or their average over ranks, differ"
        return Culprit("", f"{what} of {named.failing} of {named.of} parameters differ{why}")
    if named is not None:
        what = {"worst gradient": "the gradient of", "worst change of a weight": "the step of"}.get(named.what, "")
        return _culprit_of_parameter(named.name, what, session.plan, session.policy)
    drawn = next((row for row in failed if check == "dropout" and row.note), None)
    if drawn is not None:
        module = drawn.name if drawn.difference is None else ""  # else the name of an output
        if not module:
            return Culprit("", drawn.note, (), ("",))
        return _culprit((module,), drawn.note, session.plan, session.policy)
    return None


def _training(session: Session) -> list[Event]:
    """Run the first batch. Return events of outputs in forward order, then of gradients."""
    session.zero_gradients()
    session.plain.train()
    session.parallel.train()
    plain, mine = _recorded_step(session)
    comparison = Comparison(session)
    replicas = session.mpu.dp_cp.size > 1  # whose gradients of parameters include all replicas
    backward = comparison.backward(plain, mine, () if replicas else list(gradients(session)))
    return comparison.forward(plain, mine) + backward


def _recorded_step(session: Session) -> tuple[Recording, Recording]:
    if not session.piped:
        with recorded(session.plain) as plain:
            session.train_plain(0)
        with recorded(session.parallel) as mine:
            session.train_parallel(0)
        return plain, mine
    pipeline = session.state.pipeline(session.parallel)
    criterion = None if session.has_loss else session.criterion
    batch = copy.deepcopy(session.own_part(session.batches[0]))
    reseed(0)
    with pipeline.engine.one_pass():
        step = pipeline.read_step(batch, criterion, backward=True, wants_loss=True)
        with recorded(session.parallel) as mine:
            pipeline.run(session.parallel, step)
    with recorded(session.plain) as plain:
        for microbatch, weight in zip(step.microbatches, step.weights, strict=True):
            loss = session.loss_of(session.plain(**copy.deepcopy(microbatch)))
            (loss * weight).backward()
    return plain, mine


_FOLLOWING = 3  # further modules that are listed


def _culprit_of_found(found: Found, plan: Plan, policy: str) -> Culprit:
    """Describe the first difference of two recordings."""
    event, module = found.event, found.module
    size = "" if math.isinf(event.difference) else f" by {event.difference:.1e}"
    again = f", call {event.call + 1}" if event.call else ""
    shown = event.path or "the model"
    if not event.path and event.name == "loss":
        return Culprit("", f"the loss differs{size}, but the logits are correct", ())
    argument = f"argument {event.name} of" if event.name else "an argument of"
    text = {
        "input": f"{argument} {shown}, computed by {module or 'the model'}, differs{size}{again}",
        "output": f"the output of {shown} differs{size}{again}",
        "gradient": f"the gradient of the output of {shown} differs{size}{again}",
        "parameter": f"the gradient of {event.name} differs{size}",
    }[event.kind]
    if event.kind == "gradient" and event.readers == (event.path,):
        text = f"the gradient of the input of {shown} differs{size}{again}"
    elif event.kind == "gradient" and event.readers:
        text += f": {', '.join(event.readers[:4])} read{'s' if len(event.readers) == 1 else ''} it"
    modules = tuple(dict.fromkeys((module, event.path, *event.readers, *reversed(found.since))))
    return _culprit(modules, text, plan, policy)


def _culprit(modules: tuple[str, ...], text: str, plan: Plan, policy: str) -> Culprit:
    """Return the culprit, the first of the suspected modules, with the policy lines about them."""
    return Culprit(modules[0], text, tuple(_lines_of(plan, modules, policy)), modules)


def _culprit_of_parameter(name: str, what: str, plan: Plan, policy: str) -> Culprit:
    """Describe a parameter that differs."""
    return _culprit((name.rpartition(".")[0],), f"{what} {name} differs".strip(), plan, policy)


def culprit_of_error(error: BaseException, model: nn.Module, plan: Plan | None, policy: str) -> Culprit | None:
    """Describe the origin of an exception: the line of a PolicyError, or the innermost running module."""
    if isinstance(error, PolicyError) and error.where:
        return Culprit("", clip(first_line(error), 300), (error.where,))
    if plan is None:
        return None
    if isinstance(error, ConsistencyError) and error.parameter in plan.tensors:
        return _culprit_of_parameter(error.parameter, "", plan, policy)
    paths = {id(module): path for path, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        place = frame.f_locals.get("self")
        path = paths.get(id(place)) if isinstance(place, nn.Module) else None
        if path is not None:
            text = f"{path or 'the model'} raises {type_and_text(error, 200)}"
            return _culprit((path, path.rpartition(".")[0]), text, plan, policy)
    return None


def _lines_of(plan: Plan, modules: Sequence[str], policy: str) -> Iterator[str]:
    """Yield the policy lines about these modules, as ``file:line: path: rule``, without duplicates.

    A module's lines include its attributes. If the first module has no rule, yield its children's or parent's lines.
    """
    seen = set[str]()
    for number, path in enumerate(modules[: 1 + _FOLLOWING]):
        for line in _own_lines(plan, path) or ([] if number else list(_near_lines(plan, path))):
            if line not in seen:
                seen.add(line)
                yield line
    if not seen:
        yield f"{policy}: the policy has no rule for the module"


def _own_lines(plan: Plan, path: str) -> list[str]:
    rule = plan.modules.get(path)
    lines = []
    for each in (attribute for attribute in plan.attributes if attribute.path == path):
        values = ", ".join(map(str, each.values[:4])) + (" ..." if len(each.values) > 4 else "")
        lines.append(f"{each.where}: {path}.{each.name} is {each.whole}, on ranks {values}")
    of_tensors = [t for t in plan.tensors.values() if t.name.rpartition(".")[0] == path and t.where]
    if rule is None and of_tensors:
        lines.append(f"{of_tensors[0].where}: {path}: {rule_of(plan, of_tensors[0])}")
    if rule is not None:
        named = rule.rule or (f"summed {', '.join(sorted(rule.summed))}" if rule.summed else "parameters")
        lines.append(f"{rule.where}: {path}: {named}")
    return lines


def _near_lines(plan: Plan, path: str) -> Iterator[str]:
    """Yield the lines of the inner modules. If there are none, yield the lines of the nearest outer module."""
    inside = [other for other in plan.modules if other.startswith(f"{path}.")]
    for other in inside[:4]:
        yield from _own_lines(plan, other)
    if not inside:
        yield from next((lines for outer in around(path) if (lines := _own_lines(plan, outer))), [])

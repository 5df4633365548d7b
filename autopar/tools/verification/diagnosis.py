"""Diagnosis of a failed check: both models run once more while every module is recorded, and the first difference.

The module to blame is named in words, with the lines of the policy that concern it.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.dry_run.activation_tracking import line_of
from autopar.errors import ConsistencyError, PolicyError, clip, first_line, listed, type_and_text
from autopar.plan.listing import rule_of
from autopar.plan.plan import Plan, TensorPlan
from autopar.tools.verification.events import Comparison, Event, Found, first_difference, over_ranks
from autopar.tools.verification.outputs import gathered, reseed
from autopar.tools.verification.recording import Recording, recorded
from autopar.tools.verification.report import Culprit, Row
from autopar.tools.verification.session import Session
from autopar.tools.verification.training import generated, prompt_of
from autopar.tools.verification.unit_rules import contradicting_layers


def diagnose(session: Session, check: str, rows: Sequence[Row]) -> Culprit | None:
    """Find the first module that differs, after ``check`` has failed with ``rows``. Collective: all ranks call it.

    Returns:
        The culprit, the same on every rank; None if no module is to blame.
    """
    culprit = _first_culprit(session, check, rows)
    if culprit is None or session.mpu.tp.size == 1 or check not in ("forward", "generate", "backward"):
        return culprit
    return _with_contradicting(culprit, contradicting_layers(session.plain, session.plan), session.plan)


def _with_contradicting(culprit: Culprit, layers: Sequence[str], plan: Plan) -> Culprit:
    """Add the layers whose rules contradict those around them, of equal ones in several blocks the first."""
    first = {line_of(plan, path): path for path in reversed(layers)}
    shown = [path for path in layers if path in first.values()]
    if not shown:
        return culprit
    rules = tuple(_lines_of(plan, shown[: 1 + _FOLLOWING], ""))
    contradiction = (
        f"the rule of {shown[0]} gives a rank other units than the rules of the layers that it computes with"
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
    find = {"forward": _forward, "generate": _generation, "backward": _training}.get(check)
    found = None if find is None else first_difference(over_ranks(gathered(find(session))))
    if found is not None:
        return _culprit_of_found(found, session.plan, session.policy)
    if check == "backward" and any(row.what == "loss" for row in failed):
        return Culprit(
            "", "the loss of the batch differs, and no module's output: its parts are weighed in another way"
        )
    named = next((row for row in failed if row.name in _parameters(session)), None)
    if named is not None and 2 * named.failing > named.of:
        what = "the optimizer's steps" if check == "step" else "no module's output, but the gradients"
        why = "" if check == "step" else ": they are weighed, or averaged over ranks, in another way"
        return Culprit("", f"{what} of {named.failing} of {named.of} parameters differ{why}")
    if named is not None:
        what = {"worst gradient": "the gradient of", "worst change of a weight": "the step of"}.get(named.what, "")
        return _culprit_of_parameter(named.name, what, session.plan, session.policy)
    drawn = next((row for row in failed if check == "dropout" and row.note), None)
    if drawn is not None:
        module = drawn.name if drawn.difference is None else ""  # else it is a tensor of the outputs
        lines = tuple(_lines_of(session.plan, (module,), session.policy)) if module else ()
        return Culprit(module, drawn.note, lines, (module,))
    return None


def _parameters(session: Session) -> set[str]:
    return {name for name, _ in session.plain.named_parameters()}


def _forward(session: Session) -> list[Event]:
    batch = session.batches[0]
    return _compare_runs(session, lambda model: session.evaluate(model, batch))


def _generation(session: Session) -> list[Event]:
    inputs = prompt_of(session)
    return _compare_runs(session, lambda model: generated(model, inputs))


def _compare_runs(session: Session, run: Callable[[Any], Any]) -> list[Event]:
    with recorded(session.plain) as plain:
        run(session.plain)
    with recorded(session.parallel) as mine:
        run(session.parallel)
    return Comparison(session).forward(plain, mine)


def _training(session: Session) -> list[Event]:
    """A forward and a backward of the first batch: outputs first, in the order of the forward, then gradients."""
    session.zero_gradients()
    session.plain.train()
    session.parallel.train()
    plain, mine = _recorded_step(session)
    comparison = Comparison(session)
    gradients = [p.grad for p in session.plain.parameters() if p.grad is not None]
    largest = max((gradient.abs().max().item() for gradient in gradients if gradient.numel()), default=0.0)
    backward = comparison.backward(plain, mine, (session.plain, session.parallel), largest)
    if session.mpu.dp_cp.size > 1:  # parameters have the gradients of other batches, or rows, too
        backward = [event._replace(verdict=None) if event.kind == "parameter" else event for event in backward]
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


_NOTHING = "no line of the policy: the module has no rule"
_FOLLOWING = 3  # modules that are listed besides


def _culprit_of_found(found: Found, plan: Plan, policy: str) -> Culprit:
    """Describe the first difference of two recordings."""
    event, module = found.event, found.module
    size = "" if math.isinf(event.difference) else f" by {event.difference:.1e}"
    again = f", call {event.call + 1}" if event.call else ""
    shown = event.path or "the model"
    if not event.path and event.name == "loss":
        return Culprit("", f"the loss differs{size}, of logits that are right", ())
    text = {
        "input": f"what {shown} is given ({_argument(event.name)}) differs{size}{again}: {_code(module)} makes it",
        "output": f"the output of {shown} differs{size}{again}",
        "gradient": f"the gradient of the output of {shown} differs{size}{again}",
        "parameter": f"the gradient of {event.name} differs{size}",
    }[event.kind]
    if event.kind == "gradient" and event.readers == (event.path,):
        text = f"the gradient of what {shown} is given differs{size}{again}"
    elif event.kind == "gradient" and event.readers:
        text += f": {', '.join(event.readers[:4])} read{'s' if len(event.readers) == 1 else ''} it"
    modules = tuple(dict.fromkeys((module, event.path, *event.readers, *reversed(found.since))))
    return Culprit(module, text, tuple(_lines_of(plan, modules, policy)), modules)


def _culprit_of_parameter(name: str, what: str, plan: Plan, policy: str) -> Culprit:
    """Describe a parameter that differs, whatever its module computes."""
    module = name.rpartition(".")[0]
    return Culprit(module, f"{what} {name} differs".strip(), tuple(_lines_of(plan, (module,), policy)), (module,))


def culprit_of_error(error: BaseException, model: nn.Module, plan: Plan | None, policy: str) -> Culprit | None:
    """Describe where an exception came from: the innermost module whose code ran; None if none did.

    A PolicyError names its line itself.
    """
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
            modules = (path, path.rpartition(".")[0])
            return Culprit(path, text, tuple(_lines_of(plan, modules, policy)), modules)
    return None


def _lines_of(plan: Plan, modules: Sequence[str], policy: str) -> Iterator[str]:
    """Yield the lines of the policy that concern these modules, ``file:line: path: rule``, without doubles.

    Attributes that the plan changes come with the module; where it has no rule, those of its children, or of what is
    around it.
    """
    seen = set[str]()
    for number, path in enumerate(modules[: 1 + _FOLLOWING]):
        for line in _own_lines(plan, path) or ([] if number else list(_near_lines(plan, path))):
            if line not in seen:
                seen.add(line)
                yield line
    if not seen:
        yield f"{policy}: {_NOTHING}"


def _own_lines(plan: Plan, path: str) -> list[str]:
    rule = plan.modules.get(path)
    lines = [f"{a.where}: {path}.{a.name} is {a.whole}, on ranks {_few(a.values)}" for a in plan.attributes
             if a.path == path]  # fmt: skip
    of_tensors = [t for t in plan.tensors.values() if t.name.rpartition(".")[0] == path and _where(t)]
    if rule is None and of_tensors:
        lines.append(f"{_where(of_tensors[0])}: {path}: {rule_of(plan, of_tensors[0])}")
    if rule is not None:
        named = rule.rule or (f"summed {', '.join(sorted(rule.summed))}" if rule.summed else "parameters")
        lines.append(f"{rule.where}: {path}: {named}")
    return lines


def _where(tensor: TensorPlan) -> str:
    return str(getattr(tensor, "where", ""))


def _near_lines(plan: Plan, path: str) -> Iterator[str]:
    """Those of the modules inside; if there are none, those of the nearest module around it."""
    start = f"{path}." if path else ""
    inside = [other for other in plan.modules if other.startswith(start)]
    if path and inside:
        for other in inside[:4]:
            yield from _own_lines(plan, other)
    while path and not inside:
        path = path.rpartition(".")[0]
        yield from _own_lines(plan, path)
        inside = _own_lines(plan, path)


def _few(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:4])) + (" ..." if len(values) > 4 else "")


def _argument(name: str) -> str:
    return f"argument {name}" if name.isdigit() else name or "its argument"


def _code(module: str) -> str:
    return f"the code of {module}" if module else "the code of the model"

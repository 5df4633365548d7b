"""Culprits: the module to blame in words, and the lines of the policy that concern it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from autopar.errors import ConsistencyError, PolicyError, clip, first_line
from autopar.plan.listing import rule_of
from autopar.plan.plan import Plan, TensorPlan
from autopar.tools.verification.bisection import Found
from autopar.tools.verification.report import Culprit

__all__ = ["culprit_of_error", "culprit_of_found", "culprit_of_parameter", "lines_of"]

_NOTHING = "no line of the policy: the module has no rule"
_FOLLOWING = 3  # modules that are listed besides


def culprit_of_found(found: Found, plan: Plan, policy: str) -> Culprit:
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
    return Culprit(module, text, tuple(lines_of(plan, modules, policy)), modules)


def culprit_of_parameter(name: str, what: str, plan: Plan, policy: str) -> Culprit:
    """Describe a parameter that differs, whatever its module computes."""
    module = name.rpartition(".")[0]
    return Culprit(module, f"{what} {name} differs".strip(), tuple(lines_of(plan, (module,), policy)), (module,))


def culprit_of_error(error: BaseException, model: nn.Module, plan: Plan | None, policy: str) -> Culprit | None:
    """Describe where an exception came from: the innermost module whose code ran; None if none did.

    A PolicyError names its line itself.
    """
    if isinstance(error, PolicyError) and error.where:
        return Culprit("", clip(first_line(error), 300), (error.where,))
    if plan is None:
        return None
    if isinstance(error, ConsistencyError) and error.parameter in plan.tensors:
        return culprit_of_parameter(error.parameter, "", plan, policy)
    paths = {id(module): path for path, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        place = frame.f_locals.get("self")
        path = paths.get(id(place)) if isinstance(place, nn.Module) else None
        if path is not None:
            text = f"{path or 'the model'} raises {type(error).__name__}: {clip(' '.join(str(error).split()), 200)}"
            modules = (path, path.rpartition(".")[0])
            return Culprit(path, text, tuple(lines_of(plan, modules, policy)), modules)
    return None


def lines_of(plan: Plan, modules: Sequence[str], policy: str) -> Iterator[str]:
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

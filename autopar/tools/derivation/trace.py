"""One forward of the plain model on the meta device, with hooks that say what each layer does to numbered features."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.dry_run.tensor_parallel import run
from autopar.foreign.modules import own_modules, own_parameters
from autopar.foreign.tensors import no_dispatch_modes
from autopar.tensor_tracking import tensors_in
from autopar.tools.derivation.decisions import Decisions, Names, Trace, is_linear
from autopar.tools.derivation.feature_tracking import FeatureTracking
from autopar.tools.derivation.layer_marks import LayerMarks, is_depthwise, is_norm, is_over_features, mark_norm
from autopar.tools.derivation.marks import ACTIVATION, INPUT, INSIDE, PARAMETER, Mark

__all__ = ["Traced", "trace", "traced"]


@dataclass(frozen=True)
class Traced:
    """A model that a trace runs, with its path and its inputs."""

    path: str
    model: nn.Module
    inputs: dict[str, Any]


def traced(model: PreTrainedModel) -> list[Traced]:
    """Return the model and the models inside of it, each with small inputs, on the meta device."""
    copied = meta_copy(model)
    found, configs = [], set[int]()
    for path, module in copied.named_modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in configs:
            configs.add(id(module.config))
            try:
                found.append(Traced(path, module, sample_inputs(module)))
            except ValueError:
                continue
    return found


def trace(
    models: list[Traced],
    blocks: tuple[str, ...],
    decisions: Decisions,
    known: Trace | None = None,
    record: Callable[..., None] | None = None,
) -> Trace:
    """Run the models.

    Args:
        blocks: paths of the blocks; layers outside of them stay replicated.
        known: a trace of the same decisions, of which the components are taken: all that ever met are together from
            the start.
        record: called behind each operator with the tracking, its arguments and the tensors that it has made.

    Returns:
        what was seen.
    """
    root = models[0].model
    shared = Names(root, blocks)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    inside = tuple(path + "." for path in blocks)

    def bare_source(name: str) -> bool:
        return name.startswith(inside) and decisions.may_be_column(shared(name))

    tracking = FeatureTracking(names, bare_source, record and (lambda *operator: record(tracking, *operator)))
    if known is not None:
        tracking.components = known.tracking.components
        tracking.first_of, tracking.count_of = known.tracking.first_of, known.tracking.count_of
    seen = Trace(tracking, shared)
    hooks = list(_hooks(root, blocks, inside, decisions, seen))
    ran = seen.ran
    try:
        for each in models:
            if each.path and _blocks_ran(each.path, blocks, seen):
                ran.append(each.path)
                continue  # a model around it has called it
            for tensor in tensors_in(each.inputs):
                tracking.set_mark(tensor, Mark(INPUT))
            found = _run(each, root, tracking, seen)
            if found is None:
                continue
            out, before = found
            ran.append(each.path)
            seen.proven.update(seen.order[before:])
            for tensor in tensors_in(out):
                features = tracking.features_of(tensor)
                if features is not None:
                    tracking.spoil("an output of the model", features)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _path_in(root: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in root.named_modules() if module is wanted)


def _blocks_ran(path: str, blocks: tuple[str, ...], seen: Trace) -> bool:
    own = [block for block in blocks if block.startswith(path + ".")]
    return bool(own) and seen.proven.issuperset(own)


def _run(each: Traced, root: nn.Module, tracking: FeatureTracking, seen: Trace) -> tuple[Any, int] | None:
    """Run a model, or where it stumbles over something its base model; None if both do.

    Returns:
        outputs, and how many modules had run before it.
    """
    before = len(seen.order)
    try:
        with tracking:
            out = run(each.model, (), each.inputs)
    except Exception as error:  # whatever it stumbles over without data
        seen.failure = seen.failure or f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    else:
        seen.runs.append((each.path, each.inputs))
        return out, before
    tracking.stack.clear()
    tracking.suspended = 0
    base: Any = each.model.base_model
    if base is each.model or each.path:
        return None
    before = len(seen.order)
    try:
        with tracking:
            out = run(base, (), each.inputs)
    except Exception:
        tracking.stack.clear()
        tracking.suspended = 0
        return None
    seen.runs.append((_path_in(root, base), each.inputs))
    return out, before


def _hooks(
    root: nn.Module, blocks: tuple[str, ...], inside: tuple[str, ...], decisions: Decisions, seen: Trace
) -> Iterator[Any]:
    starts = set(blocks)
    for path, module in root.named_modules():
        hooks = _ModuleHooks(path, module, path in starts, inside, decisions, seen)
        yield module.register_forward_pre_hook(_untracked(hooks.before), with_kwargs=True)
        yield module.register_forward_hook(_untracked(hooks.after), with_kwargs=True)


class _ModuleHooks:
    """The hooks around a module: they mark its inputs and a layer's outputs.

    Args:
        starts: it is a block.
    """

    def __init__(
        self, path: str, module: nn.Module, starts: bool, inside: tuple[str, ...], decisions: Decisions, seen: Trace
    ) -> None:
        self.path, self.starts, self.inside, self.decisions, self.seen = path, starts, inside, decisions, seen
        self.tracking = seen.tracking
        self.layer = is_linear(module) or is_depthwise(module)
        self.norm = not self.layer and is_norm(module)
        self.region = seen.names(path) in decisions.regions
        self._taken: list[bool] = []
        self._entered: list[list[tuple[Any, Mark]]] = []

    def before(self, m: nn.Module, args: Any, kwargs: Any) -> None:
        tracking = self.tracking
        self.seen.order.append(self.path)
        tracking.stack.append(self.path)
        if tracking.suspended:
            self._taken.append(False)
            return
        tensors = list(tensors_in((args, kwargs)))
        if self.region:
            self._entered.append([(x, mark) for x in tensors if (mark := tracking.mark_of(x)) is not None])
        if self.starts or self.region:
            for x in tensors if self.region else tensors[:1]:
                mark = tracking.mark_of(x)
                if mark is not None and x.is_floating_point() and mark.kind in (PARAMETER, ACTIVATION):
                    kind = INSIDE if self.region else ACTIVATION
                    producers = mark.producers if mark.kind == ACTIVATION else frozenset([self.path])
                    tracking.set_mark(x, Mark(kind, None, producers))
        taken = self.layer or (self.norm and is_over_features(m, tensors, tracking))
        self._taken.append(taken)
        if taken:
            self.seen.suspended.add(self.path)
            tracking.suspended += 1

    def after(self, m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        tracking = self.tracking
        tracking.stack.pop()
        taken = self._taken.pop()
        if taken:
            tracking.suspended -= 1
        if tracking.suspended:
            return
        for x, known in self._entered.pop() if self.region else ():  # what others compute with it is outside
            tracking.set_mark(x, known)
        results = [x for x in tensors_in(out) if x.is_floating_point()]
        if taken:
            tensors = [x for x in tensors_in((args, kwargs)) if x.is_floating_point()]
            if self.layer:
                LayerMarks(self.path, m, self.inside, self.decisions, self.seen).mark(tensors[0], results)
            else:
                mark_norm(self.path, m, tensors, results, self.seen)
        elif self.region:
            for x in results:
                features = tracking.features_of(x)
                if features is not None:
                    tracking.spoil(f"the output of {self.path}", features)
                tracking.set_mark(x, Mark(ACTIVATION, None, frozenset([self.path])))
        elif own_parameters(m) and not own_modules(m):
            self._mark_parameters(results)

    def _mark_parameters(self, results: list[Any]) -> None:
        """Mark what a norm on the residual stream, or a table, has made."""
        for x in results:
            mark = self.tracking.mark_of(x)
            if mark is not None and mark.kind == ACTIVATION:
                if self.seen.names(self.path) in self.decisions.enters:
                    self.seen.entered.add(self.path)
                    self.tracking.set_mark(x, Mark(INSIDE))
                else:
                    self.tracking.set_mark(x, replace(mark, producers=frozenset([self.path])))


def _untracked(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook whose own computations are not followed."""

    @functools.wraps(hook)
    def run_hook(*args: Any) -> None:
        with no_dispatch_modes():
            hook(*args)

    return run_hook

"""One forward of the plain model on the meta device, with hooks that say what each layer does to numbered features.

Before: the assumptions of a trace. After: its findings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.dry_run.tensor_parallel import run
from autopar.errors import UnsupportedModelError, type_and_text
from autopar.foreign.tensors import no_dispatch_modes, own_modules, own_parameters
from autopar.policy.match import convolutional
from autopar.tensor_tracking import tensors_in
from autopar.tools.derivation.feature_tracking import FeatureTracking
from autopar.tools.derivation.marks import ACTIVATION, CONSTANT, INPUT, INSIDE, PARAMETER, Mark


class Names:
    """Names that blocks share: paths with ``*`` for the number of a block, or of one of several equal modules in it."""

    def __init__(self, root: nn.Module, blocks: Iterable[str]) -> None:
        self._blocks = tuple(blocks)
        stars = set(self._blocks)
        for path, module in root.named_modules():
            if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
                stars |= {f"{path}.{name}" for name, _ in module.named_children()}
        self._stars = stars
        self._known: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        """Return the name of a module or parameter."""
        known = self._known.get(path)
        if known is None:
            parts = path.split(".")
            beginnings = [".".join(parts[: end + 1]) for end in range(len(parts))]
            shown = [
                "*" if part.isdigit() and own in self._stars else part
                for part, own in zip(parts, beginnings, strict=True)
            ]
            known = self._known[path] = ".".join(shown)
        return known

    def block_of(self, path: str) -> str | None:
        """Return the path of the block that a module or parameter lies in."""
        return next((block for block in self._blocks if path == block or path.startswith(block + ".")), None)


@dataclass(frozen=True)
class Decisions:
    """Assumptions of a trace. Paths with ``*`` for numbers, so alike in all blocks.

    Attributes:
        whole: layers and bare parameters that stay replicated.
        enters: layers whose whole outputs are used inside of a region.
        regions: modules around bare parameters whose outputs are partial.
        only: if not None, the layers that may be columns.
    """

    whole: frozenset[str] = frozenset()
    enters: frozenset[str] = frozenset()
    regions: frozenset[str] = frozenset()
    only: frozenset[str] | None = None

    def may_be_column(self, name: str) -> bool:
        """Return whether a layer may be one."""
        return name not in self.whole and (self.only is None or name in self.only)

    def without(self, names: Iterable[str]) -> Decisions:
        """Return the same with more that stays whole; what enters is seen anew."""
        return replace(self, whole=self.whole | set(names), enters=frozenset())


@dataclass
class Trace:
    """Findings of a forward.

    Attributes:
        sinks: row -> the feature at each place of its input.
        sources: column -> whether its input lies inside of a region.
        norms: norm over sharded features -> the feature of each weight.
        order: paths of modules as they were called.
        suspended: paths of layers whose inside was not looked at.
        proven: paths of modules that were called by models that ran to their end.
        runs: paths of models that ran to their end, with their inputs.
        in_training: layers whose weights are used by themselves in training alone; None: not looked for.
    """

    tracking: FeatureTracking
    names: Names
    sinks: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, bool] = field(default_factory=dict)
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    contradictory: set[str] = field(default_factory=set)
    ran: list[str] = field(default_factory=list)
    suspended: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    runs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failure: str = ""
    in_training: list[str] | None = None


def underivable(model: nn.Module, why: str, *, by_hand: bool = True) -> UnsupportedModelError:
    """Return the error of a model of which no policy can be derived."""
    if reason := convolutional(model):
        return UnsupportedModelError(reason)
    hint = ". Write one by hand: docs/policies.md leads through it" if by_hand else ""
    return UnsupportedModelError(f"no policy can be derived for {type(model).__name__}: {why}{hint}")


def is_linear(module: nn.Module) -> bool:
    """Check whether a layer multiplies by a matrix: a linear layer, or a convolution with a kernel of one."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module.groups == 1 and all(size == 1 for size in module.kernel_size)
    return isinstance(module, nn.Linear | Conv1D)


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
    prepare: Callable[[FeatureTracking], None] = lambda tracking: None,
) -> Trace:
    """Run the models.

    Args:
        blocks: paths of the blocks; layers outside of them stay replicated.
        known: a trace of the same decisions, of which the components are taken: all that ever met are together from
            the start.
        record: called behind each operator with the tracking, its arguments and the tensors that it has made.
        prepare: called with the tracking before the models run.

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
    prepare(tracking)
    seen = Trace(tracking, shared)
    hooks: list[Any] = []
    for path, module in root.named_modules():
        around = _ModuleHooks(path, module, path in blocks, inside, decisions, seen)
        hooks.append(module.register_forward_pre_hook(_untracked(around.before), with_kwargs=True))
        hooks.append(module.register_forward_hook(_untracked(around.after), with_kwargs=True))
    ran = seen.ran
    try:
        for each in models:
            own = [block for block in blocks if block.startswith(each.path + ".")]
            if each.path and own and seen.proven.issuperset(own):
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


def _run(each: Traced, root: nn.Module, tracking: FeatureTracking, seen: Trace) -> tuple[Any, int] | None:
    """Run a model, or where it stumbles over something its base model; None if both do.

    Returns:
        outputs, and how many modules had run before it.
    """
    base: Any = each.model.base_model
    for model in dict.fromkeys((each.model, each.model if each.path else base)):
        before = len(seen.order)
        try:
            with tracking:
                out = run(model, (), each.inputs)
        except Exception as error:  # whatever it stumbles over without data
            seen.failure = seen.failure or type_and_text(error, 120)
            tracking.stack.clear()
            tracking.suspended = 0
            continue
        path = next(path for path, module in root.named_modules() if module is model)
        seen.runs.append((path, each.inputs))
        return out, before
    return None


class _ModuleHooks:
    """The hooks around a module: they mark its inputs and a layer's outputs.

    Args:
        starts: it is a block.
    """

    def __init__(
        self, path: str, module: nn.Module, starts: bool, inside: tuple[str, ...], decisions: Decisions, seen: Trace
    ) -> None:
        self.path, self.module, self.starts, self.inside = path, module, starts, inside
        self.decisions, self.seen = decisions, seen
        self.tracking = seen.tracking
        self.layer = is_linear(module) or _is_depthwise(module)
        self.norm = not self.layer and _is_norm(module)
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
        taken = self.layer or (self.norm and _is_over_features(m, tensors, tracking))
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
                self._mark_layer(tensors[0], results)
            else:
                _mark_norm(self.path, m, tensors, results, self.seen)
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

    # -- layers ----------------------------------------------------------------------------------------------------

    def _mark_layer(self, x: torch.Tensor, results: list[torch.Tensor]) -> None:
        """Give its outputs their marks."""
        tracking = self.tracking
        mark = tracking.mark_of(x) or Mark(CONSTANT)
        features = tracking.features_of(x)
        channels = isinstance(self.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if features is not None and channels:
            features = features.movedim(1 if features.ndim == self._dims() + 2 else 0, -1)
        out, rest = results[0], results[1:]
        for other in rest:
            tracking.set_mark(other, Mark(PARAMETER))
        made = self._made(mark, features, out, channels)
        numbers = made.features
        if numbers is not None:
            shape = list(out.shape)
            if channels:
                at = 1 if out.ndim == self._dims() + 2 else 0
                shape = [*shape[:at], *shape[at + 1 :], shape[at]]
                made = replace(made, features=numbers.expand(shape).movedim(-1, at))
            else:
                made = replace(made, features=numbers.expand(shape))
        tracking.set_mark(out, made)

    def _dims(self) -> int:
        return 1 if isinstance(self.module, nn.Conv1d) else 2 if isinstance(self.module, nn.Conv2d) else 3

    def _made(self, mark: Mark, features: torch.Tensor | None, out: torch.Tensor, channels: bool) -> Mark:
        """The mark of its output; the features, if any, along the last dim alone."""
        tracking, path, seen = self.tracking, self.path, self.seen
        if _is_depthwise(self.module):
            return self._per_channel(mark, features)
        names = [f"{path}.{name}" for name, p in own_parameters(self.module).items() if p is not None]
        if features is not None:
            rows = features.reshape(-1, features.shape[-1])
            line = tracking.components.join_along(rows, [0])[0]
            if bool((line != line[0]).any()):
                return self._row(mark, line)
            tracking.inside.update(names)
            return replace(mark, features=line[:1].to(torch.int32), fresh=False, places={})
        if path.startswith(self.inside) and self.decisions.may_be_column(self.seen.names(path)):
            width = out.shape[1 if out.ndim == self._dims() + 2 else 0] if channels else out.shape[-1]
            first = tracking.number(path, width)
            within = mark.kind == INSIDE
            if seen.sources.setdefault(path, within) != within or path in seen.sinks:
                seen.contradictory.add(path)
            numbers = torch.arange(first, first + width, dtype=torch.int32)
            return Mark(INSIDE, numbers, frozenset([path]), fresh=True)
        if mark.kind == INSIDE:
            tracking.inside.update(names)
            return replace(mark, features=None, places={})
        return self._whole()

    def _row(self, mark: Mark, line: torch.Tensor) -> Mark:
        tracking, path, seen = self.tracking, self.path, self.seen
        if bool((line == 0).any()):
            tracking.spoil(f"{path} sums over sharded and whole features", line)
        if mark.fresh:
            tracking.spoil(f"{path} follows without anything between", line)
        known = seen.sinks.setdefault(path, line)
        tracking.components.join(known, line)
        if path in seen.sources:
            seen.contradictory.add(path)
        return self._whole()

    def _whole(self) -> Mark:
        """The mark of an output of all features, which may be the entry of a region."""
        if self.seen.names(self.path) in self.decisions.enters:
            self.seen.entered.add(self.path)
            return Mark(INSIDE, None, frozenset([self.path]))
        return Mark(ACTIVATION, None, frozenset([self.path]))

    def _per_channel(self, mark: Mark, features: torch.Tensor | None) -> Mark:
        tracking = self.tracking
        if features is None:
            if mark.kind == INSIDE:
                tracking.inside.update(
                    f"{self.path}.{name}" for name, p in own_parameters(self.module).items() if p is not None
                )
                return replace(mark, places={})
            return Mark(ACTIVATION, None, frozenset([self.path]))
        line = tracking.components.join_along(features.reshape(-1, features.shape[-1]), [0])[0]
        for name, parameter in own_parameters(self.module).items():
            if parameter is not None:
                tracking.shapes[f"{self.path}.{name}"] = tuple(parameter.shape)
                tracking.touch(f"{self.path}.{name}", 0, torch.arange(len(line)), line)
        return replace(mark, features=line.to(torch.int32), places={})


def _is_depthwise(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv1d | nn.Conv2d)
        and module.groups == module.in_channels == module.out_channels
        and module.groups > 1
    )


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm with a weight for each feature."""
    weight = own_parameters(module).get("weight")
    if weight is None or weight.ndim != 1 or own_modules(module):
        return False
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in type(module).__name__.lower()


def _is_over_features(module: nn.Module, tensors: list[torch.Tensor], tracking: FeatureTracking) -> bool:
    """Return whether a norm is called with numbered features along what it takes a mean over."""
    weight: Any = module.weight
    for x in tensors:
        features = tracking.features_of(x)
        if features is not None and x.shape[-1] == weight.shape[0]:
            rows = features.reshape(-1, features.shape[-1])  # not those of each head
            differ = bool((features != features[..., :1]).any())
            return differ and bool((features != 0).all()) and bool((rows == rows[0]).all())
    return False


def _mark_norm(
    path: str, module: nn.Module, tensors: list[torch.Tensor], results: list[torch.Tensor], seen: Trace
) -> None:
    tracking = seen.tracking
    weight: Any = module.weight
    numbered = [x for x in tensors if tracking.features_of(x) is not None and x.shape[-1] == weight.shape[0]]
    lines = []
    for x in numbered:
        features = tracking.features_of(x)
        assert features is not None
        lines.append(tracking.components.join_along(features.reshape(-1, x.shape[-1]), [0])[0])
    for other in lines[1:]:
        tracking.components.join(lines[0], other)
    line = tracking.components.of(lines[0])
    seen.norms[path] = line
    for name, parameter in own_parameters(module).items():
        if parameter is not None and parameter.ndim == 1:
            tracking.shapes[f"{path}.{name}"] = tuple(parameter.shape)
            tracking.touch(f"{path}.{name}", 0, torch.arange(len(line)), line)
    mark = tracking.mark_of(numbered[0])
    assert mark is not None
    for out in results:
        tracking.set_mark(out, replace(mark, features=line.to(torch.int32).expand(out.shape)))


def _untracked(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook whose own computations are not followed."""

    @functools.wraps(hook)
    def run_hook(*args: Any) -> None:
        with no_dispatch_modes():
            hook(*args)

    return run_hook

"""One forward of the plain model on the meta device, with hooks that say what each layer does to numbered features."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autopar.derivation.feature_tracking import ACTIVATION, CONSTANT, INPUT, INSIDE, PARAMETER, FeatureTracking, Mark
from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.dry_run.tensor_parallel import run
from autopar.tensor_tracking import tensors_in

__all__ = ["Decisions", "Names", "Trace", "Traced", "is_linear", "traced"]


class Names:
    """Names that blocks share: paths with ``*`` for the number of a block, or of one of several equal modules in it."""

    def __init__(self, root: nn.Module, blocks: Iterable[str]) -> None:
        self._blocks = tuple(blocks)
        stars = set(self._blocks)
        for path, module in root.named_modules():
            if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1 and len(module) > 1:
                stars |= {f"{path}.{name}" for name, _ in module.named_children()}
        self._stars = stars
        self._known: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        """Return the name of a module or parameter."""
        known = self._known.get(path)
        if known is None:
            parts = path.split(".")
            beginnings = [".".join(parts[: end + 1]) for end in range(len(parts))]
            shown = ["*" if part.isdigit() and own in self._stars else part for part, own in zip(parts, beginnings, strict=True)]
            known = self._known[path] = ".".join(shown)
        return known

    def block_of(self, path: str) -> str | None:
        """Return the path of the block that a module or parameter lies in."""
        return next((block for block in self._blocks if path == block or path.startswith(block + ".")), None)


@dataclass(frozen=True)
class Decisions:
    """What a trace takes for granted. Paths with ``*`` for numbers, so alike in all blocks.

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
    """What a forward showed.

    Attributes:
        sinks: row -> the feature at each place of its input.
        sources: column -> whether its input lies inside of a region.
        norms: norm over sharded features -> the feature of each weight.
        order: paths of modules as they were called.
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
    failure: str = ""


@dataclass(frozen=True)
class Traced:
    """A model that a trace runs, with its path and its inputs."""

    path: str
    model: nn.Module
    inputs: dict[str, Any]


def is_linear(module: nn.Module) -> bool:
    """Whether a layer multiplies by a matrix: a linear layer, or a convolution that looks at one place at a time."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module.groups == 1 and all(size == 1 for size in module.kernel_size)
    return isinstance(module, nn.Linear | Conv1D)


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


def trace(models: list[Traced], blocks: tuple[str, ...], decisions: Decisions) -> Trace:
    """Run the models.

    Args:
        blocks: paths of the blocks; layers outside of them stay replicated.

    Returns:
        what was seen.
    """
    root = models[0].model
    shared = Names(root, blocks)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    inside = tuple(path + "." for path in blocks)

    def bare_source(name: str) -> bool:
        return name.startswith(inside) and decisions.may_be_column(shared(name))

    tracking = FeatureTracking(names, bare_source)
    seen = Trace(tracking, shared)
    hooks = [hook for hook in _hooks(root, blocks, inside, decisions, seen)]
    ran = seen.ran
    try:
        for each in models:
            if each.path and each.path in seen.order and any(path.startswith(inside) for path in seen.order):
                if _blocks_ran(each.path, blocks, seen):
                    ran.append(each.path)
                    continue  # a model around it has called it
            for tensor in tensors_in(each.inputs):
                tracking.set_mark(tensor, Mark(INPUT))
            try:
                with tracking:
                    out = run(each.model, (), each.inputs)
            except Exception as error:  # whatever it stumbles over without data
                seen.failure = seen.failure or f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                tracking.stack.clear()
                tracking.suspended = 0
                base = each.model.base_model
                if base is each.model or each.path:
                    continue
                try:
                    with tracking:
                        out = run(base, (), each.inputs)
                except Exception:
                    tracking.stack.clear()
                    tracking.suspended = 0
                    continue
            ran.append(each.path)
            for tensor in tensors_in(out):
                features = tracking.features_of(tensor)
                if features is not None:
                    tracking.spoil("an output of the model", features)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _blocks_ran(path: str, blocks: tuple[str, ...], seen: Trace) -> bool:
    own = [block for block in blocks if block.startswith(path + ".")]
    return bool(own) and all(block in seen.order for block in own)


def _hooks(
    root: nn.Module, blocks: tuple[str, ...], inside: tuple[str, ...], decisions: Decisions, seen: Trace
) -> Iterator[Any]:
    tracking = seen.tracking
    starts = set(blocks)
    for path, module in root.named_modules():
        layer = is_linear(module) or _depthwise(module)
        norm = not layer and _like_a_norm(module)
        region = seen.names(path) in decisions.regions
        state: list[bool] = []

        def before(
            m: nn.Module, args: Any, kwargs: Any, path: str = path, layer: bool = layer, norm: bool = norm,
            region: bool = region, state: list[bool] = state,
        ) -> None:  # fmt: skip
            seen.order.append(path)
            tracking.stack.append(path)
            if tracking.suspended:
                state.append(False)
                return
            tensors = list(tensors_in((args, kwargs)))
            if path in starts or region:
                for x in tensors if region else tensors[:1]:
                    mark = tracking.mark_of(x)
                    if mark is not None and x.is_floating_point() and mark.kind in (PARAMETER, ACTIVATION):
                        kind = INSIDE if region else ACTIVATION
                        tracking.set_mark(x, Mark(kind, None, mark.producers if mark.kind == ACTIVATION else frozenset([path])))
            taken = layer or (norm and _over_features(m, tensors, tracking))
            state.append(taken)
            if taken:
                tracking.suspended += 1

        def after(
            m: nn.Module, args: Any, kwargs: Any, out: Any, path: str = path, layer: bool = layer,
            region: bool = region, state: list[bool] = state,
        ) -> None:  # fmt: skip
            tracking.stack.pop()
            taken = state.pop()
            if taken:
                tracking.suspended -= 1
            if tracking.suspended:
                return
            results = [x for x in tensors_in(out) if x.is_floating_point()]
            if taken and layer:
                tensors = [x for x in tensors_in((args, kwargs)) if x.is_floating_point()]
                _Layer(path, m, inside, decisions, seen).mark(tensors[0], results)
            elif taken:
                _norm(path, m, [x for x in tensors_in((args, kwargs)) if x.is_floating_point()], results, seen)
            elif region:
                for x in results:
                    features = tracking.features_of(x)
                    if features is not None:
                        tracking.spoil(f"the output of {path}", features)
                    tracking.set_mark(x, Mark(ACTIVATION, None, frozenset([path])))
            elif m._parameters and not m._modules:  # a norm on the residual stream, a table
                for x in results:
                    mark = tracking.mark_of(x)
                    if mark is not None and mark.kind == ACTIVATION:
                        if seen.names(path) in decisions.enters:
                            seen.entered.add(path)
                            tracking.set_mark(x, Mark(INSIDE))
                        else:
                            tracking.set_mark(x, replace(mark, producers=frozenset([path])))

        yield module.register_forward_pre_hook(_untracked(before), with_kwargs=True)
        yield module.register_forward_hook(_untracked(after), with_kwargs=True)


def _untracked(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook whose own computations are not followed."""

    @functools.wraps(hook)
    def run_hook(*args: Any) -> None:
        with _disable_current_modes():
            hook(*args)

    return run_hook


@dataclass
class _Layer:
    """A linear layer that is called."""

    path: str
    module: nn.Module
    inside: tuple[str, ...]
    decisions: Decisions
    seen: Trace

    def mark(self, x: torch.Tensor, results: list[torch.Tensor]) -> None:
        """Give its outputs their marks."""
        tracking = self.seen.tracking
        mark = tracking.mark_of(x) or Mark(CONSTANT)
        features = tracking.features_of(x)
        channels = isinstance(self.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if features is not None and channels:
            features = features.movedim(1 if features.ndim == self._dims() + 2 else 0, -1)
        out, rest = results[0], results[1:]
        for other in rest:
            tracking.set_mark(other, Mark(PARAMETER))
        made = self._made(mark, features, out, channels)
        if made.features is not None:
            shape = list(out.shape)
            if channels:
                at = 1 if out.ndim == self._dims() + 2 else 0
                shape = [*shape[:at], *shape[at + 1 :], shape[at]]
                made = replace(made, features=made.features.expand(shape).movedim(-1, at))
            else:
                made = replace(made, features=made.features.expand(shape))
        tracking.set_mark(out, made)

    def _dims(self) -> int:
        return 1 if isinstance(self.module, nn.Conv1d) else 2 if isinstance(self.module, nn.Conv2d) else 3

    def _made(self, mark: Mark, features: torch.Tensor | None, out: torch.Tensor, channels: bool) -> Mark:
        """The mark of its output; the features, if any, along the last dim alone."""
        tracking, path, seen = self.seen.tracking, self.path, self.seen
        if _depthwise(self.module):
            return self._per_channel(mark, features)
        names = [f"{path}.{name}" for name, p in self.module._parameters.items() if p is not None]
        if features is not None:
            rows = features.reshape(-1, features.shape[-1])
            line = tracking.components.join_along(rows, [0])[0]
            if bool((line != line[0]).any()):
                return self._row(mark, line)
            tracking.inside.update(names)
            return replace(mark, features=line[:1].to(torch.int32), fresh=False, places={})
        if path.startswith(self.inside) and self.decisions.may_be_column(self.seen.names(path)) and mark.kind >= INPUT:
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
        if self.seen.names(path) in self.decisions.enters:
            seen.entered.add(path)
            return Mark(INSIDE, None, frozenset([path]))
        return Mark(ACTIVATION, None, frozenset([path]))

    def _row(self, mark: Mark, line: torch.Tensor) -> Mark:
        tracking, path, seen = self.seen.tracking, self.path, self.seen
        if bool((line == 0).any()):
            tracking.spoil(f"{path} sums over sharded and whole features", line)
        if mark.fresh:
            tracking.spoil(f"{path} follows without anything between", line)
        known = seen.sinks.setdefault(path, line)
        tracking.components.join(known, line)
        if path in seen.sources:
            seen.contradictory.add(path)
        if self.seen.names(path) in self.decisions.enters:
            seen.entered.add(path)
            return Mark(INSIDE, None, frozenset([path]))
        return Mark(ACTIVATION, None, frozenset([path]))

    def _per_channel(self, mark: Mark, features: torch.Tensor | None) -> Mark:
        tracking = self.seen.tracking
        if features is None:
            if mark.kind == INSIDE:
                tracking.inside.update(f"{self.path}.{name}" for name, p in self.module._parameters.items() if p is not None)
                return replace(mark, places={})
            return Mark(ACTIVATION, None, frozenset([self.path]))
        line = tracking.components.join_along(features.reshape(-1, features.shape[-1]), [0])[0]
        for name, parameter in self.module._parameters.items():
            if parameter is not None:
                tracking.shapes[f"{self.path}.{name}"] = tuple(parameter.shape)
                tracking.touch(f"{self.path}.{name}", 0, torch.arange(len(line)), line)
        return replace(mark, features=line.to(torch.int32), places={})


def _depthwise(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv1d | nn.Conv2d)
        and module.groups == module.in_channels == module.out_channels
        and module.groups > 1
    )


def _like_a_norm(module: nn.Module) -> bool:
    """Whether a module is a norm with a weight for each feature."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or module._modules:
        return False
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in type(module).__name__.lower()


def _over_features(module: nn.Module, tensors: list[torch.Tensor], tracking: FeatureTracking) -> bool:
    """Whether a norm is called with numbered features along what it takes a mean over."""
    weight: Any = module.weight
    for x in tensors:
        features = tracking.features_of(x)
        if features is not None and x.shape[-1] == weight.shape[0]:
            rows = features.reshape(-1, features.shape[-1])  # not those of each head
            differ = bool((features != features[..., :1]).any())
            return differ and bool((features != 0).all()) and bool((rows == rows[0]).all())
    return False


def _norm(path: str, module: nn.Module, tensors: list[torch.Tensor], results: list[torch.Tensor], seen: Trace) -> None:
    tracking = seen.tracking
    weight: Any = module.weight
    numbered = [x for x in tensors if tracking.features_of(x) is not None and x.shape[-1] == weight.shape[0]]
    lines = [
        tracking.components.join_along(tracking.components.of(tracking.mark_of(x).features).reshape(-1, x.shape[-1]), [0])[0]  # type: ignore[union-attr, arg-type]
        for x in numbered
    ]
    for other in lines[1:]:
        tracking.components.join(lines[0], other)
    line = tracking.components.of(lines[0])
    seen.norms[path] = line
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.ndim == 1:
            tracking.shapes[f"{path}.{name}"] = tuple(parameter.shape)
            tracking.touch(f"{path}.{name}", 0, torch.arange(len(line)), line)
    mark = tracking.mark_of(numbered[0])
    assert mark is not None
    for out in results:
        tracking.set_mark(out, replace(mark, features=line.to(torch.int32).expand(out.shape)))

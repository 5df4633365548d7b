"""Trace one forward of a model on the meta device, with hooks that number and follow the features of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autopar.compat.tensors import in_backward, no_dispatch_modes, own_modules, own_parameters
from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.dry_run.tensor_parallel import run
from autopar.errors import UnsupportedModelError, type_and_text
from autopar.plan.stages import lies_in
from autopar.policy.match import base_of, convolutional, is_hugging_face_model
from autopar.tensor_tracking import tensors_in
from autopar.tools.derivation.feature_tracking import (
    ACTIVATION,
    CONSTANT,
    INPUT,
    INSIDE,
    PARAMETER,
    FeatureTracking,
    Mark,
)


class Names:
    """Shared names of blocks: paths with ``*`` in place of the number of a block or of an equal module in a list."""

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
        if path not in self._known:
            parts = path.split(".")
            starred = [part.isdigit() and ".".join(parts[: n + 1]) in self._stars for n, part in enumerate(parts)]
            self._known[path] = ".".join("*" if star else part for part, star in zip(parts, starred, strict=True))
        return self._known[path]

    def below(self, block: str, path: str) -> str:
        """Return the name of a path, relative to its block."""
        return ".".join(self(path).split(".")[len(block.split(".")) :])

    def block_of(self, path: str) -> str | None:
        """Return the path of the block that contains a module or parameter."""
        return next((block for block in self._blocks if lies_in(path, block)), None)


@dataclass(frozen=True)
class Decisions:
    """Assumptions of a trace, by shared names (:class:`Names`).

    Attributes:
        replicated: The replicated layers and bare parameters.
        enters: The layers whose full outputs enter a region.
        regions: The modules with bare parameters and partial outputs.
    """

    replicated: frozenset[str] = frozenset()
    enters: frozenset[str] = frozenset()
    regions: frozenset[str] = frozenset()

    def without(self, names: Iterable[str]) -> Decisions:
        """Return decisions with additional replicated layers, and without ``enters``."""
        return replace(self, replicated=self.replicated | set(names), enters=frozenset())


@dataclass
class Trace:
    """Results of a forward.

    Attributes:
        sinks: Row -> the feature of each input index.
        sources: Column -> whether its input is inside a region.
        norms: Norm over sharded features -> the feature of each weight.
        order: The paths of modules in call order.
        suspended: The paths of layers whose operators are not tracked.
        proven: The paths of modules called by models that ran successfully.
        runs: The paths and inputs of models that ran successfully.
        in_training: The layers whose weights are used outside of their forward, only in training; None: unknown.
    """

    tracking: FeatureTracking
    names: Names
    sinks: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, bool] = field(default_factory=dict)
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    contradictory: set[str] = field(default_factory=set)
    suspended: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    runs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failure: str = ""
    in_training: list[str] | None = None


def underivable(model: nn.Module, why: str, *, by_hand: bool = True) -> UnsupportedModelError:
    """Return the error for a model without a derived policy."""
    if reason := convolutional(model):
        return UnsupportedModelError(reason)
    hint = ". Write one by hand: see docs/policies.md" if by_hand else ""
    return UnsupportedModelError(f"no policy can be derived for {type(model).__name__}: {why}{hint}")


def is_linear(module: nn.Module) -> bool:
    """Return whether a layer is a matmul: a linear layer, or a convolution with kernel size 1."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module.groups == 1 and all(size == 1 for size in module.kernel_size)
    return isinstance(module, nn.Linear | Conv1D)


_LISTS = (nn.ModuleList, nn.Sequential)
_LAYERS_OF_A_BLOCK = 2


@dataclass(frozen=True)
class BlockList:
    """The blocks of one ``blocks.path``, which may have ``*``, and the path of their Hugging Face model."""

    path: str
    blocks: tuple[str, ...]
    owner: str


def block_lists(root: nn.Module) -> tuple[list[BlockList], tuple[str, ...]]:
    """Return the outermost lists of blocks in the base model (inside stages, the inner lists), and all block paths."""
    found: dict[str, list[str]] = {}
    base_path, _ = base_of(root)
    start = f"{base_path}." if base_path else ""
    for path in (path for path in _outermost(root) if path.startswith(start)):
        members = [f"{path}.{name}" for name, _ in root.get_submodule(path).named_children()]
        inner = [f"{one}.{below}" for one in members for below in _outermost(root.get_submodule(one))]
        inner = [one for one in inner if _is_blocks(root.get_submodule(one))]
        inner = [one for one in inner if len({type(child) for child in root.get_submodule(one).children()}) == 1]
        if inner and all(
            _only_around(root.get_submodule(one), [i[len(one) + 1 :] for i in inner if i.startswith(one + ".")])
            for one in members
        ):
            for one in inner:
                blocks = [f"{one}.{name}" for name, _ in root.get_submodule(one).named_children()]
                below = one[len(path) + 1 :].partition(".")[2]
                found.setdefault(f"{path}.*.{below}", []).extend(blocks)
        else:
            found.setdefault(path, []).extend(members)
    models = [path for path, module in root.named_modules() if is_hugging_face_model(module)]
    around = {path: [p for p in models if blocks[0].startswith(f"{p}." if p else "")] for path, blocks in found.items()}
    lists = [BlockList(path, tuple(blocks), max(around[path], key=len, default="")) for path, blocks in found.items()]
    return lists, tuple(block for each in lists for block in each.blocks)


def _outermost(root: nn.Module) -> Iterator[str]:
    below = ""
    for path, module in root.named_modules():
        if below and path.startswith(below):
            continue
        if path and isinstance(module, _LISTS) and _is_blocks(module):
            below = path + "."
            yield path


def _is_blocks(listed: nn.Module) -> bool:
    children = list(listed.children())
    return bool(children) and max(sum(map(_layer, child.modules())) for child in children) >= _LAYERS_OF_A_BLOCK


def _layer(module: nn.Module) -> bool:
    return is_linear(module) or sum(p.ndim > 1 for p in own_parameters(module).values() if p is not None) > 1


def _only_around(stage: nn.Module, inner: list[str]) -> bool:
    """Return whether a list item is a stage: its inner lists contain all its larger modules."""
    outside = [m for p, m in stage.named_modules() if p and not any(lies_in(p, i) or lies_in(i, p) for i in inner)]
    layers = max((sum(map(_layer, module.modules())) for module in outside), default=0)
    return bool(inner) and layers < _LAYERS_OF_A_BLOCK


@dataclass(frozen=True)
class Traced:
    """A model to trace, with its path and inputs."""

    path: str
    model: nn.Module
    inputs: dict[str, Any]


def traced(model: PreTrainedModel) -> list[Traced]:
    """Return the model and the models inside it, on the meta device, with small inputs."""
    copied = meta_copy(model)
    found, configs = [], set[int]()
    for path, module in copied.named_modules():
        if is_hugging_face_model(module) and id(module.config) not in configs:
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
    """Trace the models.

    Args:
        blocks: The paths of the blocks. Layers outside of blocks stay replicated.
        known: An earlier trace with the same decisions. Its joined components are reused.
        record: A callback after each operator. It gets the tracking, the operator, its arguments and its outputs.
    """
    root = models[0].model
    shared = Names(root, blocks)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    inside = tuple(path + "." for path in blocks)
    sources = {name for name in names.values() if name.startswith(inside) and shared(name) not in decisions.replicated}
    tracking = FeatureTracking(names, sources, record)
    if known is not None:
        tracking.components = known.tracking.components
        tracking.first_of, tracking.count_of = known.tracking.first_of, known.tracking.count_of
    seen = Trace(tracking, shared)
    with ExitStack() as hooks:
        for path, module in root.named_modules():
            around = _ModuleHooks(path, module, path in blocks, inside, decisions, seen)
            hooks.enter_context(module.register_forward_pre_hook(_untracked(around.before), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(_untracked(around.after), with_kwargs=True))
        for each in models:
            own = [block for block in blocks if block.startswith(each.path + ".")]
            if each.path and own and seen.proven.issuperset(own):
                continue  # the surrounding model has called it
            for tensor in tensors_in(each.inputs):
                tracking.marks[tensor] = Mark(INPUT)
            for tensor in tensors_in(_run(each, root, seen)):
                features = tracking.features_of(tensor)
                if features is not None:
                    tracking.spoil(features)  # an output of the model
    return seen


def _run(each: Traced, root: nn.Module, seen: Trace) -> Any:
    """Run a model, or its base model if the model fails. Return the outputs, or None if both fail."""
    base: Any = base_of(each.model)[1]
    for model in dict.fromkeys((each.model, each.model if each.path else base)):
        before = len(seen.order)
        try:
            with seen.tracking:
                out = run(model, (), each.inputs)
        except Exception as error:  # a forward without data may raise anything
            seen.failure = seen.failure or type_and_text(error, 120)
            seen.tracking.stack.clear()
            seen.tracking.suspended = 0
            continue
        seen.runs.append((next(path for path, module in root.named_modules() if module is model), each.inputs))
        seen.proven.update(seen.order[before:])
        return out
    return None


class _ModuleHooks:
    """Hooks around a module, which mark its inputs and outputs. ``starts``: the module is a block."""

    def __init__(
        self, path: str, module: nn.Module, starts: bool, inside: tuple[str, ...], decisions: Decisions, seen: Trace
    ) -> None:
        self.path, self.module, self.starts, self.inside = path, module, starts, inside
        self.decisions, self.seen = decisions, seen
        self.tracking = seen.tracking
        self.layer = is_linear(module)
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
                    tracking.marks[x] = Mark(kind, None, producers)
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
        for x, known in self._entered.pop() if self.region else ():  # other readers are outside
            tracking.marks[x] = known
        results = [x for x in tensors_in(out) if x.is_floating_point()]
        if taken:
            tensors = [x for x in tensors_in((args, kwargs)) if x.is_floating_point()]
            if self.layer:
                self._mark_layer(tensors[0], results)
            else:
                self._mark_norm(tensors, results)
        elif self.region:
            for x in results:
                features = tracking.features_of(x)
                if features is not None:
                    tracking.spoil(features)
                tracking.marks[x] = Mark(ACTIVATION, None, frozenset([self.path]))
        elif own_parameters(m) and not own_modules(m):  # a norm of the residual stream, or an embedding
            enters = self.seen.names(self.path) in self.decisions.enters
            for x in results:
                mark = tracking.mark_of(x)
                if mark is not None and mark.kind == ACTIVATION:
                    self.seen.entered |= {self.path} if enters else set()
                    known = replace(mark, producers=frozenset([self.path]))
                    tracking.marks[x] = Mark(INSIDE) if enters else known

    def _mark_layer(self, x: torch.Tensor, results: list[torch.Tensor]) -> None:
        """Mark the outputs of a layer."""
        tracking = self.tracking
        mark = tracking.mark_of(x) or Mark(CONSTANT)
        features = tracking.features_of(x)
        if features is not None:
            features = features.movedim(self._along(features), -1)
        out, rest = results[0], results[1:]
        for other in rest:
            tracking.marks[other] = Mark(PARAMETER)
        made = self._made(mark, features, out)
        if made.features is not None:
            at = self._along(out)
            made = replace(made, features=made.features.expand(out.movedim(at, -1).shape).movedim(-1, at))
        tracking.marks[out] = made

    def _along(self, x: torch.Tensor) -> int:
        """Return the feature dim of an input or output."""
        if isinstance(self.module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return x.ndim - len(self.module.kernel_size) - 1  # with or without a batch dim
        return -1

    def _made(self, mark: Mark, features: torch.Tensor | None, out: torch.Tensor) -> Mark:
        """Return the mark of an output, whose features vary only along the last dim."""
        tracking, path, seen = self.tracking, self.path, self.seen
        names = [f"{path}.{name}" for name, p in own_parameters(self.module).items() if p is not None]
        if features is not None:
            rows = features.reshape(-1, features.shape[-1])
            line = tracking.components.join_along(rows, [0])[0]
            if bool((line != line[0]).any()):
                return self._row(mark, line)
            tracking.inside.update(names)
            return replace(mark, features=line[:1].to(torch.int32), fresh=False, places={})
        if path.startswith(self.inside) and self.seen.names(path) not in self.decisions.replicated:
            width = out.shape[self._along(out)]
            first = tracking.number(path, width)
            within = mark.kind == INSIDE
            if seen.sources.setdefault(path, within) != within or path in seen.sinks:
                seen.contradictory.add(path)
            numbers = torch.arange(first, first + width, dtype=torch.int32)
            return Mark(INSIDE, numbers, frozenset([path]), fresh=True)
        if mark.kind == INSIDE:
            tracking.inside.update(names)
            return replace(mark, features=None, places={})
        return self._replicated()

    def _row(self, mark: Mark, line: torch.Tensor) -> Mark:
        tracking, path, seen = self.tracking, self.path, self.seen
        if bool((line == 0).any()):
            tracking.spoil(line)  # sums over sharded and replicated features
        if mark.fresh:
            tracking.spoil(line)  # no operators between the column and this layer
        known = seen.sinks.setdefault(path, line)
        tracking.components.join(known, line)
        if path in seen.sources:
            seen.contradictory.add(path)
        return self._replicated()

    def _replicated(self) -> Mark:
        """Return the mark of a full output, which may enter a region."""
        if self.seen.names(self.path) in self.decisions.enters:
            self.seen.entered.add(self.path)
            return Mark(INSIDE, None, frozenset([self.path]))
        return Mark(ACTIVATION, None, frozenset([self.path]))

    def _mark_norm(self, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        tracking, width = self.tracking, own_parameters(self.module)["weight"].shape[0]
        found = [(x, tracking.features_of(x)) for x in tensors if x.shape[-1] == width]
        numbered = [(x, features.reshape(-1, width)) for x, features in found if features is not None]
        lines = [tracking.components.join_along(rows, [0])[0] for _, rows in numbered]
        for other in lines[1:]:
            tracking.components.join(lines[0], other)
        line = self.seen.norms[self.path] = tracking.components.of(lines[0])
        for name, parameter in own_parameters(self.module).items():
            if parameter is not None and parameter.ndim == 1:
                tracking.shapes[f"{self.path}.{name}"] = tuple(parameter.shape)
                tracking.touch(f"{self.path}.{name}", 0, torch.arange(len(line)), line)
        mark = tracking.mark_of(numbered[0][0]) or Mark(INSIDE)
        for out in results:
            tracking.marks[out] = replace(mark, features=line.to(torch.int32).expand(out.shape))


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm layer with one weight per feature."""
    weight = own_parameters(module).get("weight")
    if weight is None or weight.ndim != 1 or own_modules(module):
        return False
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in type(module).__name__.lower()


def _is_over_features(module: nn.Module, tensors: list[torch.Tensor], tracking: FeatureTracking) -> bool:
    """Return whether a norm averages over numbered features."""
    weight: Any = module.weight
    for x in tensors:
        features = tracking.features_of(x)
        if features is not None and x.shape[-1] == weight.shape[0]:
            rows = features.reshape(-1, features.shape[-1])  # not a norm within each head
            differ = bool((features != features[..., :1]).any())
            return differ and bool((features != 0).all()) and bool((rows == rows[0]).all())
    return False


def _untracked(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that runs without tracking."""

    def run_hook(*args: Any) -> None:
        with no_dispatch_modes(), torch.device("cpu"):
            hook(*args)

    return run_hook


@contextmanager
def running(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list of the paths of the running modules, the outermost first."""
    stack: list[str] = []
    with hooked(model, lambda path, *_: stack.append(path), lambda *_: stack.pop()):
        yield stack


@contextmanager
def hooked(
    model: nn.Module, before: Callable[[str, Any, Any], Any], after: Callable[[str, Any], Any]
) -> Iterator[None]:
    """Call ``before(path, args, kwargs)`` and ``after(path, output)`` around each module, except in a backward."""
    handles = []
    for path, module in model.named_modules():

        def enter(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            if not in_backward():
                before(path, args, kwargs)

        def leave(_: nn.Module, args: Any, output: Any, path: str = path) -> None:
            if not in_backward():
                after(path, output)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

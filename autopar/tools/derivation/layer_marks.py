"""Follow numbered features through the call of a layer or a norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.foreign.modules import own_modules, own_parameters
from autopar.tools.derivation.decisions import Decisions, Trace
from autopar.tools.derivation.feature_tracking import FeatureTracking
from autopar.tools.derivation.marks import ACTIVATION, CONSTANT, INSIDE, PARAMETER, Mark

__all__ = ["LayerMarks", "is_depthwise", "is_norm", "is_over_features", "mark_norm"]


@dataclass
class LayerMarks:
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
        tracking, path, seen = self.seen.tracking, self.path, self.seen
        if is_depthwise(self.module):
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


def is_depthwise(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv1d | nn.Conv2d)
        and module.groups == module.in_channels == module.out_channels
        and module.groups > 1
    )


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm with a weight for each feature."""
    weight = own_parameters(module).get("weight")
    if weight is None or weight.ndim != 1 or own_modules(module):
        return False
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in type(module).__name__.lower()


def is_over_features(module: nn.Module, tensors: list[torch.Tensor], tracking: FeatureTracking) -> bool:
    """Return whether a norm is called with numbered features along what it takes a mean over."""
    weight: Any = module.weight
    for x in tensors:
        features = tracking.features_of(x)
        if features is not None and x.shape[-1] == weight.shape[0]:
            rows = features.reshape(-1, features.shape[-1])  # not those of each head
            differ = bool((features != features[..., :1]).any())
            return differ and bool((features != 0).all()) and bool((rows == rows[0]).all())
    return False


def mark_norm(
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

"""The assumptions of a trace, and its findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from autopar.errors import UnsupportedModelError
from autopar.policy.match import convolutional
from autopar.tools.derivation.feature_tracking import FeatureTracking


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

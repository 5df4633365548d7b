"""The reason why a layer stays replicated in a derived policy: the operation that computes with all of its units."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from autopar.distributed.rng import kept
from autopar.tools.derivation.feature_tracking import Components, FeatureTracking
from autopar.tools.derivation.trace import Decisions, Names, block_lists, trace, traced


class _WatchedComponents(Components):
    """Components that note which operation puts all features of a layer into one.

    Attributes:
        met: layer -> operator and path of the module.
    """

    def __init__(self, tracking: FeatureTracking) -> None:
        super().__init__()
        self._tracking = tracking
        self.met: dict[str, tuple[str, str]] = {}

    def join(self, one: torch.Tensor, other: torch.Tensor) -> None:
        before = self.version
        super().join(one, other)
        if self.version == before:
            return
        tracking = self._tracking
        for path, first in tracking.first_of.items():
            count = tracking.count_of[path]
            if path not in self.met and count > 1 and len(self.of(torch.arange(first, first + count)).unique()) == 1:
                self.met[path] = (tracking.operator.strip("_"), tracking.stack[-1] if tracking.stack else "")


def meetings(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the operation in which all units of a layer meet, for each layer whose own outputs meet so.

    A layer that lacks an entry may also stay replicated for the sake of other layers.

    Args:
        names: layers and bare parameters, with ``*`` for the numbers of blocks.
    """
    models, found = traced(model), dict[str, str]()
    root: Any = models[0].model
    _, blocks = block_lists(root)
    shared = Names(root, blocks)
    for name in names:
        watched: list[_WatchedComponents] = []

        def watch(tracking: FeatureTracking, watched: list[_WatchedComponents] = watched) -> None:
            tracking.components = _WatchedComponents(tracking)
            watched.append(tracking.components)

        with kept():
            trace(models, blocks, Decisions(only=frozenset([name])), prepare=watch)
        met = next((met for path, met in watched[0].met.items() if shared(path) == name), None)
        if met is not None:
            operator, module = met
            place = shared(module) or "the model"
            found[name] = f"{operator} in {place}" if operator else place
    return found

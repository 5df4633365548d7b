"""Weights that no torch optimizer steps: see when something else has changed them.

A loop of the user's own (``p.data -= lr * p.grad``, an optimizer that is no torch one) calls no hook. So some elements
of these weights are looked at when a training forward begins.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.distributed.digest import sum_of_bits

__all__ = ["FreeWeights"]

_TENSORS = 4  # that are looked at, spread over all of them
_ELEMENTS = 256  # of each
_AGAIN = 64  # forwards until it is looked up again which weights these are: some may have been frozen


class FreeWeights:
    """The trained weights of a model that no torch optimizer has stepped.

    Attributes:
        named: these weights by name; without those that FSDP shards, and those that have no memory.
    """

    def __init__(self) -> None:
        self.named: list[tuple[str, nn.Parameter]] = []
        self._known = -1  # stepped parameters when ``named`` was looked up
        self._forwards = 0
        self._seen: list[int] | None = None

    def have_changed(self, model: nn.Module, stepped: Iterable[nn.Parameter]) -> bool:
        """Return whether something has changed these weights since the last call.

        Args:
            stepped: the parameters that torch optimizers step.
        """
        held = {id(parameter) for parameter in stepped}
        if len(held) != self._known or self._forwards % _AGAIN == 0:
            named = [(name, p) for name, p in model.named_parameters() if id(p) not in held and _is_trained(p)]
            if [id(p) for _, p in named] != [id(p) for _, p in self.named]:
                self.named, self._seen = named, None
            self._known = len(held)
        self._forwards += 1
        if not self.named:
            return False
        before, self._seen = self._seen, _sample(self.named)
        return before is not None and before != self._seen


def _is_trained(parameter: nn.Parameter) -> bool:
    here = not isinstance(parameter, DTensor) and not parameter.is_meta and parameter.numel() > 0
    return here and parameter.requires_grad


@torch.no_grad()
def _sample(named: list[tuple[str, nn.Parameter]]) -> list[int]:
    """Sum the bits of some elements of the smallest weight and of some others."""
    smallest = min(named, key=lambda entry: entry[1].numel())
    spread = named[:: max(1, len(named) // (_TENSORS - 1))]
    parts = [parameter.flatten() for _, parameter in [smallest, *spread]]
    return torch.stack([sum_of_bits(part[:: max(1, len(part) // _ELEMENTS)].contiguous()) for part in parts]).tolist()

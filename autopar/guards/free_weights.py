"""The weights of a model that no torch optimizer steps, and whether something has changed them.

A loop that user code writes (``p.data -= lr * p.grad``, an optimizer that is not torch's) calls no hook, so some
elements of these weights are looked at when a training forward begins.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.distributed.digest import sums_of_bits

_LOOKED_AT = (4, 256)  # how many weights, and elements of each
_AGAIN = 64  # forwards until it is looked up again which weights these are: some may have been frozen


class FreeWeights:
    """The trained weights of a model that no torch optimizer has stepped.

    Attributes:
        named: Names and weights, without those that FSDP shards, and those that have no memory.
    """

    def __init__(self) -> None:
        self.named: list[tuple[str, nn.Parameter]] = []
        self._known = -1  # stepped parameters when ``named`` was looked up
        self._forwards = 0
        self._seen: dict[int, int] = {}  # id of a weight -> sum of its elements when it was looked at last

    def have_changed(self, model: nn.Module, stepped: Iterable[nn.Parameter]) -> bool:
        """Return whether something has changed these weights since the last call.

        Args:
            stepped: The parameters that torch optimizers step.
        """
        held = {id(parameter) for parameter in stepped}
        if len(held) != self._known or self._forwards % _AGAIN == 0:
            named = [(name, p) for name, p in model.named_parameters() if id(p) not in held and _is_trained(p)]
            free = {id(p) for _, p in named}
            self.named, self._seen = named, {key: seen for key, seen in self._seen.items() if key in free}
            self._known = len(held)
        turn, self._forwards = self._forwards, self._forwards + 1
        if not self.named:
            return False
        now = _sums_of_some(self.named, turn)
        changed = any(self._seen.get(key, seen) != seen for key, seen in now.items())
        self._seen |= now
        return changed


def _is_trained(parameter: nn.Parameter) -> bool:
    here = not isinstance(parameter, DTensor) and not parameter.is_meta and parameter.numel() > 0
    return here and parameter.requires_grad


@torch.no_grad()
def _sums_of_some(named: list[tuple[str, nn.Parameter]], turn: int) -> dict[int, int]:
    """Sum the bits of some elements of the smallest weight, of some others, and of some that change with the turn."""
    smallest = min(named, key=lambda entry: entry[1].numel())
    stride = max(1, len(named) // (_LOOKED_AT[0] - 1))
    looked_at = [parameter for _, parameter in [smallest, *named[::stride], *named[turn % stride :: stride]]]
    parts = [parameter.flatten() for parameter in looked_at]
    sums = sums_of_bits(part[:: max(1, len(part) // _LOOKED_AT[1])].contiguous() for part in parts)
    return {id(parameter): found for parameter, found in zip(looked_at, sums, strict=True)}

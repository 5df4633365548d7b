"""Closeness of a tensor to the plain model's: how far apart the two are, and how far rounding may take them.

Differences are measured by the largest element of what is expected, so a gradient of 1e-6 is looked at as closely as
logits of 20. ``floor`` keeps what is zero but for rounding (the gradient of a key's bias) from being so.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["OF_GRADIENTS", "TOLERANCES", "Distance", "measure", "tolerance_of"]

TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 8e-2,
}
"""Largest difference of outputs that other orders of adding up explain, as a part of the largest element."""
OF_GRADIENTS = 10
"""Gradients have passed through every layer twice: times so much."""


class Distance(NamedTuple):
    """How far a tensor is from the expected one.

    Attributes:
        relative: largest difference, as a part of the largest element that was expected; 0: equal to the bit.
        problem: why they cannot be compared: shapes, or numbers that are not finite.
    """

    relative: float
    problem: str = ""


def tolerance_of(*dtypes: torch.dtype) -> float:
    """Return what rounding explains where all of these dtypes take part."""
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)


@torch.no_grad()
def measure(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> Distance:
    """Compare two tensors of any dtype; both are only read.

    Args:
        floor: the difference is a part of this number where no element of ``expected`` is larger.
    """
    if actual.shape != expected.shape:
        return Distance(math.inf, f"shape {list(actual.shape)}, the plain model's is {list(expected.shape)}")
    actual = actual.detach().to(expected.device)
    expected = expected.detach()
    if actual.dtype == expected.dtype and torch.equal(actual, expected):
        return Distance(0.0)
    if not (actual.is_floating_point() and expected.is_floating_point()):
        count = int((actual != expected).sum())
        return Distance(math.inf, f"{count} of {actual.numel()} elements differ")
    wide = torch.float64 if torch.float64 in (actual.dtype, expected.dtype) else torch.float32
    mine, theirs = actual.to(wide), expected.to(wide)
    odd = ~(torch.isfinite(mine) & torch.isfinite(theirs))
    if odd.any():
        if not torch.equal(mine[odd], theirs[odd]):  # a mask of -inf is the same in both
            return Distance(math.inf, f"{int(odd.sum())} of {odd.numel()} elements are not finite")
        mine, theirs = mine.masked_fill(odd, 0), theirs.masked_fill(odd, 0)
    largest = (mine - theirs).abs().max().item()
    scale = max(theirs.abs().max().item(), floor)
    return Distance(largest / scale if scale else (math.inf if largest else 0.0))

"""Outputs of any model by name, a loss, how far a tensor is from the plain model's; values of other ranks.

Differences are measured by the largest element of what is expected, so a gradient of 1e-6 is looked at as closely as
logits of 20. ``floor`` keeps what is zero but for rounding (the gradient of a key's bias) from being so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from autopar.checks.forward import leaves
from autopar.errors import UnsupportedModelError
from autopar.pipeline_parallel.outputs import complete, unavailable

__all__ = [
    "OF_GRADIENTS",
    "TOLERANCES",
    "Distance",
    "floats_of",
    "gathered",
    "measure",
    "named",
    "of_first",
    "reseed",
    "same_floats",
    "size_of_loss",
    "tolerance_of",
    "total_loss",
]


def named(output: Any) -> Any:
    """Return what a model returns, by names: of several bare tensors the one that is a number is the loss."""
    if hasattr(output, "items"):
        return output
    listed = output if isinstance(output, tuple) else (output,)
    return {
        "loss" if isinstance(value, torch.Tensor) and value.ndim == 0 else str(number): value
        for number, value in enumerate(listed)
    }


def floats_of(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors of an output, by name."""
    for name, value in leaves(dict(named(output).items())):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield name, value


def same_floats(expected: Any, actual: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield name, tensor and the other output's of that name; what only another pipeline stage has is left out."""
    actual = named(actual)
    for key, value in dict(named(expected).items()).items():
        if key in unavailable(actual):
            continue
        try:
            found = dict(leaves(actual[key], key)) if key in dict.keys(actual) else {}
        except UnsupportedModelError:
            continue
        for name, tensor in leaves(value, key):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                yield name, tensor, found.get(name)


def total_loss(output: Any, lacking: Collection[str] = ()) -> torch.Tensor:
    """Add up all losses of an output; for a model without one, weigh every element of a sample differently.

    The second is a mean over samples, so that replicas and micro-batches average to the whole.

    Args:
        lacking: entries that do not count, since the last pipeline stage does not have them.
    """
    output = _present(output, lacking)
    losses = [value for key, value in output.items() if str(key).endswith("loss") and value is not None]
    return torch.stack(losses).sum() if losses else torch.stack(list(_weighed(output))).sum()


def _present(output: Any, lacking: Collection[str]) -> Mapping[str, Any]:
    return {name: value for name, value in named(complete(output)).items() if name not in lacking}


def size_of_loss(output: Any, lacking: Collection[str] = ()) -> float:
    """Return how large the terms of :func:`total_loss` are, where they are weighed elements that may cancel; else 0."""
    output = _present(output, lacking)
    if any(str(key).endswith("loss") and value is not None for key, value in output.items()):
        return 0.0
    with torch.no_grad():
        return sum(each.item() for each in _weighed(output, of=torch.abs))


def _weighed(output: Any, of: Callable[[torch.Tensor], torch.Tensor] = lambda terms: terms) -> Iterator[torch.Tensor]:
    tensors = [value for value in output.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    rows = [tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.reshape(-1, 1) for tensor in tensors]
    most = max(max((row.shape[1] for row in rows), default=0) / 350, 1)  # a sum over many has gradients as large
    for row in rows:
        weights = torch.linspace(-1, 1, row.shape[1] + 1, device=row.device, dtype=row.dtype)[1:]
        yield of(row * weights).sum(1).mean() / (5 * most)


def reseed(seed: int) -> None:
    """Seed every generator that a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


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


def gathered(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, or of those of a group, in their order."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def of_first(mine: Any) -> Any:
    """Return the value of rank 0."""
    listed = [mine]
    dist.broadcast_object_list(listed)
    return listed[0]

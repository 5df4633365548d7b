"""Outputs of any model by name, and a loss of any model: what is compared, and what is differentiated."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autopar.checks.forward import leaves
from autopar.errors import UnsupportedModelError
from autopar.pipeline_parallel.outputs import complete, unavailable

__all__ = ["floats_of", "named", "reseed", "same_floats", "size_of_loss", "total_loss"]


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

"""One line about a model that was parallelized, for the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["count", "summarise"]


def count(model: nn.Module) -> int:
    """Return the number of elements of the parameters that are here; a tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def summarise(model: nn.Module, whole: int, sizes: tuple[int, ...], device: Any, policy: object) -> str:
    """Return the model, its policy, the mesh, and what this rank holds.

    Args:
        whole: elements of the parameters of the whole model.
        sizes: of tp, pp, dp and cp.
        policy: file of the policy, with a line or without.
    """
    tp, pp, dp, cp = sizes
    context = f" x cp {cp}" if cp > 1 else ""
    held = {id(p): p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()}.values()
    elements, size = sum(p.numel() for p in held), sum(p.numel() * p.element_size() for p in held)
    return (
        f"{type(model).__name__} by {Path(str(policy)).name}: tp {tp}{context} x pp {pp} x dp {dp} on {device}; "
        f"{whole:,} parameters, this rank holds {elements:,} ({size / 1e6:,.1f} MB)"
    )

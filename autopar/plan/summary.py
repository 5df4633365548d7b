"""One line about a model that was parallelized, for the log."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from autopar.plan.plan import Plan
from autopar.policy.match import DERIVED
from autopar.policy.schema import Policy

__all__ = ["count", "derived_notice", "summarise", "whole_share"]

_NEAR_EMPTY = 0.5  # of the parameters


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
    place = Path(str(policy)).name.removesuffix(":top")
    return (
        f"{type(model).__name__} by {place}: tp {tp}{context} x pp {pp} x dp {dp} on {device}; "
        f"{whole:,} parameters, this rank holds {elements:,} ({size / 1e6:,.1f} MB)"
    )


def whole_share(model: nn.Module, plan: Plan) -> float:
    """Return which part of a model's parameters every tp rank holds whole, 0 to 1; ``model`` is not sharded yet."""
    names = {plan.canonical(name) for name, _ in model.named_parameters()}
    sizes = [(prod(plan.tensors[name].shape), plan.tensors[name].layout is None) for name in names]
    return sum(size for size, whole in sizes if whole) / max(sum(size for size, _ in sizes), 1)


def derived_notice(model: nn.Module, plan: Plan, policy: Policy) -> str | None:
    """Return one line on a policy that was derived unasked; None for any other. ``model`` is not sharded yet."""
    if policy.name != DERIVED:
        return None
    line = (
        f"no policy lists model_type '{plan.model_type}', which comes with a tp_plan: one is derived from what forward "
        "computes ('autopar policy new' proves it and writes it down)"
    )
    if plan.tp == 1:
        return line
    share = whole_share(model, plan)
    near = " and is near-empty" if share >= _NEAR_EMPTY else ""
    return f"{line}{near}; it leaves {share:.0%} of the parameters whole on each of {plan.tp} ranks"

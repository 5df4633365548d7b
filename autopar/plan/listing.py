"""A plan in words: rows of a table, one for tensors that differ in a block's number alone; and a line for the log."""

from __future__ import annotations

import json
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan
from autopar.policy.schema import DERIVED, Policy
from autopar.quantized.layers import stored_weights


def rule_of(plan: Plan, tensor: TensorPlan) -> str:
    """Name the rule of a tensor and its units: ``column heads | kv_heads``; ``replicated`` if every rank holds all."""
    for name in (tensor.name, *tensor.aliases):
        path, _, own = name.rpartition(".")
        module = plan.modules.get(path)
        if module is not None and own in module.layouts:
            rule = "by_expert" if module.rule == "one_expert" else module.rule or "sharded"
            return f"{rule} {_units(module.layouts[own])}"
        if module is not None and own in module.once:
            return "once"
        if module is not None and own in module.summed:
            return "replicated, gradient all-reduced"
    return "replicated" if tensor.layout is None else f"sharded {_units(tensor.layout)}"


def _units(layout: Layout) -> str:
    return " | ".join(block.unit for block in layout.blocks) + (" (replicated)" if layout.replicated else "")


def rows(entries: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """One row for entries that differ in numbers of blocks alone: ``layers.0-3.experts.0-7.up.weight``."""
    found = [
        (
            tuple(entry["name"].split(".")),
            json.dumps({k: v for k, v in entry.items() if k not in ("name", "tied")}),
            entry,
        )
        for entry in entries
    ]
    for place in range(max((len(name) for name, _, _ in found), default=0) - 1, 0, -1):  # the innermost number first
        groups: dict[Any, list[tuple[int, Any]]] = {}
        for name, rest, entry in found:
            number = name[place] if place < len(name) - 1 else ""
            key = (*name[:place], "*", *name[place + 1 :]) if number.isdigit() else name
            groups.setdefault((key, rest), []).append((int(number) if number.isdigit() else -1, entry))
        found = [
            (tuple(",".join(ranges([n for n, _ in group])) if s == "*" else s for s in key), rest, group[0][1])
            for (key, rest), group in groups.items()
        ]
    return [(".".join(name), entry) for name, _, entry in found]


def ranges(numbers: list[int]) -> list[str]:
    """``0-3`` for each run of numbers that follow one another."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return runs


_NEAR_EMPTY = 0.5  # of the parameters


def held(model: nn.Module) -> tuple[int, int]:
    """Return how many elements the parameters that are here have, and their bytes; a tied one counts once."""
    stored = {f"{path}.weight": weight for path, weight in stored_weights(model).items()}
    elements = size = 0
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        weight = stored.get(name)
        elements += local.numel() if weight is None else prod(weight.shape)
        size += local.nbytes if weight is None or weight.dtype is None else 0
        size += 0 if weight is None else sum(tensor.nbytes for tensor in weight.beside().values())
    return elements, size


def summarise(model: nn.Module, whole: int, sizes: tuple[int, ...], device: Any, policy: object) -> str:
    """Return the model, its policy, the mesh, and what this rank holds.

    Args:
        whole: elements of the parameters of the whole model.
        sizes: of tp, pp, dp and cp.
        policy: file of the policy, with a line or without.
    """
    tp, pp, dp, cp = sizes
    context = f" x cp {cp}" if cp > 1 else ""
    elements, size = held(model)
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

"""A plan as rows of a table: the rule of each tensor, and one row for tensors that differ in a block's number alone."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan

__all__ = ["ranges", "rows", "rule_of"]


def rule_of(plan: Plan, tensor: TensorPlan) -> str:
    """Name the rule of a tensor and its units: ``column heads | kv_heads``; ``replicated`` if every rank holds all."""
    for name in (tensor.name, *tensor.aliases):
        path, _, own = name.rpartition(".")
        module = plan.modules.get(path)
        if module is not None and own in module.layouts:
            return f"{module.rule or 'sharded'} {_units(module.layouts[own])}"
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

"""A plan as rows of a table: the rule of each tensor, and one row for tensors that differ in a block's number alone."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan

__all__ = ["ranges", "rows", "rule_of", "size"]


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
    """One row for entries that differ in a block's number alone: ``layers.0-3.up.weight``."""
    rows: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for entry in entries:
        number = re.search(r"(?<=\.)\d+(?=\.)", entry["name"])
        rest = {key: value for key, value in entry.items() if key not in ("name", "tied")}
        name = entry["name"] if number is None else f"{entry['name'][: number.start()]}*{entry['name'][number.end() :]}"
        rows.setdefault(f"{name} {json.dumps(rest)}", []).append((int(number.group()) if number else -1, entry))
    result = []
    for key, group in rows.items():
        shown = ",".join(ranges([number for number, _ in group]))
        result.append((key.split(" ", 1)[0].replace("*", shown, 1), group[0][1]))
    return result


def ranges(numbers: list[int]) -> list[str]:
    """``0-3`` for each run of numbers that follow one another."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return runs


def size(count: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"

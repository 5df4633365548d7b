"""Find policy rules that contradict each other, with a trace without data.

A layer with a wrong rule returns exactly the shard that the rule describes. A comparison finds the first difference
only later, in a layer that combines these features with different units. The trace of policy derivation shows which
features are computed together. They must be on the same rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autopar.distributed.rng import kept
from autopar.plan.plan import Plan
from autopar.tools.derivation.families import components
from autopar.tools.derivation.trace import Decisions, Names, Trace, block_lists, trace, traced

_Line = tuple[str, list[int], list[int]]


def contradicting_layers(model: nn.Module, plan: Plan) -> list[str]:
    """Return the layers whose shards have different units than most of the layers that they compute with.

    If two layers contradict each other, return both. If no or all layers do, or tracing fails, return an empty list.
    """
    try:
        with kept():
            lines = list(_lines(_trace(model, plan), plan))
    except Exception:  # a trace runs the model without data, and may fail for a correct model
        return []
    wrong = _contradicting(lines)
    return [] if len(wrong) == len({path for path, _, _ in lines}) else wrong


def _trace(model: Any, plan: Plan) -> Trace:
    """Trace the model with the columns of the plan."""
    models = traced(model)
    root = models[0].model
    if models[0].path:
        raise ValueError("the model is inside a module with unknown inputs")
    _, blocks = block_lists(root)
    names = Names(root, blocks)
    columns = [path for path, rule in plan.modules.items() if rule.rule == "column"]
    enters = [path for path, rule in plan.modules.items() if rule.enter_output]
    regions = [path for path, rule in plan.modules.items() if rule.rule == "region"]
    every = (path for path, _ in (*root.named_modules(), *root.named_parameters()))
    replicated = frozenset(map(names, every)) - frozenset(map(names, columns))
    return trace(models, blocks, Decisions(replicated, frozenset(map(names, enters)), frozenset(map(names, regions))))


def _lines(seen: Trace, plan: Plan) -> Iterator[_Line]:
    """Yield each sharded layer, with the unit and the rank of each feature. The ranks of replicated units are empty."""
    found: dict[str, torch.Tensor] = {path: components(seen, path) for path in seen.sources}
    found |= {path: seen.tracking.components.of(line) for path, line in seen.sinks.items()}
    for path, units in found.items():
        layout = plan.tensors[plan.canonical(f"{path}.weight")].layout
        if layout is None:
            continue
        if layout.replicated:
            yield path, units.tolist(), []
            continue
        ranks = [-1] * len(units)
        for rank in range(layout.axis_size):
            for start, stop in layout.ranges(rank):
                ranks[start:stop] = [rank] * (stop - start)
        yield path, units.tolist(), ranks


def _contradicting(lines: list[_Line]) -> list[str]:
    """Return the layers that split a unit over ranks, or place a unit on a different rank than most layers."""
    holders: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))  # unit -> layer -> ranks
    on_several = {unit for _, units, ranks in lines if not ranks for unit in units}
    for path, units, ranks in lines:
        for unit, rank in zip(units, ranks, strict=False):  # replicated units have no ranks
            if unit not in on_several:
                holders[unit][path].add(rank)
    wrong = {path for layers in holders.values() for path, ranks in layers.items() if len(ranks) > 1}
    others = set[str]()
    for layers in holders.values():
        places = {path: min(ranks) for path, ranks in layers.items() if path not in wrong}
        (most, count), *rest = Counter(places.values()).most_common() or [(-1, 0)]
        clear = not rest or count > rest[0][1]
        others |= {path for path, rank in places.items() if not (clear and rank == most)}
    return [path for path, _, _ in lines if path in wrong | others]

"""Rules of a policy that give a rank other units than the rules around them, found by a trace without data.

A layer that is sharded by a wrong rule returns exactly the shard that its rule describes, so a comparison finds the
first difference later, where its features meet another layer's. Features that meet, by the trace of policy derivation,
must lie on the same rank.
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
    """Return the layers whose shards hold other units than most layers that they compute with, or both of two layers.

    Empty if nothing contradicts, if all layers do, or if no trace of the model can be made.
    """
    try:
        with kept():
            lines = list(_lines(_trace(model, plan), plan))
    except Exception:  # a trace runs the model without data, and whatever that raises is not the user's mistake
        return []
    wrong = _contradicting(lines)
    return [] if len(wrong) == len({path for path, _, _ in lines}) else wrong


def _trace(model: Any, plan: Plan) -> Trace:
    """Trace the model with the columns of the plan."""
    models = traced(model)
    root = models[0].model
    if models[0].path:
        raise ValueError("the model is inside of another module, whose inputs are not known")
    _, blocks = block_lists(root)
    names = Names(root, blocks)
    columns = [path for path, rule in plan.modules.items() if rule.rule == "column"]
    enters = [path for path, rule in plan.modules.items() if rule.enter_output]
    regions = [path for path, rule in plan.modules.items() if rule.rule == "region"]
    every = (path for path, _ in (*root.named_modules(), *root.named_parameters()))
    whole = frozenset(map(names, every)) - frozenset(map(names, columns))
    return trace(models, blocks, Decisions(whole, frozenset(map(names, enters)), frozenset(map(names, regions))))


def _lines(seen: Trace, plan: Plan) -> Iterator[_Line]:
    """Yield each sharded layer, with the unit and the rank of each of its features; no ranks where several hold one."""
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
    """Return the layers that divide a unit among ranks, and those that do not place it where most layers do."""
    holders: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))  # unit -> layer -> ranks
    on_several = {unit for _, units, ranks in lines if not ranks for unit in units}
    for path, units, ranks in lines:
        for unit, rank in zip(units, ranks, strict=False):  # no ranks: several hold one
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

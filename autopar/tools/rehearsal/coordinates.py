"""Which ranks are rehearsed: of each axis the first, the last, and those whose shards have other shapes."""

from __future__ import annotations

import math

from autopar.distributed.mesh import rank_groups
from autopar.distributed.mesh_sizes import MeshSizes
from autopar.plan.plan import Plan

_FEW = 8  # places of tensor-parallel, context-parallel and data-parallel ranks, all of which are rehearsed


def coordinates_of(sizes: MeshSizes, experts: int) -> list[tuple[int, ...]]:
    """Return of every rank its place on (pp, cp, ep, tp, dp), what matters most first."""
    world = math.prod(sizes)
    groups = rank_groups(sizes, experts)
    places = [
        {rank: at for group in groups[name] for at, rank in enumerate(group)} for name in ("pp", "cp", "ep", "tp", "dp")
    ]
    return [tuple(place[rank] for place in places) for rank in range(world)]


def unlike_ranks(plan: Plan, size: int) -> list[int]:
    """Return the places on an axis whose shards have shapes of their own, the first and the last one."""
    held: dict[tuple[int, ...], int] = {}
    layouts = [tensor.layout for tensor in plan.tensors.values() if tensor.layout is not None]
    for place in range(size):
        shape = tuple(layout.local_size(place) for layout in layouts if layout.axis_size == size)
        held.setdefault(shape, place)
    return sorted({0, size - 1, *held.values()})


def casts(sizes: MeshSizes, experts: int, plan: Plan, *, chained: bool = False) -> list[list[int]]:
    """Return ranks that are rehearsed together: all stages at one place of the other axes.

    All axes are at their first places; then one after the other is at its last, so that each has a group with both;
    those between whose shards have other shapes, one at a time. Where places are few, all are rehearsed; where ranks
    are, together.

    Args:
        chained: context-parallel ranks hand states on: all of them are rehearsed together.
    """
    if math.prod(sizes) <= _FEW:
        return [list(range(math.prod(sizes)))]
    coordinates = coordinates_of(sizes, experts)
    by_place = {place: rank for rank, place in enumerate(coordinates)}
    tp = unlike_ranks(plan, sizes.tp) if sizes.tp > 1 else [0]
    dp = sorted({0, sizes.dp - 1} | ({*_ep_of(plan, sizes, experts)} if experts > sizes.tp else set()))
    first, last = (range(sizes.cp), range(sizes.cp)) if chained else (range(1), range(sizes.cp - 1, sizes.cp))
    if sizes.tp * sizes.cp * sizes.dp <= _FEW:
        contexts = [first] if chained else [range(c, c + 1) for c in range(sizes.cp)]
        chosen = [(c, t, d) for d in range(sizes.dp) for c in contexts for t in range(sizes.tp)]
    else:
        chosen = [(first, 0, 0), (first, 0, dp[-1]), (first, tp[-1], dp[-1]), (last, tp[-1], dp[-1])]
        chosen += [*((first, t, 0) for t in tp[1:-1]), *((first, 0, d) for d in dp[1:-1])]
    return [
        [by_place[_place(stage, c, t, d, sizes, experts)] for stage in range(sizes.pp) for c in places]
        for places, t, d in dict.fromkeys(chosen)
    ]


def _place(p: int, c: int, t: int, d: int, sizes: MeshSizes, experts: int) -> tuple[int, ...]:
    inner = max(experts // sizes.tp, 1)
    ep = (d % inner) * sizes.tp + t if experts > 1 else 0
    return p, c, ep, t, d


def _ep_of(plan: Plan, sizes: MeshSizes, experts: int) -> list[int]:
    """Return the innermost replicas whose experts are other ones in number than those of the first and the last."""
    inner = experts // sizes.tp
    return [place // sizes.tp for place in unlike_ranks(plan, experts) if 0 < place // sizes.tp < inner - 1]


def axes_of(sizes: MeshSizes, experts: int, zero: int) -> dict[tuple[int, ...], str]:
    """Return the axis of each group's ranks; where axes have the same ranks, the first of them.

    Args:
        zero: as in :func:`~autopar.distributed.mesh.rank_groups`.
    """
    groups = rank_groups(sizes, experts, zero)
    names = ("tp", "cp", "pp", "ep", "dp", "edp", "dp_cp", "edp_cp", "fsdp", "hsdp", "tp_cp", "tp_pp", "ep_pp", "model")
    return {tuple(ranks): name for name in reversed(names) for ranks in groups.get(name, ()) if len(ranks) > 1}

"""Split backward of a stage: first the gradients of what it received, later those of its weights.

The nodes of the graph from which something received can be reached are *on the way*. The first half runs along them
and notes the gradients that arrive at those with an edge to the side, to weights. The second half runs from there.
Edges that hang together by nodes beside the way (a weight that is used in several places, a table that all blocks add)
are one part of it, so that every gradient is counted once. A node with an edge to each side runs in both halves: a
function written in Python may use up what it saved, so with one of those the first half is the whole backward, unless
that function says that it ``keeps_nothing``. Hooks of tensors on the way may run twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar.foreign.tensors import forward_class, input_metadata

_Gradients = tuple[torch.Tensor | None, ...]


@dataclass
class WeightGradients:
    """The second half of a backward pass, which is still to run.

    Attributes:
        parts: edges from which it starts, their gradients, and the weights that it reaches.
        arrived: gradients that arrived at nodes in the first half.
    """

    parts: list[tuple[list[GradientEdge], list[torch.Tensor], list[torch.Tensor]]]
    arrived: dict[Node, _Gradients]


def stage_backward_input(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None, leaves: Sequence[torch.Tensor]
) -> WeightGradients:
    """Add the gradients of ``leaves`` to their ``grad``; None stays where no root depends on one.

    Where the halves cannot be told apart also those of the weights, and nothing is left for the second half.

    Args:
        roots: what is differentiated.
        gradients: of the roots, each of its shape; None: the roots are scalars.
        leaves: tensors that require gradients and were not computed from others.
    """
    if gradients is None:
        gradients = [torch.ones_like(root) for root in roots]
    edges = [get_gradient_edge(root) for root in roots]
    graph, on_way, starts = _way(edges, leaves)
    if any(_runs_once(node) for node in starts):
        torch.autograd.backward(roots, gradients)
        return WeightGradients([], {})
    arrived: dict[Node, _Gradients] = {}

    def note(node: Node) -> Callable[..., None]:
        def hook(arriving: _Gradients) -> None:
            arrived[node] = arriving

        return hook

    handles = [node.register_prehook(note(node)) for node in starts]
    try:
        along = [place for place, edge in enumerate(edges) if edge.node in on_way]
        if along:
            found = torch.autograd.grad(
                [roots[place] for place in along],
                list(leaves),
                [gradients[place] for place in along],
                retain_graph=True,
                allow_unused=True,
            )
            for leaf, gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    finally:
        for handle in handles:
            handle.remove()

    sources = [
        (GradientEdge(node, number), gradient)
        for node, arriving in arrived.items()
        for number, gradient in enumerate(arriving)
        if gradient is not None
    ]
    sources += [(edge, g) for edge, g in zip(edges, gradients, strict=True) if edge.node not in on_way]
    return WeightGradients(_parts(graph, on_way, sources), arrived)


def stage_backward_weight(rest: WeightGradients) -> None:
    """Add the gradients of the weights to their ``grad``. Once for each :func:`stage_backward_input`."""
    while rest.parts:
        edges, gradients, weights = rest.parts.pop()
        # From one node of a part the way may lead to another one, where the gradients have arrived already.
        nodes = {edge.node for edge in edges} & rest.arrived.keys()
        handles = [node.register_prehook(_replaced_by(rest.arrived[node])) for node in nodes]
        try:
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=weights)
        finally:
            for handle in handles:
                handle.remove()
    rest.arrived.clear()


class Halves(NamedTuple):
    """The state that a split backward leaves for its second half.

    Attributes:
        apart: whether the halves can be told apart; if not, the first one is all of it.
        rest: whether anything is left.
        freed: nodes of which nothing is left: those above all edges to the side.
        gradients: bytes of those that wait; at most, since some may be views of others.
    """

    apart: bool
    rest: bool
    freed: frozenset[Node]
    gradients: int


def backward_halves(roots: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> Halves:
    """Say what :func:`stage_backward_input` would leave; nothing is run. Arguments as there."""
    graph, _, starts = _way([get_gradient_edge(root) for root in roots], leaves)
    apart = not any(_runs_once(node) for node in starts)
    below = _nodes(starts) if apart else {}
    arriving = [each for node in starts for each in input_metadata(node)] if apart else []
    gradients = sum(prod(each.shape) * each.dtype.itemsize for each in arriving)
    return Halves(apart, bool(below), frozenset(graph.keys() - below.keys()), gradients)


def _way(
    edges: Sequence[GradientEdge], leaves: Sequence[torch.Tensor]
) -> tuple[dict[Node, list[Node]], set[Node], list[Node]]:
    """The graph, its nodes on the way to ``leaves``, and those of them that have an edge to the side."""
    entries = {get_gradient_edge(leaf).node for leaf in leaves}
    graph = _nodes(edge.node for edge in edges)
    on_way: set[Node] = set()
    for node, below in graph.items():
        if node in entries or not on_way.isdisjoint(below):
            on_way.add(node)
    return graph, on_way, [node for node in on_way if any(child not in on_way for child in graph[node])]


def _runs_once(node: Node) -> bool:
    return isinstance(node, BackwardCFunction) and not getattr(forward_class(node), "keeps_nothing", False)


def _replaced_by(arrived: _Gradients) -> Callable[..., Any]:
    return lambda _: arrived


def _nodes(starts: Iterable[Node]) -> dict[Node, list[Node]]:
    """Every node that can be reached, with the next ones; these come before it."""
    found: dict[Node, list[Node]] = {}
    opened: dict[Node, list[Node]] = {}
    todo = list(starts)
    while todo:
        node = todo[-1]
        if node in found:
            todo.pop()
        elif node in opened:
            found[node] = opened[node]
            todo.pop()
        else:
            opened[node] = [child for child, _ in node.next_functions if child is not None]
            todo += [child for child in opened[node] if child not in opened]
    return found


def _parts(
    graph: dict[Node, list[Node]], on_way: set[Node], sources: list[tuple[GradientEdge, torch.Tensor]]
) -> list[tuple[list[GradientEdge], list[torch.Tensor], list[torch.Tensor]]]:
    """Sources that lead to the same weights together; all parts of several sources in one, which walks the way once."""
    heads: dict[Node, Node] = {}

    def head(node: Node) -> Node:
        while (above := heads.setdefault(node, node)) is not node:
            heads[node] = node = heads[above]
        return node

    for node, below in graph.items():
        for child in below:
            if child not in on_way:
                heads[head(child)] = head(node)
    weights: dict[Node, list[torch.Tensor]] = {}
    for node in graph:
        if node not in on_way and node.name() == "torch::autograd::AccumulateGrad":
            weights.setdefault(head(node), []).append(node.variable)  # type: ignore[attr-defined]
    parts: dict[Node, tuple[list[GradientEdge], list[torch.Tensor], list[torch.Tensor]]] = {}
    for edge, gradient in sources:
        if (at := head(edge.node)) in weights:
            part = parts.setdefault(at, ([], [], weights[at]))
            part[0].append(edge)
            part[1].append(gradient)
    several = [part for part in parts.values() if len({edge.node for edge in part[0]}) > 1]
    single = [part for part in parts.values() if len({edge.node for edge in part[0]}) == 1]
    joined = tuple(list(itertools.chain.from_iterable(each)) for each in zip(*several, strict=True))
    return [*single, joined] if several else single  # type: ignore[list-item]

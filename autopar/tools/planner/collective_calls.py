"""The collectives of one forward and its backward, read from autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from autopar.foreign.autograd import input_metadata

__all__ = ["Collective", "collectives_of"]


class Collective(NamedTuple):
    """One call of a collective over tp or cp.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        bytes: of the whole tensor.
        backward: whether the backward makes it.
        axis: ``tp`` or ``cp``.
    """

    kind: str
    bytes: int
    backward: bool
    axis: str = "tp"


# Name of the node -> collective of its forward, of its backward.
_NODES = {
    "_CopyBackward": (None, "all_reduce"),
    "_ReduceBackward": ("all_reduce", None),
    "_ReduceInPlaceBackward": ("all_reduce", None),
    "_GatherBackward": ("all_gather", None),
    "_ScatterBackward": (None, "all_gather"),
    "_GatherSumBackward": ("all_gather", "reduce_scatter"),
    "_ReduceScatterBackward": ("reduce_scatter", "all_gather"),
    "_AllToAllBackward": ("all_to_all", "all_to_all"),
    "_ExchangeBackward": ("all_to_all", "all_to_all"),
    "_SumReplicasBackward": (None, "all_reduce"),
}


def collectives_of(
    outputs: Iterable[torch.Tensor], inputs: Collection[torch.Tensor] = (), nodes: Iterable[Any] = ()
) -> list[Collective]:
    """Return the collectives between ``inputs`` and ``outputs``, in the order of the backward.

    Args:
        inputs: leaves, or outputs of what is counted elsewhere.
        nodes: of the graph, of such outputs.
    """
    ends = {*nodes, *(tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None)}
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(ends)
    again: set[int] = set()  # sequences that several weights read, gathered once
    found: list[Collective] = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        rows = getattr(node.whole, "__self__", None) if node.name() == "LateWeightBackward" else None
        if rows is not None and id(rows) not in again:
            again.add(id(rows))
            found.append(_gathered_again(node, rows))
        found += _calls(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _gathered_again(node: Any, again: Any) -> Collective:
    """The rows that a weight's gradient reads, whole."""
    [rows] = node.saved_tensors
    layout, axis = again.layout, again.axis
    size = rows.numel() // layout.local_size(axis.rank) * layout.size * rows.dtype.itemsize
    return Collective("all_gather", size, backward=True, axis=axis.name)


def _calls(node: Any) -> Iterator[Collective]:
    forward, backward = _NODES.get(node.name(), (None, None))
    if forward is None and backward is None:
        return
    [of] = input_metadata(node)  # of the forward's output
    shape = list(of.shape)
    layout = getattr(node, "layout", None)
    if layout is not None:  # of gather, scatter and weights with replicated units: the whole dim
        shape[getattr(node, "dim", layout.dim)] = layout.size
    elif "Scatter" in node.name() and node.name() != "_ScatterBackward":
        shape[node.dim] *= node.axis.size
    size = prod(shape) * of.dtype.itemsize
    axis = getattr(getattr(node, "axis", None), "name", "tp")
    if forward is not None:
        yield Collective(forward, size, backward=False, axis=axis)
    if backward is not None:
        yield Collective(backward, size, backward=True, axis=axis)

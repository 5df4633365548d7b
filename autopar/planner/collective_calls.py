"""The collectives of one forward and its backward, read from autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch

__all__ = ["Collective", "collectives_of"]


class Collective(NamedTuple):
    """One call of a collective over tp.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        bytes: of the whole tensor.
        backward: whether the backward makes it.
    """

    kind: str
    bytes: int
    backward: bool


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
    "_SumReplicasBackward": (None, "all_reduce"),
}


def collectives_of(outputs: Iterable[torch.Tensor], inputs: Collection[torch.Tensor] = ()) -> list[Collective]:
    """Return the collectives between ``inputs`` and ``outputs``, in the order of the backward.

    Args:
        inputs: leaves, or outputs of what is counted elsewhere.
    """
    ends = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(ends)
    found: list[Collective] = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        found += _calls(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _calls(node: Any) -> Iterator[Collective]:
    forward, backward = _NODES.get(node.name(), (None, None))
    if forward is None and backward is None:
        return
    [of] = node._input_metadata  # of the forward's output
    shape = list(of.shape)
    layout = getattr(node, "layout", None)
    if layout is not None:  # of gather, scatter and weights with replicated units: the whole dim
        shape[getattr(node, "dim", layout.dim)] = layout.size
    elif "Scatter" in node.name() and node.name() != "_ScatterBackward":
        shape[node.dim] *= node.axis.size
    size = prod(shape) * of.dtype.itemsize
    if forward is not None:
        yield Collective(forward, size, backward=False)
    if backward is not None:
        yield Collective(backward, size, backward=True)

"""Memory and work of one forward, unit by unit; its collectives and its backward's, read from autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch

from autopar.foreign.tensors import input_metadata, sequence_number
from autopar.tools.planner.storages import Operation


class Collective(NamedTuple):
    """One call of a collective over tp, cp or ep.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        bytes: of the whole tensor.
        backward: whether the backward makes it.
        axis: ``tp``, ``cp``, or ``ep``, of experts that replicas share.
        again: whether it is made again where its block is recomputed, which ends at the last tensor that is saved.
    """

    kind: str
    bytes: int
    backward: bool
    axis: str = "tp"
    again: bool = True


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

_LOSSES = ("VocabParallelCrossEntropyBackward", "ChunkedCrossEntropyBackward")


def collectives_of(
    outputs: Iterable[torch.Tensor],
    inputs: Collection[torch.Tensor] = (),
    nodes: Iterable[Any] = (),
    last: int | None = None,
) -> list[Collective]:
    """Return the collectives between ``inputs`` and ``outputs``, in the order of the backward.

    Args:
        inputs: leaves, or outputs of what is counted elsewhere.
        nodes: of the graph, of such outputs.
        last: sequence number of the last node that saved a tensor; None: it is not known.
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
        late = last is not None and sequence_number(node) > last
        found += [call._replace(again=not late) for call in _calls(node)]
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _gathered_again(node: Any, again: Any) -> Collective:
    """The rows that a weight's gradient reads, whole."""
    [rows] = node.saved_tensors
    layout, axis = again.layout, again.axis
    size = rows.numel() // layout.local_size(axis.rank) * layout.size * rows.dtype.itemsize
    return Collective("all_gather", size, backward=True, axis=axis.name)


def _statistics(node: Any) -> Collective:
    """Return the exchange of a loss of sharded logits: three numbers of each token, and the width of the shard."""
    [of] = input_metadata(node)  # [tokens]
    chunked = "Chunked" in node.name()
    axis = node.shards.axis if chunked else node.axis
    kinds = 4 if (node.smoothing if chunked else node.label_smoothing) else 3
    size = axis.size * (kinds * prod(of.shape) + 1) * of.dtype.itemsize
    return Collective("all_gather", size, backward=False, axis=axis.name)


def _calls(node: Any) -> Iterator[Collective]:
    if node.name() in _LOSSES:
        yield _statistics(node)
    if node.name() == "_SumRowsBackward":  # gradients of a block's parameters that work on rows: at once by dtype
        widths = [(of.dtype.itemsize, prod(of.shape) * of.dtype.itemsize) for of in input_metadata(node)]
        for width in {width for width, _ in widths}:
            size = sum(size for own, size in widths if own == width)
            yield Collective("all_reduce", size, backward=True, axis=node.axis.name)
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


@dataclass(frozen=True)
class Unit:
    """Memory and work of one block, or of the modules before, between or behind the blocks.

    Attributes:
        saved: number of a storage -> its bytes: what autograd keeps.
        late: what is left of that, where the gradient of its input has been computed and those of its weights have not;
            None: it has no weights, or both are computed at once (``halves``).
        halves: whether the two can be computed one after the other.
        gradients: bytes of those that wait between them.
        arguments: as ``saved``, what the block was called with: all that is kept of a block that is recomputed.
        remembered: as ``saved``, what a recomputed block keeps beside (``activation_checkpointing.save``).
        outputs: as ``saved``, what it returns.
        forward_peak, backward_peak: the most bytes beside ``saved`` while it runs forward, and backward.
        operations: of the forward.
        again: those of them that a recomputation makes.
        collectives: over tp, of forward and backward.
        sends_again: whether a recomputation makes those of the forward.
        recomputed: whether activation checkpointing recomputes it.
    """

    saved: Mapping[int, int] = field(default_factory=dict)
    late: Mapping[int, int] | None = None
    halves: bool = True
    gradients: int = 0
    arguments: Mapping[int, int] = field(default_factory=dict)
    remembered: Mapping[int, int] = field(default_factory=dict)
    outputs: Mapping[int, int] = field(default_factory=dict)
    forward_peak: int = 0
    backward_peak: int = 0
    operations: Sequence[Operation] = ()
    again: Sequence[Operation] = ()
    collectives: Sequence[Collective] = ()
    sends_again: bool = True
    recomputed: bool = False

    @property
    def output(self) -> int:
        """Bytes of what it returns."""
        return sum(self.outputs.values())

    def followed_by(self, other: Unit) -> Unit:
        """Return both as one."""
        late = self.late if other.late is None else {**self.saved, **other.late}
        return Unit(
            {**self.saved, **other.saved},
            late,
            self.halves and other.halves,
            self.gradients + other.gradients,
            {**self.arguments, **other.arguments},
            {**self.remembered, **other.remembered},
            other.outputs,
            max(self.forward_peak, other.forward_peak),
            max(self.backward_peak, other.backward_peak),
            [*self.operations, *other.operations],
            [*self.again, *other.again],
            [*self.collectives, *other.collectives],
            self.sends_again and other.sends_again,
            self.recomputed and other.recomputed,
        )

    def renumbered(self, numbers: Mapping[int, int]) -> Unit:
        """Return the same of other storages: ``numbers`` are their new ones."""

        def renamed(sizes: Mapping[int, int]) -> dict[int, int]:
            return {numbers.get(number, number): size for number, size in sizes.items()}

        late = None if self.late is None else renamed(self.late)
        return replace(
            self,
            saved=renamed(self.saved),
            late=late,
            arguments=renamed(self.arguments),
            remembered=renamed(self.remembered),
            outputs=renamed(self.outputs),
        )


@dataclass
class ForwardCount:
    """One forward of one tp rank's shard, with what its loss keeps.

    Attributes:
        elements: :class:`Unit` of each element of the stage plan that was called, by its place; of an encoder, what it
            does behind its blocks.
        before, after: what runs before the first element, and behind the last one: the head, the loss.
        fronts: what runs in front of other elements, behind the one before.
        encoder: place of the encoder, whose output all later stages get.
        has_loss: whether the model made a loss of the labels.
    """

    elements: dict[int, Unit]
    before: Unit
    after: Unit
    has_loss: bool
    fronts: dict[int, Unit] = field(default_factory=dict)
    encoder: int | None = None

    def units(self) -> list[Unit]:
        """Return all units in the order of the forward."""
        return self.of_stage(range(max(self.elements, default=-1) + 1), first=True, last=True)

    def of_stage(self, places: Sequence[int], *, first: bool, last: bool) -> list[Unit]:
        """Return the units of a stage with these elements, in the order of the forward."""
        row = [self.before] if first else []
        for place in places:
            row += [units[place] for units in (self.fronts, self.elements) if place in units]
        return [*row, self.after] if last else row

    def sent(self, places: Sequence[int]) -> dict[int, int]:
        """Return what a stage that ends with these elements sends on: number of a storage -> its bytes."""
        called = [place for place in places if place in self.elements]
        found = dict(self.elements[called[-1]].outputs) if called else {}
        if self.encoder is not None and self.encoder in self.elements and places and self.encoder <= places[-1]:
            found.update(self.elements[self.encoder].outputs)
        return found

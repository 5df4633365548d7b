"""Compute the memory and work of each unit of a forward, and the costs of a micro-batch in a stage. Pure functions.

The collectives of a unit's forward and backward are read from the autograd graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

from autopar.compat.tensors import input_metadata, sequence_number
from autopar.layout import Layout
from autopar.pipeline_parallel.schedule import Action
from autopar.plan.stages import StagePlan
from autopar.tools.planner.candidate import Rows
from autopar.tools.planner.hardware import Gpu, Node
from autopar.tools.planner.network import DATA, Group
from autopar.tools.planner.storages import Operation


class Collective(NamedTuple):
    """One call of a collective over tp, cp or ep.

    Attributes:
        bytes: The bytes of the full tensor.
        backward: A flag, set for a call of the backward.
        again: A flag, set for a call that a recomputation repeats. Recomputation stops at the last saved tensor.
    """

    kind: str
    bytes: int
    backward: bool
    axis: str = "tp"
    again: bool = True


# Name of an autograd node -> collectives of its forward and backward.
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
    outputs: Iterable[torch.Tensor],
    inputs: Collection[torch.Tensor] = (),
    nodes: Iterable[Any] = (),
    last: int | None = None,
) -> list[Collective]:
    """Return the collectives between ``inputs`` (or ``nodes`` of the graph) and ``outputs``, in backward order.

    Args:
        last: The sequence number of the last node that saved a tensor; None if unknown.
    """
    ends = {*nodes, *(tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None)}
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(ends)
    again: set[int] = set()  # sequences that are gathered once for several weights
    found: list[Collective] = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        rows = getattr(node.full, "__self__", None) if node.name() == "LateWeightBackward" else None
        if rows is not None and id(rows) not in again:
            again.add(id(rows))
            [read] = node.saved_tensors  # gathered for the gradient of the weight
            size = read.numel() // rows.layout.local_size(rows.axis.rank) * rows.layout.size * read.dtype.itemsize
            found.append(Collective("all_gather", size, backward=True, axis=rows.axis.name))
        late = last is not None and sequence_number(node) > last
        found += [call._replace(again=not late) for call in _calls(node)]
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _calls(node: Any) -> Iterator[Collective]:
    if node.name() == "ShardedCrossEntropyBackward":
        [of] = input_metadata(node)  # [tokens]
        kinds = 4 if node.smoothing else 3  # numbers per token; and the width of the shard
        size = node.axis.size * (kinds * prod(of.shape) + 1) * of.dtype.itemsize
        yield Collective("all_gather", size, backward=False, axis=node.axis.name)
    if node.name() == "_SumRowsBackward":  # gradients of sequence-parallel parameters: one call per dtype
        sizes = Counter[int]()
        for of in input_metadata(node):
            sizes[of.dtype.itemsize] += prod(of.shape) * of.dtype.itemsize
        yield from (Collective("all_reduce", sizes[width], True, node.axis.name) for width in {*sizes})
    if node.name() not in _NODES:
        return
    [of] = input_metadata(node)  # the forward's output
    shape = list(of.shape)
    args = getattr(node, "args", ())
    layout = next((each for each in args if isinstance(each, Layout)), getattr(node, "layout", None))
    if layout is not None:  # gathers, scatters and weights with replicated units use the full dim
        shape[next((each for each in args if isinstance(each, int)), getattr(node, "dim", layout.dim))] = layout.size
    size = prod(shape) * of.dtype.itemsize
    axis = getattr(getattr(node, "axis", None), "name", "tp")
    for backward, kind in enumerate(_NODES[node.name()]):
        if kind is not None:
            yield Collective(kind, size, bool(backward), axis)


@dataclass(frozen=True)
class Unit:
    """Memory and work of one block, or of the modules before, between or after the blocks.

    Attributes:
        saved: The storages saved by autograd: number -> bytes. Other mappings have the same form.
        late: The saved storages between the halves of a split backward; None: no weights, or no split.
        halves: A flag, set if the backward can be split into gradients of inputs and gradients of weights.
        gradients: The bytes of gradients that wait between the halves.
        arguments: The storages of the block's arguments, which a recomputed block keeps.
        remembered: The additional storages that a recomputed block keeps (``activation_checkpointing.save``).
        forward_peak, backward_peak: The peak bytes in addition to ``saved``.
        operations, again: The operations of the forward, and of its recomputation, each with its number of calls.
        sends_again: A flag, set if a recomputation repeats the forward's collectives.
        number: The place among the blocks that activation checkpointing may recompute, or None.
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
    operations: Counter[Operation] = field(default_factory=Counter)
    again: Counter[Operation] = field(default_factory=Counter)
    collectives: Sequence[Collective] = ()
    sends_again: bool = True
    number: int | None = None

    def recomputed(self, every: int) -> bool:
        """Return whether the block is recomputed, if one of ``every`` blocks is; 0: no block."""
        return every > 0 and self.number is not None and self.number % every == 0

    def followed_by(self, other: Unit) -> Unit:
        """Return the unit of both, one after the other."""
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
            self.operations + other.operations,
            self.again + other.again,
            [*self.collectives, *other.collectives],
            self.sends_again and other.sends_again,
            self.number if self.number == other.number else None,
        )


@dataclass
class ForwardCount:
    """The count of one forward of one rank's shard.

    Attributes:
        elements: The :class:`Unit` of each called element of the stage plan, by place. The unit of an encoder is its
            code after its blocks.
        before, after: The code before the first element, and after the last element: the head and the loss.
        fronts: The code between each element and the previous element.
        encoder: The place of the encoder, whose output all later stages receive.
    """

    elements: dict[int, Unit]
    before: Unit
    after: Unit
    fronts: dict[int, Unit]
    encoder: int | None

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
        """Return number -> bytes of the storages that a stage with these elements sends to the next stage."""
        called = [place for place in places if place in self.elements]
        found = dict(self.elements[called[-1]].outputs) if called else {}
        if self.encoder is not None and self.encoder in self.elements and places and self.encoder <= places[-1]:
            found.update(self.elements[self.encoder].outputs)
        return found


_ATTENTION_BACKWARD = 2.5  # five matmuls instead of two, because the scores are recomputed
_ELEMENTWISE_BACKWARD = 1.5  # reads the gradient and the saved tensor


class Travel(NamedTuple):
    """Collectives over one axis in one micro-batch: seconds, and the bytes that one rank sends."""

    forward: float
    backward: float
    bytes: int


@dataclass(frozen=True)
class StageCost:
    """Costs of one micro-batch in one stage.

    Attributes:
        kept: The bytes that wait for the backward: saved tensors and the ``output``.
        late: The bytes of ``kept`` that remain between the halves of a split backward.
        logits, late_logits: The bytes of the head and the loss in ``kept`` and ``late``.
        forward_work, backward_work: The peak temporary bytes.
        forward, backward_input, backward_weight: The seconds without collectives.
        travel: The costs of collectives over ``tp``, ``cp`` and ``ep``.
        flops: The FLOPs of matmuls, without recomputation.
        recomputed: A flag, set if a block is recomputed. The first half of a backward is then the full backward.
    """

    kept: int
    late: int
    gradients: int
    logits: int
    late_logits: int
    output: int
    forward_work: int
    backward_work: int
    forward: float
    backward_input: float
    backward_weight: float
    travel: Mapping[str, Travel]
    flops: int
    recomputed: bool

    def time_of(self, action: Action) -> float:
        """Return the seconds of an action."""
        of_input = self.backward_input + sum(each.backward for each in self.travel.values())
        if action.kind == "F":
            return self.forward + sum(each.forward for each in self.travel.values())
        if action.kind == "W":
            return 0.0 if self.recomputed else self.backward_weight
        return of_input if action.kind == "I" and not self.recomputed else of_input + self.backward_weight

    @property
    def alone(self) -> float:
        """The seconds of forward and backward without collectives."""
        return self.forward + self.backward_input + self.backward_weight


def stage_costs(
    count: ForwardCount, stages: StagePlan, node: Node, *, precision: str, rows: Rows, every: int
) -> list[StageCost]:
    """Return the costs of each stage. One of ``every`` blocks is recomputed; 0: no block."""
    costs = []
    for stage in range(stages.stages):
        places = range(stages.bounds[stage], stages.bounds[stage + 1])
        first, last = stage == 0, stage == stages.stages - 1
        row = count.of_stage(places, first=first, last=last)
        sent = {} if last else count.sent(places)
        memory = _Memory(row, sent, every)
        # The first stage has no gradient of the input, so its backward runs in the second half.
        halves = not first and all(unit.halves for unit in row)
        late = [*memory.own, memory.sent] if first else memory.late() if halves else [0] * (len(row) + 1)
        own = [_work(unit.operations, node.gpu, precision) for unit in row]
        again = [unit for unit in row if unit.recomputed(every)]
        calls = [call for unit in row for call in unit.collectives]
        sending = [unit for unit in again if unit.sends_again]
        repeated = [call for unit in sending for call in unit.collectives if call.again and not call.backward]
        costs.append(
            StageCost(
                kept=memory.kept,
                late=sum(late),
                gradients=sum(unit.gradients for unit in row) if halves else 0,
                logits=memory.own[-1] if last else 0,
                late_logits=late[-2] if last else 0,
                output=sum(sent.values()),
                forward_work=memory.forward_work,
                backward_work=memory.backward_work,
                forward=sum(work.forward for work in own),
                backward_input=sum(work.of_input for work in own)
                + sum(_work(unit.again, node.gpu, precision).forward for unit in again),
                backward_weight=sum(work.of_weight for work in own),
                travel=travel_over(rows, node, calls, repeated),
                flops=sum(work.flops for work in own),
                recomputed=bool(again),
            )
        )
    return costs


def travel_over(
    rows: Rows, node: Node, calls: Sequence[Collective], repeated: Sequence[Collective] = ()
) -> dict[str, Travel]:
    """Return the costs of ``calls`` over tp, cp and ep. ``repeated`` calls count in the backward.

    Ranks are numbered by tp first, then cp, then replicas. So tp stays within a node, and cp and ep do if they fit.
    """
    on_node = min(rows.ep, rows.tp * max(1, node.gpus // (rows.tp * rows.cp)))  # ep ranks per node
    groups = {
        "tp": Group.of(rows.tp, 1, node.gpus),
        "cp": Group.of(rows.cp, rows.tp, node.gpus),
        "ep": Group(rows.ep, -(-rows.ep // on_node)),
    }
    found = dict.fromkeys(groups, Travel(0.0, 0.0, 0))
    for call in [*calls, *(call._replace(backward=True) for call in repeated)]:
        (forward, backward, size), group = found[call.axis], groups[call.axis]
        seconds, sent = node.network.seconds(call.kind, call.bytes, group), group.sent(call.kind, call.bytes)
        times = (forward, backward + seconds) if call.backward else (forward + seconds, backward)
        found[call.axis] = Travel(*times, size + sent)
    return found


class _Memory:
    """Memory of a stage's units: kept storages, each counted once, and peaks.

    Args:
        sent: The storages that the stage sends to the next stage, and keeps until the backward.

    Attributes:
        own: The bytes that each unit keeps in addition to the units before it.
    """

    def __init__(self, units: Sequence[Unit], sent: Mapping[int, int], every: int) -> None:
        self._units = units
        known: dict[int, int] = {}
        self.own: list[int] = []
        forward = backward = held = 0
        for unit in units:
            again = unit.recomputed(every)
            kept = {**unit.arguments, **unit.remembered} if again else unit.saved
            self.own.append(_add(known, kept))
            held += self.own[-1]
            recomputed = sum(size for key, size in unit.saved.items() if key not in known) if again else 0
            # An upper bound: the first forward of a recomputed block runs without gradients.
            forward = max(forward, held + (sum(unit.outputs.values()) if again else 0) + unit.forward_peak)
            backward = max(backward, held + recomputed + unit.backward_peak)
        self.forward_work = max(forward - held, 0)
        self.backward_work = max(backward - held, 0)
        self.sent = _add(known, sent)
        self.kept = held + self.sent

    def late(self) -> list[int]:
        """Return the bytes of each unit, and of the output as last item, between the halves of a backward."""
        known: dict[int, int] = {}
        found = [0] * (len(self._units) + 1)
        last = max((place for place, unit in enumerate(self._units) if unit.late is not None), default=-1)
        for place, unit in enumerate(self._units[: last + 1]):
            found[place] = _add(known, unit.saved if place < last or unit.late is None else unit.late)
        return found


def _add(known: dict[int, int], sizes: Mapping[int, int]) -> int:
    """Add storages to ``known``, and return the bytes of new storages."""
    new = {number: size for number, size in sizes.items() if number not in known}
    known.update(new)
    return sum(new.values())


class _Work(NamedTuple):
    """Seconds of the forward and of the gradients of inputs and weights, and FLOPs of all matmuls."""

    forward: float
    of_input: float
    of_weight: float
    flops: int


def _work(operations: Counter[Operation], gpu: Gpu, precision: str) -> _Work:
    forward = of_input = of_weight = 0.0
    for operation, calls in operations.items():
        time, flops = calls * seconds_of(operation, gpu, precision), operation.flops
        forward += time
        of_input += time * (_ATTENTION_BACKWARD if operation.attention else 1.0 if flops else _ELEMENTWISE_BACKWARD)
        of_weight += time if flops and not operation.attention and not operation.frozen else 0.0
    return _Work(forward, of_input, of_weight, sum(calls * each.in_all for each, calls in operations.items()))


_ASSUMED = DATA["assumed"]


def seconds_of(operation: Operation, gpu: Gpu, precision: str) -> float:
    """Return the seconds of an operation, from its FLOPs and its moved bytes, but at least the launch time.

    For small matmuls the moved bytes take a larger share of the time.
    """
    fast = gpu.peak(precision) * gpu.products * _ASSUMED["products"]
    products = operation.flops / (fast * (_ASSUMED["attention"] if operation.attention else 1.0))
    return float(max(products + operation.moved / (gpu.bandwidth * _ASSUMED["stream"]), _ASSUMED["launch"] * 1e-6))

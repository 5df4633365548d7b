"""The costs of one micro-batch in one stage: memory, time and bytes that travel. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.pipeline_parallel.schedule import Action
from autopar.plan.stages import StagePlan
from autopar.tools.planner.candidate import Rows
from autopar.tools.planner.collective_calls import Collective
from autopar.tools.planner.hardware import Gpu
from autopar.tools.planner.storages import Operation
from autopar.tools.planner.units import ForwardCount, Unit

__all__ = ["StageCost", "collective_time", "stage_costs", "volume"]

_ATTENTION_BACKWARD = 2.5  # five products instead of two: the scores are computed again
_ELEMENTWISE_BACKWARD = 1.5  # the gradient and what was saved are read


@dataclass(frozen=True)
class StageCost:
    """One micro-batch in one stage.

    Attributes:
        kept: bytes that wait for the backward: what autograd has saved, and what is sent on.
        late: what is left of that between the halves of a split backward.
        gradients: bytes of those that wait beside ``late``.
        logits, late_logits: bytes of the head and the loss among them.
        output: bytes that are sent on.
        forward_work, backward_work: the most bytes beside what waits, while it runs.
        forward, backward_input, backward_weight: seconds, without collectives.
        forward_tp, backward_tp: seconds of the collectives over tp; ``forward_cp``, ``backward_cp``: over cp.
        tp_bytes, cp_bytes: that one rank sends for them.
        flops: of products, without what is computed again.
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
    forward_tp: float
    backward_tp: float
    forward_cp: float
    backward_cp: float
    tp_bytes: int
    cp_bytes: int
    flops: int

    def time_of(self, action: Action, *, recomputed: bool) -> float:
        """Return the seconds of an action. With recomputation the first half of a backward is all of it."""
        whole_input = self.backward_input + self.backward_tp + self.backward_cp
        if action.kind == "F":
            return self.forward + self.forward_tp + self.forward_cp
        if action.kind == "W":
            return 0.0 if recomputed else self.backward_weight
        if action.kind == "I" and not recomputed:
            return whole_input
        return whole_input + self.backward_weight


class _Blocks:
    """Times and operations of units, once for equal blocks: they have the same list."""

    def __init__(self, gpu: Gpu, precision: str) -> None:
        self._gpu, self._precision = gpu, precision
        self._times: dict[int, _Times] = {}
        self._flops: dict[int, int] = {}

    def times(self, unit: Unit) -> _Times:
        key = id(unit.operations)
        if key not in self._times:
            self._times[key] = _times(unit.operations, self._gpu, self._precision)
        return self._times[key]

    def flops(self, unit: Unit) -> int:
        key = id(unit.operations)
        if key not in self._flops:
            self._flops[key] = sum(operation.flops for operation in unit.operations)
        return self._flops[key]


def stage_costs(
    count: ForwardCount,
    stages: StagePlan,
    gpu: Gpu,
    *,
    precision: str,
    rows: Rows,
    gpus_per_node: int,
    checkpointing: bool,
) -> list[StageCost]:
    """Return the costs of each stage.

    Args:
        gpus_per_node: tp stays within a node, and cp does where there is room.
    """
    network, blocks = _Network(rows, gpu, gpus_per_node), _Blocks(gpu, precision)
    costs = []
    for stage in range(stages.stages):
        places = range(stages.bounds[stage], stages.bounds[stage + 1])
        first, last = stage == 0, stage == stages.stages - 1
        row = count.of_stage(places, first=first, last=last)
        sent = {} if last else count.sent(places)
        memory = _Memory(row, sent, checkpointing)
        late = memory.late(split=not first)
        forward, backward_input, backward_weight = (sum(blocks.times(unit)[kind] for unit in row) for kind in range(3))
        again = sum(blocks.times(unit).forward for unit in row if unit.recomputed) if checkpointing else 0.0
        calls = [call for unit in row for call in unit.collectives]
        repeated = [c for u in row if u.recomputed for c in u.collectives if not c.backward] if checkpointing else []
        forward_calls = [call for call in calls if not call.backward]
        backward_calls = [*repeated, *(call for call in calls if call.backward)]
        costs.append(
            StageCost(
                kept=memory.kept,
                late=sum(late),
                gradients=memory.gradients(split=not first),
                logits=memory.own[-1] if last else 0,
                late_logits=late[-2] if last else 0,
                output=sum(sent.values()),
                forward_work=memory.forward_work,
                backward_work=memory.backward_work,
                forward=forward,
                backward_input=backward_input + again,
                backward_weight=backward_weight,
                forward_tp=network.seconds(forward_calls, "tp"),
                backward_tp=network.seconds(backward_calls, "tp"),
                forward_cp=network.seconds(forward_calls, "cp"),
                backward_cp=network.seconds(backward_calls, "cp"),
                tp_bytes=network.sent([*calls, *repeated], "tp"),
                cp_bytes=network.sent([*calls, *repeated], "cp"),
                flops=sum(3 * blocks.flops(unit) for unit in row),
            )
        )
    return costs


class _Network:
    """The network under tp and cp: seconds and bytes of collectives."""

    def __init__(self, rows: Rows, gpu: Gpu, gpus_per_node: int) -> None:
        self._sizes = {"tp": rows.tp, "cp": rows.cp}
        within = rows.tp * rows.cp <= gpus_per_node
        cp = gpu.within if within else min(gpu.within, gpu.between * max(1, gpus_per_node // rows.tp))
        self._speed = {"tp": gpu.within * gpu.network, "cp": cp * gpu.network}
        self._latency = gpu.latency

    def seconds(self, calls: Sequence[Collective], axis: str) -> float:
        size, speed = self._sizes[axis], self._speed[axis]
        return sum(collective_time(call, size, speed, self._latency) for call in calls if call.axis == axis)

    def sent(self, calls: Sequence[Collective], axis: str) -> int:
        return sum(volume(call.kind, call.bytes, self._sizes[axis]) for call in calls if call.axis == axis)


class _Memory:
    """Memory of a stage's units: the storages that they keep, each once, and their peak while they run.

    Args:
        sent: what the stage sends on, and holds until the backward.

    Attributes:
        own: bytes that each unit keeps and none before it.
    """

    def __init__(self, units: Sequence[Unit], sent: Mapping[int, int], checkpointing: bool) -> None:
        self._units, self._checkpointing = units, checkpointing
        known: dict[int, int] = {}
        self.own: list[int] = []
        forward = backward = held = 0
        for unit in units:
            again = checkpointing and unit.recomputed
            self.own.append(_add(known, _kept(unit, again)))
            held += self.own[-1]
            recomputed = sum(size for key, size in unit.saved.items() if key not in known) if again else 0
            # Without gradients, as the first forward of a recomputed block is, less than this is alive.
            forward = max(forward, held + (unit.output if again else 0) + unit.forward_peak)
            backward = max(backward, held + recomputed + unit.backward_peak)
        self.forward_work = max(forward - held, 0)
        self.backward_work = max(backward - held, 0)
        self.sent = _add(known, sent)
        self.kept = held + self.sent

    def late(self, *, split: bool) -> list[int]:
        """Return what each unit, and behind them what is sent, keeps between the halves of a backward.

        Args:
            split: whether the first half computes anything; in the first stage the second half is all of it.
        """
        if not split:
            return [*self.own, self.sent]
        if not all(unit.halves for unit in self._units):
            return [0] * (len(self.own) + 1)
        known: dict[int, int] = {}
        found = []
        last = max((place for place, unit in enumerate(self._units) if unit.late is not None), default=-1)
        for place, unit in enumerate(self._units):
            left = {} if place > last else unit.saved if place < last or unit.late is None else unit.late
            found.append(_add(known, left))
        return [*found, 0]

    def gradients(self, *, split: bool) -> int:
        """Return the bytes of the gradients that wait between the halves of a backward, at most."""
        both = split and all(unit.halves for unit in self._units)
        return sum(unit.gradients for unit in self._units) if both else 0


def _add(known: dict[int, int], sizes: Mapping[int, int]) -> int:
    """Add storages to those that are known; return the bytes of the new ones."""
    new = {number: size for number, size in sizes.items() if number not in known}
    known.update(new)
    return sum(new.values())


def _kept(unit: Unit, again: bool) -> Mapping[int, int]:
    return unit.arguments if again else unit.saved


class _Times(NamedTuple):
    """Seconds of forward, of the gradients of inputs, and of those of weights."""

    forward: float
    of_input: float
    of_weight: float


def _times(operations: Sequence[Operation], gpu: Gpu, precision: str) -> _Times:
    forward = of_input = of_weight = 0.0
    for flops, moved, attention in operations:
        products = flops / (gpu.peak(precision) * gpu.products)
        time = max(products, moved / (gpu.bandwidth * gpu.stream), gpu.launch)
        forward += time
        of_input += time * (_ATTENTION_BACKWARD if attention else 1.0 if flops else _ELEMENTWISE_BACKWARD)
        of_weight += time if flops and not attention else 0.0
    return _Times(forward, of_input, of_weight)


def volume(kind: str, size: int, ranks: int) -> int:
    """Return the bytes that a rank sends for a ring collective of ``size`` bytes over ``ranks``."""
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * size * (ranks - 1) // ranks


def collective_time(call: Collective, ranks: int, bandwidth: float, latency: float) -> float:
    """Return the seconds of a collective; ``bandwidth`` in bytes a second and rank."""
    return 0.0 if ranks == 1 else volume(call.kind, call.bytes, ranks) / bandwidth + latency

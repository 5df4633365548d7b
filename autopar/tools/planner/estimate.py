"""Estimate memory and time of a candidate, from the plan, the counted activations and a replay of the schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from autopar.config import ParallelConfig
from autopar.pipeline_parallel.schedule import Action, make_schedule
from autopar.plan.stages import StagePlan
from autopar.tools.planner.candidate import Candidate, Estimate, RankMemory, Rows
from autopar.tools.planner.hardware import Gpu, Node
from autopar.tools.planner.model_states import RankBytes
from autopar.tools.planner.network import DATA, Group, exposed
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.stage_costs import StageCost, stage_costs

T = TypeVar("T")

_RESERVE = 1_500_000_000  # bytes of a CUDA context, its kernels and NCCL's buffers
_BUCKET = 25 * 1024 * 1024  # bytes of a gradient bucket
_STREAM = DATA["assumed"]["stream"]
_BACKWARD = 2 / 3  # fraction of a micro-batch's work
_STEP_BYTES = 32  # moved by AdamW per element: gradient, both moments and weight, read and written


def _enough(candidate: Candidate) -> int:
    """Return the number of micro-batches after which peak memory no longer grows."""
    if candidate.schedule == "gpipe":
        return candidate.microbatches
    return min(candidate.microbatches, 3 * candidate.pp + candidate.microbatches % candidate.pp)


class Exchange(NamedTuple):
    """Collectives of one kind between replicas; ``size``: the bytes of the full tensors of all calls."""

    kind: str
    size: int
    calls: int
    group: Group

    @property
    def sent(self) -> int:
        return self.group.sent(self.kind, self.size)


@dataclass
class Estimator:
    """Estimator of candidates for one model on one kind of machine.

    Attributes:
        device: ``cuda``, or ``cpu``, which reserves no memory and has no ``foreach`` optimizer.
        given: A configuration that replaces the configurations of candidates, or None.
    """

    model: PlannedModel
    node: Node
    device: str = "cuda"
    given: ParallelConfig | None = None
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def gpu(self) -> Gpu:
        return self.node.gpu

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    # -- memory ----------------------------------------------------------------------------------------------------

    def memory(self, candidate: Candidate) -> tuple[RankMemory, ...]:
        """Return the memory of each rank of the pipeline, on the tp and dp ranks with the highest memory.

        Raises AutoparError if the model does not support the sizes, or does not run on the meta device.
        """
        pairs = zip(self._states(candidate), self._peaks(candidate, candidate.rows), strict=True)
        return tuple(self._memory(candidate, rank, held, peak) for rank, (held, peak) in enumerate(pairs))

    def kept(self, candidate: Candidate, tp: int, cp: int, sharer: int = 0) -> list[int]:
        """Return the peak bytes that wait for the backward, for each rank of the pipeline."""
        rows = candidate.rows._replace(tp_rank=tp, cp_rank=cp, sharer=sharer)
        return [peak.kept for peak in self._peaks(candidate, rows)]

    def _peaks(self, candidate: Candidate, rows: Rows) -> list[Peak]:
        costs, lists = self._costs(candidate, rows), self._lists(candidate, _enough(candidate))
        return self._once(("peaks", id(costs), id(lists)), lambda: [peak_of(actions, costs) for actions in lists])

    def _memory(self, candidate: Candidate, rank: int, held: RankBytes, peak: Peak) -> RankMemory:
        buffers = held.buffers
        if candidate.pp > 1:
            costs = self._costs(candidate)
            buffers += 2 * max(cost.output for cost in costs)  # one sent message, and one received
        bucket = 0
        if candidate.fully_sharded and candidate.replicas > 1:
            buffers += self._gathered(candidate, rank)
        elif candidate.replicas > 1:
            alone = held.expert_gradients if candidate.copies == 1 else 0  # these have no replicas
            bucket = min(max(_BUCKET, held.largest), held.gradients - alone)
        cuda = self.device == "cuda"
        foreach = 4 * held.stepped if cuda and not held.host and self.model.optimizer.startswith("adam") else 0
        states = held.weights, held.gradients, held.optimizer
        return RankMemory(*states, *peak[:3], buffers, max(bucket, foreach), _RESERVE if cuda else 0)

    def _gathered(self, candidate: Candidate, rank: int) -> int:
        """Return the bytes of FSDP2's full weights and gradients.

        ZeRO-3 gathers two blocks and the weights outside of blocks. ZeRO-2 gathers all weights. The gradients of one
        block exist in the block's dtype and in fp32. With pipeline stages, all gradients wait for the end of a pass.
        """
        width = 4 if self.model.precision == "fp32" else 2
        largest, full, outside = self._unsharded(candidate, rank)
        weights = full if candidate.zero == 2 else 2 * largest + outside
        gradients = full * 4 if candidate.pp > 1 else largest * (width + 4)
        return weights * width + gradients

    def _unsharded(self, candidate: Candidate, rank: int) -> tuple[int, int, int]:
        stages, states = self._stages(candidate), self.model.states(candidate.tp, candidate.ep)
        key = ("gathered", candidate.tp, candidate.ep, candidate.replicas, rank, stages.bounds, stages.rank_of)
        return self._once(key, lambda: states.unsharded(stages, rank, 0, candidate.replicas))

    def _config(self, candidate: Candidate) -> ParallelConfig:
        return candidate.config(self.model.precision) if self.given is None else self.given

    def _stages(self, candidate: Candidate) -> StagePlan:
        key = ("stages", candidate.pp, candidate.schedule, candidate.chunks)
        return self._once(key, lambda: self.model.stages(self._config(candidate)))

    def _states(self, candidate: Candidate) -> list[RankBytes]:
        c, stages, cp = candidate, self._stages(candidate), candidate.cp if candidate.sharers > 1 else 1

        def make() -> list[RankBytes]:
            states, config = self.model.states(c.tp, c.ep), self._config(c)
            return [states.of_rank(stages, config, 0, rank, None, c.replicas) for rank in range(c.pp)]

        # Several schedules share the same stages.
        return self._once(("states", c.tp, c.ep, c.replicas, c.zero, cp, stages.bounds, stages.rank_of), make)

    def _costs(self, candidate: Candidate, place: Rows | None = None) -> list[StageCost]:
        """Return the costs of each stage on one rank; the default is the first rank."""
        c, stages, rows = candidate, self._stages(candidate), candidate.rows if place is None else place
        every = c.every if c.checkpointing else 0

        def make() -> list[StageCost]:
            count = self.model.count(rows, c.microbatch, c.saves)
            return stage_costs(count, stages, self.node, precision=self.model.precision, rows=rows, every=every)

        return self._once(("costs", rows, c.microbatch, c.saves, every, stages.bounds), make)

    def _lists(self, candidate: Candidate, microbatches: int) -> list[list[Action]]:
        """Return the actions of each rank of the pipeline."""
        key = ("lists", candidate.pp, candidate.schedule, candidate.chunks, microbatches)
        return self._once(key, lambda: make_schedule(candidate.schedule, self._stages(candidate).rank_of, microbatches))

    # -- time ------------------------------------------------------------------------------------------------------

    def least_time(self, candidate: Candidate) -> float:
        """Return the seconds of a step without bubbles, on the busiest rank."""
        _, after = self._after(candidate)
        return candidate.microbatches * max(self._busy(candidate)) + sum(after.values())

    def _busy(self, candidate: Candidate, *, alone: bool = False) -> list[float]:
        """Return the seconds of work of each rank for a micro-batch; ``alone``: without collectives."""
        busy = [0.0] * candidate.pp
        for cost, rank in zip(self._costs(candidate), self._stages(candidate).rank_of, strict=True):
            busy[rank] += cost.alone if alone else sum(cost.time_of(Action(kind, 0, 0)) for kind in "FB")
        return busy

    def _played(self, candidate: Candidate, microbatches: int) -> float:
        """Return the seconds of the candidate's schedule with ``microbatches`` micro-batches."""
        costs = self._costs(candidate)
        output = max((cost.output for cost in costs), default=0)
        ends = Group(2, 1 if candidate.gpus <= self.node.gpus else 2)
        message = self.node.network.seconds("send", output, ends) if output else 0.0

        def make() -> float:
            lists = self._lists(candidate, microbatches)
            return play(lists, len(costs), lambda action: costs[action.stage].time_of(action), message)

        return self._once(("played", replace(candidate, microbatches=microbatches, zero=0)), make)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Estimate a candidate. Raises the errors of :meth:`memory`."""
        memory = self.memory(candidate)
        run = step_time(lambda m: self._played(candidate, m), candidate.microbatches, candidate.pp)
        hidden, after = self._after(candidate)
        busy = max(self._busy(candidate)) * candidate.microbatches
        costs = self._costs(candidate)
        times = candidate.microbatches * (len(costs) // candidate.pp)
        travel = {
            axis: max(cost.travel[axis].forward + cost.travel[axis].backward for cost in costs) * times
            for axis in ("tp", "cp", "ep")
        }
        time = run + sum(after.values())
        ranks = candidate.tp * candidate.cp * candidate.dp
        flops = sum(cost.flops for cost in costs) * ranks * candidate.microbatches
        samples = candidate.microbatch * candidate.microbatches * candidate.dp
        parts = {"compute": busy - sum(travel.values()), **travel, "bubble": run - busy, **after}
        return Estimate(
            candidate,
            memory,
            time,
            tuple(parts.items()),
            tuple(hidden.items()),
            max(0.0, 1 - busy / run) if run else 0.0,
            self._bytes_sent(candidate, costs),
            flops,
            flops / (time * candidate.gpus * self.gpu.peak(self.model.precision)) if time else 0.0,
            samples * self.model.sequence / time if time else 0.0,
            *self._stored(candidate),
        )

    def _stored(self, candidate: Candidate) -> tuple[int, float, float]:
        """Return the bytes of a checkpoint, and the seconds to save and to load it.

        All ranks write equally many bytes. Each rank reads its shards.
        """
        c = replace(candidate, zero=max(candidate.zero, 1))  # includes the master weights
        states, stages = self.model.states(1), self.model.plans.stages(1)
        one = self._once(("stored", c.zero), lambda: states.of_rank(stages, self._config(c), 0, 0, 0, 1))
        total = one.weights + one.optimizer + one.host
        held = max(state.weights + state.optimizer + state.host for state in self._states(candidate))
        nodes = -(-c.gpus // self.node.gpus)
        return total, total / nodes / self.node.storage, held * min(c.gpus, self.node.gpus) / self.node.storage

    def _after(self, candidate: Candidate) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of replica communication that overlap with work, and the seconds after the backward.

        FSDP2's communication overlaps with all work. Gradient averaging overlaps with the last backward. The optimizer
        step and the weight exchange of ZeRO-1 do not overlap.
        """
        stepped = max(state.stepped for state in self._states(candidate))
        optimizer = stepped * _STEP_BYTES / (self.gpu.bandwidth * _STREAM)
        spent = [
            (each.kind, each.calls * self.node.network.seconds(each.kind, each.size // each.calls, each.group))
            for each in self._exchanges(candidate)
            if each.calls
        ]
        total, work, shown = sum(seconds for _, seconds in spent), max(self._busy(candidate, alone=True)), 0.0
        if not candidate.fully_sharded:
            averaged = sum(seconds for kind, seconds in spent if kind == "all_reduce")
            shown = total - averaged + exposed(averaged, work * _BACKWARD)
        elif candidate.pp > 1 and candidate.zero == 2:  # gathers come before all work, reductions after it
            shown = total
        else:
            shown = exposed(total, work * candidate.microbatches)
        return {"dp": total - shown}, {"dp": shown, "optimizer": optimizer}

    def _exchanges(self, candidate: Candidate) -> list[Exchange]:
        """Return the collectives of a step between replicas, on the rank that sends the most bytes.

        FSDP2 exchanges weights and gradients :attr:`Candidate.exchanges` times. It gathers weights outside of blocks
        only once for forward and backward together.
        """
        c, states, per_node = candidate, self._states(candidate), self.node.gpus
        everyone = Group.of(c.replicas, c.tp, per_node)
        copies = Group.of(c.copies, c.tp * c.sharers, per_node)  # for experts that are distributed over replicas
        if c.fully_sharded:
            width, held = 4 if self.model.precision == "fp32" else 2, max(states, key=lambda each: each.parameters)
            gathers, reduces = c.exchanges
            experts = held.parameters * held.expert_weights // max(held.weights, 1) if c.sharers > 1 else 0
            outside = self._unsharded(c, states.index(held))[2]
            once = 0 if c.zero == 2 else outside * c.microbatches * width
            blocks = max(1, len(self._stages(c).elements) // c.pp)
            found = []
            for elements, group, less in ((held.parameters - experts, everyone, once), (experts, copies, 0)):
                full = elements * group.ranks
                found.append(Exchange("all_gather", full * gathers * width - less, gathers * blocks, group))
                found.append(Exchange("reduce_scatter", full * reduces * 4, reduces * blocks, group))
            return found

        def calls(state: RankBytes, gradients: int, weights: int, group: Group) -> list[Exchange]:
            number = -(-gradients // max(_BUCKET, state.largest))
            gathered = weights if c.zero == 1 else 0
            return [Exchange("all_reduce", gradients, number, group), Exchange("all_gather", gathered, number, group)]

        every = []
        for s in states:
            own = (s.expert_gradients, s.expert_weights) if c.sharers > 1 else (0, 0)
            rest = calls(s, s.gradients - own[0], s.weights - own[1], everyone)
            every.append([*rest, *calls(s, *own, copies)])
        return max(every, key=lambda row: sum(each.sent for each in row))

    def _bytes_sent(self, candidate: Candidate, costs: Sequence[StageCost]) -> tuple[tuple[str, int], ...]:
        rank_of = self._stages(candidate).rank_of
        sent = {axis: [0] * candidate.pp for axis in ("tp", "cp", "ep", "pp")}
        for stage, (cost, rank) in enumerate(zip(costs, rank_of, strict=True)):
            for axis, travel in cost.travel.items():
                sent[axis][rank] += travel.bytes * candidate.microbatches
            if stage + 1 < len(costs) and rank_of[stage + 1] != rank:
                for end in (rank, rank_of[stage + 1]):  # sends the output, and receives its gradient
                    sent["pp"][end] += cost.output * candidate.microbatches
        dp = sum(each.sent for each in self._exchanges(candidate))
        return (*((axis, max(ranks)) for axis, ranks in sent.items()), ("dp", dp))


# -- replay of schedules with the times of the stages -----------------------------------------------------------------


class Peak(NamedTuple):
    """Bytes of a rank's micro-batches at the peak.

    Attributes:
        activations: The bytes without logits, with the waiting gradients of split backwards.
        kept: The peak bytes that wait for the backward.
    """

    activations: int
    logits: int
    work: int
    kept: int


def peak_of(actions: Sequence[Action], costs: Sequence[StageCost]) -> Peak:
    """Return the peak bytes of one rank's micro-batches.

    In stages with recomputed blocks the first half of a backward is the full backward.
    """
    most, longest = (0, 0, 0), 0
    kept = logits = gradients = 0
    for kind, stage, _ in actions:
        cost = costs[stage]
        if kind == "W" and cost.recomputed:
            continue
        if kind == "F":
            kept, logits = kept + cost.kept, logits + cost.logits
        work = cost.forward_work if kind == "F" else cost.backward_work
        longest = max(longest, kept)
        if kept + gradients + work > sum(most):
            most = kept + gradients - logits, logits, work
        if kind in "BI":
            kept, logits = kept - cost.kept, logits - cost.logits
        if not cost.recomputed and kind in "IW":  # between the halves of the backward
            sign = 1 if kind == "I" else -1
            kept, logits = kept + sign * cost.late, logits + sign * cost.late_logits
            gradients += sign * cost.gradients
    return Peak(*most, longest)


def play(
    lists: Sequence[Sequence[Action]], stages: int, time_of: Callable[[Action], float], message: float = 0.0
) -> float:
    """Return the seconds of a schedule. As in the engine, actions run in order, and each waits for its inputs.

    Args:
        lists: The actions of each rank, from :func:`~autopar.pipeline_parallel.schedule.make_schedule`.
        message: The seconds of a message between two ranks.

    Raises:
        ValueError: If the schedule deadlocks.
    """
    ends: dict[Action, float] = {}
    rank_of = {action.stage: rank for rank, row in enumerate(lists) for action in row}
    left = [deque(row) for row in lists]
    free = [0.0] * len(lists)
    while any(left):
        before = sum(map(len, left))
        for rank, row in enumerate(left):
            while row and ends.keys() >= {*(inputs := _inputs(row[0], stages))}:
                action = row.popleft()
                arrivals = [ends[each] + (message if rank_of[each.stage] != rank else 0.0) for each in inputs]
                free[rank] = max([free[rank], *arrivals]) + time_of(action)
                ends[action._replace(kind="B") if action.kind == "I" else action] = free[rank]
        if sum(map(len, left)) == before:
            raise ValueError(f"the schedule deadlocks: {before} actions wait for each other")
    return max(free)


def _inputs(action: Action, stages: int) -> list[Action]:
    """Return the actions that must end before ``action``. ``B`` also denotes the first half of a split backward."""
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [Action("B", stage, m)]
    return [Action("F", stage, m), *([Action("B", stage + 1, m)] if stage < stages - 1 else [])]


def step_time(time_with: Callable[[int], float], microbatches: int, ranks: int) -> float:
    """Return the seconds of a schedule with many micro-batches.

    After some rounds, each additional round of ``ranks`` micro-batches takes equally long.
    """
    few = 4 * ranks + microbatches % ranks
    if microbatches <= few + 2 * ranks:
        return time_with(microbatches)
    short, longer = time_with(few), time_with(few + ranks)
    return short + (microbatches - few) // ranks * (longer - short)

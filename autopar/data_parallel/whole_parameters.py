"""Let an optimizer step whole parameters of which each tensor-parallel rank holds a shard.

Before a step the shards of a parameter and of its gradient come together where it is stepped: on its owner, as ZeRO-1
has owners among the replicas, or on every rank. After it each rank has its shard of the new parameter. The state is
that of whole parameters, so a checkpoint holds it for any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from autopar.distributed.axis import Axis, device_of
from autopar.distributed.collectives import exchange
from autopar.distributed.gloo_collectives import all_reduce
from autopar.layout import Layout
from autopar.plan.plan import TensorPlan

_ROUND = 64 * 1024 * 1024  # bytes of whole parameters that are exchanged at once


class WholeParameters:
    """The sharded parameters that are stepped whole, and the ranks that step them.

    Attributes:
        axes: parameter -> the ranks over which it is sharded.
    """

    def __init__(self) -> None:
        self.axes: dict[torch.Tensor, Axis] = {}
        self._plans: dict[torch.Tensor, TensorPlan] = {}  # with layouts over their axes
        self._owners: dict[torch.Tensor, int | None] = {}  # None: every rank
        self._loads: dict[tuple[Axis, int], list[int]] = {}
        self._stand_ins: dict[torch.Tensor, nn.Parameter] = {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._plans

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, parameters: Mapping[torch.Tensor, TensorPlan], axis: Axis, replica: int, *, duplicated: bool) -> None:
        """Add parameters. The same on every rank of the axis.

        Args:
            parameters: with the plans of whole ones.
            axis: over which they are sharded.
            replica: which of the axes that hold the same steps them; matrices are dealt over its ranks.
            duplicated: every rank steps them.
        """
        self.axes.update(dict.fromkeys(parameters, axis))
        for parameter, plan in parameters.items():
            self._plans[parameter] = replace(plan, layout=_layout(plan).of_first(axis.size))
        if duplicated:
            self._owners.update(dict.fromkeys(parameters))
            return
        loads = self._loads.setdefault((axis, replica), [0] * axis.size)
        sizes = [math.prod(plan.shape) for plan in parameters.values()]
        for parameter, size, owner in zip(parameters, sizes, assign(sizes, axis.size, loads), strict=True):
            self._owners[parameter] = owner
            loads[owner] += size

    def steps_here(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank steps the parameter, and keeps its state."""
        return self._owners[parameter] in (None, self.axes[parameter].rank)

    def writer(self, parameter: torch.Tensor) -> int:
        """Return the rank that writes the state of a parameter: the first of those of its axis that keep it."""
        return self._owners.get(parameter) or 0

    def shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of what is stepped for a parameter: its whole shape, if it is stepped whole."""
        return self._plans[parameter].shape if parameter in self._plans else tuple(parameter.shape)

    @torch.no_grad()
    def gather(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Return the whole of each parameter that this rank steps, with its gradient. A collective of the axes.

        Args:
            shards: parameter -> its shard (itself, or its fp32 weight) with the shard's gradient.
        """
        gradients = self.collect(self.gradients(shards))
        whole: dict[torch.Tensor, torch.Tensor] = {}
        for parameter, weight in self.collect(shards).items():
            if parameter not in self._stand_ins:  # the same object in each step
                self._stand_ins[parameter] = nn.Parameter(weight, requires_grad=weight.is_floating_point())
            stand_in = whole[parameter] = self._stand_ins[parameter]
            vars(stand_in).update(vars(parameter))  # what the user has set on it
            stand_in.grad, stand_in.data = None, weight
            stand_in.grad = gradients.get(parameter)
        return whole

    @torch.no_grad()
    def scatter(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Write what was stepped into the shards, on every rank, and free the whole ones. A collective of the axes."""
        self.deal(self._stand_ins, shards)
        for parameter in filter(self.steps_here, shards):
            stand_in = self._stand_ins[parameter]
            stand_in.grad, stand_in.data = None, stand_in.new_empty(0)

    def gradients(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of shards, without those that all ranks lack; one that some lack is zero there."""
        graded: dict[torch.Tensor, torch.Tensor] = {}
        for axis, theirs in self._by_axis(shards).items():
            has = torch.tensor([shard.grad is not None for shard in theirs.values()], device=device_of(axis)).int()
            all_reduce(has, op=dist.ReduceOp.MAX, group=axis.group)
            for (parameter, shard), some in zip(theirs.items(), has.tolist(), strict=True):
                gradient = torch.zeros_like(shard) if shard.grad is None else shard.grad
                if some:
                    graded[parameter] = gradient.to_dense() if gradient.is_sparse else gradient
        return graded

    def collect(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Gather shards where their parameters are stepped; return the whole ones of this rank."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        for axis, part in self._rounds(shards):
            sent: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
            due: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
            held: dict[torch.Tensor, list[torch.Tensor]] = {}
            others = [rank for rank in range(axis.size) if rank != axis.rank]
            for parameter, shard in part.items():
                owner, plan = self._owners[parameter], self._plans[parameter]
                for rank in others if owner is None else {owner} - {axis.rank}:
                    sent[rank].append(shard)
                if owner in (None, axis.rank):
                    pieces = held[parameter] = [shard.new_empty(plan.local_shape(rank)) for rank in range(axis.size)]
                    pieces[axis.rank] = shard
                    for rank in others:
                        due[rank].append(pieces[rank])
            exchange(sent, due, axis)
            found |= {parameter: _layout(self._plans[parameter]).unshard(pieces) for parameter, pieces in held.items()}
        return found

    def deal(self, whole: Mapping[torch.Tensor, torch.Tensor], shards: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Write the shards of whole tensors, of which the ranks that step them have each, into those of every rank."""
        for axis, part in self._rounds(shards):
            sent: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
            due: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
            for parameter, shard in part.items():
                owner = self._owners[parameter]
                if owner not in (None, axis.rank):
                    due[owner].append(shard)
                    continue
                layout = _layout(self._plans[parameter])
                shard.copy_(layout.shard(whole[parameter], axis.rank))
                for rank in range(axis.size) if owner is not None else ():
                    if rank != axis.rank:
                        sent[rank].append(layout.shard(whole[parameter], rank).to(shard.dtype))
            exchange(sent, due, axis)

    def _by_axis(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> dict[Axis, dict[torch.Tensor, torch.Tensor]]:
        axes = dict.fromkeys(self.axes[parameter] for parameter in shards)
        return {axis: {p: shard for p, shard in shards.items() if self.axes[p] is axis} for axis in axes}

    def _rounds(
        self, shards: Mapping[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[Axis, dict[torch.Tensor, torch.Tensor]]]:
        """Yield the shards in runs of bounded size, the same ones on every rank of the axis that comes with them."""
        for axis, theirs in self._by_axis(shards).items():
            run: dict[torch.Tensor, torch.Tensor] = {}
            size, last = 0, next(reversed(theirs))
            for parameter, shard in theirs.items():
                size += math.prod(self._plans[parameter].shape) * shard.itemsize
                run[parameter] = shard
                if size >= _ROUND or parameter is last:
                    yield axis, run
                    run, size = {}, 0


def assign(sizes: Sequence[int], ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """Assign an owner, a rank in ``[0, ranks)``, to each of ``sizes`` elements: largest first, to the least loaded.

    Deterministic: of equal sizes the first one comes first, of equally loaded ranks the lowest is taken. No rank gets
    more than the mean load plus the largest size.

    Args:
        loads: what the ranks own already.

    >>> assign([4, 1, 3, 2], 2)
    [0, 0, 1, 1]
    """
    owned = list(loads) or [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = owned.index(min(owned))
        owned[owners[index]] += sizes[index]
    return owners


def _layout(plan: TensorPlan) -> Layout:
    assert plan.layout is not None
    return plan.layout

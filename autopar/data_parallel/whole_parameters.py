"""Let an optimizer step whole parameters of which each tensor-parallel rank holds a shard.

Before a step the shards of a parameter and of its gradient come together where it is stepped: on its owner, as ZeRO-1
has owners among the replicas, or on every rank. After it each rank has its shard of the new parameter. The state is
that of whole parameters, so a checkpoint holds it for any mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.data_parallel.zero1 import assign
from autopar.distributed.axis import Axis, device_of
from autopar.distributed.gloo_collectives import all_reduce, all_to_all_single
from autopar.distributed.mesh import MPU
from autopar.distributed.process import device_of_numbers
from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.safetensors_io import dtype_of, nbytes

_PLAIN = (bool, int, float, str, tuple, type(None))
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

    def share_options(self, groups: Iterable[dict[str, Any]], owns: Callable[[torch.Tensor], bool]) -> None:
        """Give options of groups that some ranks of an axis step to the others: a step may count in them.

        Args:
            groups: of the optimizer.
            owns: whether this replica steps a parameter.
        """
        for group, axis in itertools.product(groups, dict.fromkeys(self.axes.values())):
            of_others = {p for p, its in self.axes.items() if its is not axis}
            owners = {self._owners.get(p) for p in group["params"] if owns(p) and p not in of_others}
            ranks = sorted(owner for owner in owners if owner is not None)
            if None in owners or not 0 < len(ranks) < axis.size:
                continue
            options = {key: value for key, value in group.items() if type(value) in _PLAIN}
            sent = [options]
            device = device_of_numbers(axis.group)
            dist.broadcast_object_list(sent, src=axis.ranks[ranks[0]], group=axis.group, device=device)
            if axis.rank not in ranks:
                group.update(sent[0] or {})

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
            stand_in = whole[parameter] = self._stand_in(parameter, weight)
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
            has = _agree([shard.grad is not None for shard in theirs.values()], axis)
            graded.update((p, _gradient(shard)) for (p, shard), some in zip(theirs.items(), has, strict=True) if some)
        return graded

    def collect(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Gather shards where their parameters are stepped; return the whole ones of this rank."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        for axis, part in self._rounds(shards):
            found |= self._collect(part, axis)
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

    def _stand_in(self, parameter: torch.Tensor, weight: torch.Tensor) -> nn.Parameter:
        """Return the object that is stepped: the same one in each step, with what the user has set on the parameter."""
        if parameter not in self._stand_ins:
            self._stand_ins[parameter] = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        stand_in = self._stand_ins[parameter]
        vars(stand_in).update(vars(parameter))
        stand_in.grad, stand_in.data = None, weight
        return stand_in

    def _by_axis(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> dict[Axis, dict[torch.Tensor, torch.Tensor]]:
        found: dict[Axis, dict[torch.Tensor, torch.Tensor]] = {}
        for parameter, shard in shards.items():
            found.setdefault(self.axes[parameter], {})[parameter] = shard
        return found

    def _rounds(
        self, shards: Mapping[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[Axis, dict[torch.Tensor, torch.Tensor]]]:
        """Yield the shards in runs of bounded size, the same ones on every rank of the axis that comes with them."""
        for axis, theirs in self._by_axis(shards).items():
            run: dict[torch.Tensor, torch.Tensor] = {}
            size = 0
            for parameter, shard in theirs.items():
                plan = self._plans[parameter]
                size += nbytes(dtype_of(plan.dtype), plan.shape)
                run[parameter] = shard
                if size >= _ROUND:
                    yield axis, run
                    run, size = {}, 0
            if run:
                yield axis, run

    def _collect(self, shards: Mapping[torch.Tensor, torch.Tensor], axis: Axis) -> dict[torch.Tensor, torch.Tensor]:
        sent: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
        due: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
        held: dict[torch.Tensor, list[torch.Tensor]] = {}
        for parameter, shard in shards.items():
            owner, plan = self._owners[parameter], self._plans[parameter]
            for rank in range(axis.size) if owner is None else [owner]:
                if rank != axis.rank:
                    sent[rank].append(shard)
            if owner in (None, axis.rank):
                pieces = [shard.new_empty(plan.local_shape(rank)) for rank in range(axis.size)]
                pieces[axis.rank] = shard
                held[parameter] = pieces
                for rank in range(axis.size):
                    if rank != axis.rank:
                        due[rank].append(pieces[rank])
        exchange(sent, due, axis)
        return {parameter: _layout(self._plans[parameter]).unshard(pieces) for parameter, pieces in held.items()}


def sharded_over(
    parameters: Mapping[torch.Tensor, TensorPlan], plan: Plan, mpu: MPU
) -> Iterator[tuple[Axis, Axis, dict[torch.Tensor, TensorPlan]]]:
    """Yield each axis over which some parameters are sharded, the ranks that hold the same, and these parameters."""
    for axis, replicas, experts in ((mpu.tp, mpu.dp_cp, False), (mpu.shards, mpu.copies, True)):
        if axis.size > 1:
            yield axis, replicas, {p: its for p, its in parameters.items() if (its.name in plan.experts) is experts}


def _agree(has: Sequence[bool], axis: Axis) -> list[bool]:
    """Return which flags are set on some rank."""
    flags = torch.tensor(has, dtype=torch.int32, device=device_of(axis))
    all_reduce(flags, op=dist.ReduceOp.MAX, group=axis.group)
    return [bool(flag) for flag in flags.tolist()]


def _layout(plan: TensorPlan) -> Layout:
    assert plan.layout is not None
    return plan.layout


def _gradient(shard: torch.Tensor) -> torch.Tensor:
    gradient = torch.zeros_like(shard) if shard.grad is None else shard.grad
    return gradient.to_dense() if gradient.is_sparse else gradient


def exchange(sent: Sequence[Sequence[torch.Tensor]], due: Sequence[Sequence[torch.Tensor]], axis: Axis) -> None:
    """Send tensors to each rank, and fill those that are due from each, of any dtypes: one all-to-all of bytes."""
    assert axis.group is not None
    flat = [_bytes(each) for tensors in sent for each in tensors]
    device = device_of(axis)
    buffer = torch.cat(flat).to(device) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    sizes_in, sizes_out = [_total(tensors) for tensors in sent], [_total(tensors) for tensors in due]
    received = torch.empty(sum(sizes_out), dtype=torch.uint8, device=device)
    all_to_all_single(received, buffer, sizes_out, sizes_in, group=axis.group)
    at = 0
    for tensor in (each for tensors in due for each in tensors):
        size = _total([tensor])
        piece = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        _bytes(piece).copy_(received[at : at + size])
        tensor.copy_(piece)
        at += size


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _total(tensors: Iterable[torch.Tensor]) -> int:
    return sum(nbytes(tensor.dtype, tuple(tensor.shape)) for tensor in tensors)

"""Let an optimizer step whole parameters of which each tensor-parallel rank holds a shard.

Before a step the shards of a parameter and of its gradient come together where it is stepped: on its owner, as ZeRO-1
has owners among the replicas, or on every rank. After it each rank has its shard of the new parameter. The state is
that of whole parameters, so a checkpoint holds it for any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.data_parallel.zero1 import assign
from autopar.distributed.axis import Axis, device_of
from autopar.distributed.gloo_collectives import all_reduce, all_to_all_single
from autopar.distributed.process import device_of_numbers
from autopar.layout import Layout
from autopar.plan.plan import TensorPlan
from autopar.storage.safetensors_io import dtype_of, nbytes

__all__ = ["WholeParameters"]

_PLAIN = (bool, int, float, str, tuple, type(None))
_ROUND = 64 * 1024 * 1024  # bytes of whole parameters that are exchanged at once


class WholeParameters:
    """The sharded parameters that are stepped whole, and the tensor-parallel ranks that step them.

    Args:
        axis: over which they are sharded.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._plans: dict[torch.Tensor, TensorPlan] = {}
        self._owners: dict[torch.Tensor, int | None] = {}  # None: every rank
        self._loads: dict[int, list[int]] = {}
        self._stand_ins: dict[torch.Tensor, nn.Parameter] = {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._plans

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, parameters: Mapping[torch.Tensor, TensorPlan], replica: int, *, duplicated: bool) -> None:
        """Add parameters. The same on every rank of the axis.

        Args:
            parameters: with the plans of whole ones.
            replica: the data-parallel rank that steps them; matrices are dealt over its tensor-parallel ranks.
            duplicated: every rank steps them.
        """
        self._plans.update(parameters)
        if duplicated:
            self._owners.update(dict.fromkeys(parameters))
            return
        loads = self._loads.setdefault(replica, [0] * self.axis.size)
        sizes = [math.prod(plan.shape) for plan in parameters.values()]
        for parameter, size, owner in zip(parameters, sizes, assign(sizes, self.axis.size, loads), strict=True):
            self._owners[parameter] = owner
            loads[owner] += size

    def steps_here(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank steps the parameter, and keeps its state."""
        return self._owners[parameter] in (None, self.axis.rank)

    def share_options(self, groups: Iterable[dict[str, Any]], owns: Callable[[torch.Tensor], bool]) -> None:
        """Give options of groups that some ranks of the axis step to the others: a step may count in them.

        Args:
            groups: of the optimizer.
            owns: whether this replica steps a parameter.
        """
        for group in groups:
            owners = {self._owners.get(parameter) for parameter in group["params"] if owns(parameter)}
            ranks = sorted(owner for owner in owners if owner is not None)
            if None in owners or not 0 < len(ranks) < self.axis.size:
                continue
            options = {key: value for key, value in group.items() if type(value) in _PLAIN}
            sent = [options if self.axis.rank == ranks[0] else None]
            device = device_of_numbers(self.axis.group)
            dist.broadcast_object_list(sent, src=self.axis.ranks[ranks[0]], group=self.axis.group, device=device)
            if self.axis.rank not in ranks:
                group.update(sent[0] or {})

    def writer(self, parameter: torch.Tensor) -> int:
        """Return the tensor-parallel rank that writes the state of a parameter: the first of those that keep it."""
        return self._owners.get(parameter) or 0

    def shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of what is stepped for a parameter: its whole shape, if it is stepped whole."""
        return self._plans[parameter].shape if parameter in self._plans else tuple(parameter.shape)

    @torch.no_grad()
    def gather(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Return the whole of each parameter that this rank steps, with its gradient. A collective of the axis.

        A gradient that some ranks lack is zero there; one that all lack is None.

        Args:
            shards: parameter -> its shard (itself, or its fp32 weight) with the shard's gradient.
        """
        has = self._agree([shard.grad is not None for shard in shards.values()])
        whole: dict[torch.Tensor, torch.Tensor] = {}
        with_gradient = dict(zip(shards, has, strict=True))
        for part in self._rounds(shards):
            weights = self._collect(part)
            graded = {p: _gradient(shard) for p, shard in part.items() if with_gradient[p]}
            gradients = self._collect(graded)
            for parameter, weight in weights.items():
                stand_in = whole[parameter] = self._stand_in(parameter, weight)
                stand_in.grad = gradients.get(parameter)
        return whole

    @torch.no_grad()
    def scatter(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Write what was stepped into the shards, on every rank, and free the whole ones. A collective of the axis."""
        for part in self._rounds(shards):
            sent: list[list[torch.Tensor]] = [[] for _ in range(self.axis.size)]
            due: list[list[torch.Tensor]] = [[] for _ in range(self.axis.size)]
            for parameter, shard in part.items():
                owner = self._owners[parameter]
                if owner not in (None, self.axis.rank):
                    due[owner].append(shard)
                    continue
                layout = _layout(self._plans[parameter])
                stand_in = self._stand_ins[parameter]
                shard.copy_(layout.shard(stand_in, self.axis.rank))
                for rank in range(self.axis.size) if owner is not None else ():
                    if rank != self.axis.rank:
                        sent[rank].append(layout.shard(stand_in, rank).to(shard.dtype))
                stand_in.grad, stand_in.data = None, stand_in.new_empty(0)
            exchange(sent, due, self.axis)

    def _stand_in(self, parameter: torch.Tensor, weight: torch.Tensor) -> nn.Parameter:
        """Return the object that is stepped: the same one in each step, with what the user has set on the parameter."""
        if parameter not in self._stand_ins:
            self._stand_ins[parameter] = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        stand_in = self._stand_ins[parameter]
        vars(stand_in).update(vars(parameter))
        stand_in.grad, stand_in.data = None, weight
        return stand_in

    def _agree(self, has: Sequence[bool]) -> list[bool]:
        """Return which flags are set on some rank."""
        flags = torch.tensor(has, dtype=torch.int32, device=device_of(self.axis))
        if len(has):
            all_reduce(flags, op=dist.ReduceOp.MAX, group=self.axis.group)
        return [bool(flag) for flag in flags.tolist()]

    def _rounds(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
        """Yield the shards in runs of bounded size, the same ones on every rank."""
        run: dict[torch.Tensor, torch.Tensor] = {}
        size = 0
        for parameter, shard in shards.items():
            plan = self._plans[parameter]
            size += nbytes(dtype_of(plan.dtype), plan.shape)
            run[parameter] = shard
            if size >= _ROUND:
                yield run
                run, size = {}, 0
        if run:
            yield run

    def _collect(self, shards: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Gather shards where their parameters are stepped; return the whole ones of this rank."""
        axis = self.axis
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

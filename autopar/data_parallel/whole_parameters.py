"""Step sharded parameters as full tensors, and step torch's Muon on shards.

Before a step, a parameter and its gradient are gathered on its owner or on every rank. After the step, each rank gets
its shard. The optimizer's state belongs to full parameters, so a checkpoint fits any mesh. A sharded Muon gathers only
the update directions, to orthogonalize them; momentum, weight decay and the update are element-wise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.compat.tensors import muon_rates, newton_schulz
from autopar.distributed.axis import Axis, device_of
from autopar.distributed.collectives import exchange
from autopar.distributed.gloo_collectives import all_reduce
from autopar.layout import Layout
from autopar.plan.plan import TensorPlan

_ROUND = 64 * 1024 * 1024  # bytes of full parameters that are exchanged at once
_Tensors = Mapping[torch.Tensor, torch.Tensor]  # parameter -> its shard, its gradient, its fp32 weight ...


class FullParameters(dict[torch.Tensor, tuple[int, ...]]):
    """Sharded parameters that are stepped as full tensors (parameter -> full shape), and the ranks that step them.

    Attributes:
        axes: Parameter -> the ranks over which it is sharded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[torch.Tensor, Axis] = {}
        self._layouts: dict[torch.Tensor, Layout] = {}
        self._owners: dict[torch.Tensor, int | None] = {}  # None: every rank
        self._loads: dict[tuple[Axis, int], list[int]] = {}
        self._stand_ins: dict[torch.Tensor, nn.Parameter] = {}

    def add(self, parameters: Mapping[torch.Tensor, TensorPlan], axis: Axis, replica: int, *, duplicated: bool) -> None:
        """Add parameters that are sharded over ``axis``; ``duplicated``: True if every rank of it steps them."""
        for parameter, plan in parameters.items():
            assert plan.layout is not None
            self[parameter], self.axes[parameter] = plan.shape, axis
            self._layouts[parameter] = plan.layout.of_first(axis.size)
        loads = self._loads.setdefault((axis, replica), [0] * axis.size)
        owners = () if duplicated else assign([math.prod(self[p]) for p in parameters], axis.size, loads)
        self._owners.update(dict.fromkeys(parameters) | dict(zip(parameters, owners, strict=False)))

    def steps_here(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank steps the parameter, and keeps its state."""
        return self._owners[parameter] in (None, self.axes[parameter].rank)

    def writer(self, parameter: torch.Tensor) -> int:
        """Return the rank that writes the state of a parameter: the first rank of its axis that keeps it."""
        return self._owners.get(parameter) or 0

    @torch.no_grad()
    def gather(self, shards: _Tensors) -> dict[torch.Tensor, torch.Tensor]:
        """Return each full parameter that this rank steps, with its gradient. A collective of the axes."""
        gradients = self.collect(self.gradients(shards))
        full: dict[torch.Tensor, torch.Tensor] = {}
        for parameter, weight in self.collect(shards).items():
            if parameter not in self._stand_ins:  # the same object in each step, because the state belongs to it
                self._stand_ins[parameter] = nn.Parameter(weight, requires_grad=weight.is_floating_point())
            stand_in = full[parameter] = self._stand_ins[parameter]
            vars(stand_in).update(vars(parameter))  # attributes that user code has set
            stand_in.grad, stand_in.data = None, weight
            stand_in.grad = gradients.get(parameter)
        return full

    @torch.no_grad()
    def scatter(self, shards: _Tensors) -> None:
        """Write the stepped parameters into the shards of every rank, and free them. A collective of the axes."""
        self.deal(self._stand_ins, shards)
        for parameter in filter(self.steps_here, shards):
            stand_in = self._stand_ins[parameter]
            stand_in.grad, stand_in.data = None, stand_in.new_empty(0)

    def gradients(self, shards: _Tensors) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of shards: zeros if only other ranks have one, none if no rank has one."""
        graded: dict[torch.Tensor, torch.Tensor] = {}
        for axis, theirs in self._by_axis(shards).items():
            has = torch.tensor([shard.grad is not None for shard in theirs.values()], device=device_of(axis)).int()
            all_reduce(has, op=dist.ReduceOp.MAX, group=axis.group)
            for (parameter, shard), some in zip(theirs.items(), has.tolist(), strict=True):
                gradient = torch.zeros_like(shard) if shard.grad is None else shard.grad
                if some:
                    graded[parameter] = gradient.to_dense() if gradient.is_sparse else gradient
        return graded

    def collect(self, shards: _Tensors) -> dict[torch.Tensor, torch.Tensor]:
        """Gather shards where their parameters are stepped; return the full tensors of this rank."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        for axis, run, sent, due in self._rounds(shards):
            for parameter, shard in run.items():
                layout, owner = self._layouts[parameter], self._owners[parameter]
                mine = [shard.narrow(layout.dim, low, high - low) for low, high in layout.owned_local(axis.rank)]
                for rank in range(axis.size) if owner is None else (owner,):
                    sent[rank] += mine if rank != axis.rank else ()
                if self.steps_here(parameter):
                    full = found[parameter] = shard.new_empty(self[parameter])
                    layout.write(full, shard, axis.rank)
                    for rank in range(axis.size):
                        parts = layout.owned(rank) if rank != axis.rank else ()
                        due[rank] += [full.narrow(layout.dim, low, high - low) for low, high in parts]
        return found

    def deal(self, full: _Tensors, shards: _Tensors) -> None:
        """Write full tensors into the shards of every rank, from the ranks that step them."""
        for axis, run, sent, due in self._rounds(shards):
            for parameter, shard in run.items():
                layout, owner = self._layouts[parameter], self._owners[parameter]
                if not self.steps_here(parameter):
                    due[owner or 0].append(shard)
                    continue
                shard.copy_(layout.shard(full[parameter], axis.rank))
                for rank in {*range(axis.size)} - {axis.rank} if owner is not None else ():
                    sent[rank].append(layout.shard(full[parameter], rank).to(shard.dtype))

    def _by_axis(self, shards: _Tensors) -> dict[Axis, dict[torch.Tensor, torch.Tensor]]:
        axes = dict.fromkeys(self.axes[parameter] for parameter in shards)
        return {axis: {p: shard for p, shard in shards.items() if self.axes[p] is axis} for axis in axes}

    def _rounds(self, shards: _Tensors) -> Iterator[tuple[Axis, _Tensors, list[Any], list[Any]]]:
        """Yield runs of shards of bounded size, identical on all ranks of an axis, with two lists for the exchange.

        The caller fills the lists with the tensors to send to each rank, and the tensors to receive from each rank.
        """
        for axis, theirs in self._by_axis(shards).items():
            run, size, last = dict[torch.Tensor, torch.Tensor](), 0, next(reversed(theirs))
            for parameter, shard in theirs.items():
                size += math.prod(self[parameter]) * shard.itemsize
                run[parameter] = shard
                if size >= _ROUND or parameter is last:
                    sent, due = ([list[torch.Tensor]() for _ in range(axis.size)] for _ in range(2))
                    yield axis, run, sent, due
                    exchange(sent, due, axis)
                    run, size = {}, 0


def assign(sizes: Sequence[int], ranks: int, loads: list[int] | None = None) -> list[int]:
    """Assign an owner, a rank in ``[0, ranks)``, to each of ``sizes`` elements: largest first, to the least loaded.

    No rank gets more than the mean load plus the largest size. Ties go to the first size and the lowest rank.

    Args:
        loads: The number of elements that each rank owns already; updated.

    >>> assign([4, 1, 3, 2], 2)
    [0, 0, 1, 1]
    """
    owned = [0] * ranks if loads is None else loads
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = owned.index(min(owned))
        owned[owners[index]] += sizes[index]
    return owners


# -- torch's Muon, which itself steps full matrices only ---------------------------------------------------------------


class MuonSteps(FullParameters):
    """Step the parameters of a Muon as shards (the items), and the parts of fused parameters separately.

    Attributes:
        parts: Fused parameter -> the layout of its parts.
        taken: The tensors of the current step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[torch.Tensor, Layout] = {}
        self.taken: dict[torch.Tensor, torch.Tensor] = {}

    def split(self, parameters: Mapping[torch.Tensor, TensorPlan]) -> None:
        """Register fused parameters, whose parts are stepped separately."""
        self.parts.update({p: layout for p, plan in parameters.items() if (layout := fused(plan)) is not None})

    def take(self, stepped: _Tensors) -> dict[torch.Tensor, torch.Tensor]:
        """Keep the tensors that :meth:`step` steps; return the remaining tensors."""
        self.taken = {p: tensor for p, tensor in stepped.items() if p in self or p in self.parts}
        return {p: tensor for p, tensor in stepped.items() if p not in self.taken}

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Muon) -> None:
        """Step the taken tensors. A collective of the axes over which they are sharded."""
        taken, self.taken = self.taken, {}
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        gradients = {p: tensor.grad for p, tensor in taken.items() if p not in self and tensor.grad is not None}
        gradients |= self.gradients({p: tensor for p, tensor in taken.items() if p in self})
        full, shards = dict[torch.Tensor, torch.Tensor](), dict[torch.Tensor, torch.Tensor]()
        for parameter, gradient in gradients.items():
            group, state = groups[parameter], optimizer.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            (shards if parameter in self else full)[parameter] = direction
        full |= self.collect(shards)
        for parameter, direction in full.items():
            dim, sizes, _ = self._sizes(parameter, direction)
            full[parameter] = torch.cat([newton_schulz(x, groups[parameter]) for x in direction.split(sizes, dim)], dim)
        for parameter, direction in shards.items():
            # The dtype of torch's result, for ranks that only receive a shard of it.
            dtype = newton_schulz(direction.new_zeros(1, 1), {**groups[parameter], "ns_steps": 0}).dtype
            shards[parameter] = torch.empty_like(direction, dtype=dtype)
        self.deal(full, shards)
        for parameter, update in (full | shards).items():
            weight = taken[parameter]
            dim, sizes, here = self._sizes(parameter, weight)
            shape = list(self.get(parameter, weight.shape))
            for size, part, its in zip(sizes, weight.split(here, dim), update.split(here, dim), strict=True):
                shape[dim] = size
                kept, rate = muon_rates(groups[parameter], shape)
                part.mul_(kept).add_(its, alpha=-rate)

    def _sizes(self, parameter: torch.Tensor, here: torch.Tensor) -> tuple[int, list[int], list[int]]:
        """Return the dim along which a matrix has parts, their full sizes, and their sizes in ``here``."""
        layout, axis = self.parts.get(parameter), self.axes.get(parameter)
        if layout is None:
            return 0, [self[parameter][0]], [here.shape[0]]
        ranges = [(0, block.count) if axis is None else block.ranges[axis.rank] for block in layout.blocks]
        local = [(stop - start) * block.width for block, (start, stop) in zip(layout.blocks, ranges, strict=True)]
        return layout.dim, [block.size for block in layout.blocks], local


def fused(plan: TensorPlan) -> Layout | None:
    """Return the layout of a matrix that consists of several side by side (q | k | v), or None."""
    return plan.layout if plan.layout is not None and len(plan.layout.blocks) > 1 and len(plan.shape) == 2 else None

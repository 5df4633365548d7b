"""Steps of torch's Muon that torch itself has for whole matrices alone: of shards, and of fused matrices part by part.

The direction of a sharded matrix's update comes together on the rank that orthogonalizes it; each rank gets its shard
of the result. Momentum, decay and the update are element by element, so each rank has those of its shard.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

from autopar.data_parallel.whole_parameters import WholeParameters
from autopar.foreign.tensors import muon_rates, newton_schulz
from autopar.layout import Layout
from autopar.plan.plan import TensorPlan


class MuonSteps:
    """The parameters of a Muon that are stepped here and not by torch's own ``step``.

    Attributes:
        shards: those whose momentum is sharded as they are.
        taken: what this step is going to step for them.
    """

    def __init__(self) -> None:
        self.shards = WholeParameters()
        self.taken: dict[torch.Tensor, torch.Tensor] = {}
        self._apart: Container[torch.Tensor] = ()
        self._fused: dict[torch.Tensor, Layout] = {}

    def __len__(self) -> int:
        return len(self.shards) + len(self._fused)

    def split(self, parameters: Mapping[torch.Tensor, TensorPlan]) -> None:
        """Step the fused ones among these parameters part by part."""
        self._fused.update({p: layout for p, plan in parameters.items() if (layout := fused(plan)) is not None})

    def take(
        self, stepped: Mapping[torch.Tensor, torch.Tensor], apart: Container[torch.Tensor]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Take what is stepped here, until :meth:`step`; return the rest.

        Args:
            stepped: parameter -> what is stepped, with its gradient: itself, its fp32 weight, or a whole one.
            apart: parameters into which the caller writes what was stepped for them.
        """
        self.taken = {p: tensor for p, tensor in stepped.items() if p in self.shards or p in self._fused}
        self._apart = apart
        return {p: tensor for p, tensor in stepped.items() if p not in self.taken}

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Muon) -> None:
        """Step what was taken. A collective of the axes over which it is sharded."""
        taken, self.taken = self.taken, {}
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        gradients = self.shards.gradients({p: tensor for p, tensor in taken.items() if p in self.shards})
        gradients |= {p: t.grad for p, t in taken.items() if p not in self.shards and t.grad is not None}
        directions = {p: _direction(g, optimizer.state[p], groups[p]) for p, g in gradients.items()}
        for parameter, update in self._updates(directions, groups).items():
            weight = taken[parameter]
            dim, whole, here = self._parts(parameter, weight)
            for size, part, its in zip(whole, weight.split(here, dim), update.split(here, dim), strict=True):
                shape = list(self.shards.shape(parameter) if parameter in self.shards else weight.shape)
                shape[dim] = size
                kept, rate = muon_rates(groups[parameter], shape)
                part.mul_(kept).add_(its, alpha=-rate)
        for parameter, tensor in taken.items():
            if tensor is not parameter and parameter not in self._apart:
                parameter.data.copy_(tensor)
                tensor.grad = None

    def _updates(
        self, directions: Mapping[torch.Tensor, torch.Tensor], groups: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Return what this rank adds to what it steps: directions orthogonalized as whole matrices, or their parts."""
        sharded = {p: direction for p, direction in directions.items() if p in self.shards}
        found = {p: direction for p, direction in directions.items() if p not in self.shards}
        found |= self.shards.collect(sharded)
        for parameter, direction in found.items():
            dim, whole, _ = self._parts(parameter, direction)
            pieces = [newton_schulz(part, groups[parameter]) for part in direction.split(whole, dim)]
            found[parameter] = torch.cat(pieces, dim)
        for parameter, direction in sharded.items():
            # The dtype in which torch iterates, which ranks that only receive a shard of the result do not see.
            dtype = newton_schulz(direction.new_zeros(1, 1), {**groups[parameter], "ns_steps": 0}).dtype
            sharded[parameter] = torch.empty_like(direction, dtype=dtype)
        self.shards.deal(found, sharded)
        return {p: sharded[p] if p in sharded else found[p] for p in directions}

    def _parts(self, parameter: torch.Tensor, here: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return the dim along which a matrix is orthogonalized part by part, the parts' sizes, and their shards'."""
        layout, axis = self._fused.get(parameter), self.shards.axes.get(parameter)
        if layout is None:
            return 0, (self.shards.shape(parameter)[0],), (here.shape[0],)
        whole = tuple(block.size for block in layout.blocks)
        if axis is None:
            return layout.dim, whole, whole
        ranges = [(block.width, *block.ranges[axis.rank]) for block in layout.blocks]
        return layout.dim, whole, tuple((stop - start) * width for width, start, stop in ranges)


def fused(plan: TensorPlan) -> Layout | None:
    """Return the layout of a matrix that is several side by side (q | k | v); None of any other tensor."""
    several = plan.layout is not None and len(plan.layout.blocks) > 1 and len(plan.shape) == 2
    return plan.layout if several else None


def _direction(gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> torch.Tensor:
    """Take a gradient into the momentum, and return along which of them Muon goes."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    momentum: torch.Tensor = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

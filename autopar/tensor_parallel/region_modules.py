"""Region modules: plain modules at the border of a sharded region, or with parameters inside it.

A class swap turns a plain module into one, as for parallel layers. The rule says what happens around its forward:

* ``inputs``: an argument is sharded to the local units (ALiBi, a bias per head),
* ``region``: every floating-point argument enters the region, and every output is summed (experts as bare parameters);
  with ``opens`` arguments only enter, with ``closes`` outputs are only summed,
* ``enter_output``: the output enters the region (the part of a key that all heads use),
* ``once``: the output is replicated inside a region and counts on the first rank only,
* ``gathered``: the first argument is gathered, and the outputs are sharded again (a module that needs all heads).

While such a module runs, its parameters that meet sharded activations have their gradients summed, also when another
module reads them (a mixer reads the weight of its convolution). At other times they are the Parameters themselves.

Norms over sharded features run their forward on the local features with the local weight. A mean over the features
(RMSNorm: Zhang and Sennrich 2019; LayerNorm: Ba et al. 2016) becomes a sum over ranks, forward and backward. Ranks
exchange two floats per token, not the features. Casts, gates and offsets stay in the order of the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.compat.tensors import tree_map, tree_map_only
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import copy, gather, reduce, scatter, sum_replicas
from autopar.errors import PolicyError
from autopar.layout import Layout
from autopar.plan.plan import InputPlan, ModulePlan
from autopar.swap import argument_names, mixed_class
from autopar.tensor_parallel.regions import Region


class RegionModule:
    """Mixin of a module at the border of a sharded region, or with parameters whose gradients are summed."""

    tp: Axis
    region: Region
    autopar: ModulePlan
    replicated_ends = False  # True: input and output are replicated, though the forward may shard in between

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.autopar
        if plan.inputs:
            args, kwargs = self._with_inputs(plan.inputs, args, kwargs)
        opens, closes = plan.rule == "region" and not plan.closes, plan.rule == "region" and not plan.opens
        if opens:  # region.enter: readers of one tensor share a copy, since a layer closes the region
            args, kwargs = _map_floats(self.region.enter if plan.opens else self._enter, (args, kwargs))
            self.region.draw_per_rank(self.training)  # type: ignore[attr-defined]
        elif plan.rule == "gathered":
            x, dim = args[0], self._dim
            x = gather(x, self.tp, self._features(x.shape[dim], full=False), dim)
            args = (self.region.mark_replicated(x), *args[1:])
        self.region.depth += 1
        try:
            y = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.region.depth -= 1
            if closes:  # in finally, because checkpointing may end a recomputation with an exception
                self.region.leave()
        if closes:
            return _map_floats(lambda x: self.region.mark_replicated(reduce(x, self.tp)), y)
        if plan.rule == "gathered":
            return tree_map(self._reshard, y)
        if plan.rule == "once":
            return _map_floats(lambda x: x * float(self.tp.rank == 0), y)
        return _map_floats(self._enter, y) if plan.enter_output else y

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        return self.region.alias(copy(x, self.tp))

    def _reshard(self, y: Any) -> Any:
        if not isinstance(y, torch.Tensor) or y.ndim <= self._dim:
            return y
        return self.region.mark_sharded(scatter(y, self.tp, self._features(y.shape[self._dim], full=True), self._dim))

    @property
    def _dim(self) -> int:
        assert self.autopar.layout is not None
        return self.autopar.layout.dim

    def _features(self, size: int, full: bool) -> Layout:
        """Return the layout along a dim of ``size`` for units of any width; ``full``: the size of the full tensor."""
        layout = self.autopar.layout
        assert layout is not None
        width = size // (layout.size if full else layout.local_size(self.tp.rank))
        return Layout.of(layout.dim, [replace(block, width=block.width * width) for block in layout.blocks])

    def _with_inputs(
        self, inputs: tuple[InputPlan, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with the tensors in ``inputs`` sharded, also those in tuples."""
        names, values, named = argument_names(self), list(args), dict(kwargs)
        for planned in inputs:
            place, layout = names.index(planned.name), planned.layout
            holder, key = (values, place) if place < len(values) else (named, planned.name)
            if place < len(values) or planned.name in named:
                sharded = functools.partial(self._shard_input, layout=layout)
                holder[key] = tree_map_only(torch.Tensor, sharded, holder[key])  # type: ignore[index]
        return tuple(values), named

    def _shard_input(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the local units of an argument; the dim of ``layout`` may hold the units several times."""
        dim = layout.dim % x.ndim
        if x.shape[dim] % layout.size or x.shape[dim] == 1:
            return x  # broadcast over the units
        if x.shape[dim] == layout.size:
            return self.region.mark_sharded(scatter(x, self.tp, layout, dim))
        parts = scatter(x.unflatten(dim, (-1, layout.size)), self.tp, layout, dim + 1)
        return self.region.mark_sharded(parts.flatten(dim, dim + 1))  # [..., batch, heads, ...]


def _map_floats(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Apply ``function`` to the floating-point tensors in nested values."""
    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, values)


def _gradient_property(name: str) -> property:
    def read(self: Any) -> Any:
        if name in self._buffers:
            return self._buffers[name]  # no gradient to sum
        parameter = self._parameters[name]
        if not self.region.depth or parameter is None:
            return parameter
        plan: ModulePlan = self.autopar
        if name in plan.summed:
            used = self.region.mark_summed(copy(parameter, self.tp), parameter)
            return used * float(self.tp.rank == 0) if name in plan.once else used
        layout = plan.layouts[name]
        return sum_replicas(parameter, self.tp, layout) if layout.replicated else parameter

    def write(self: Any, value: Any) -> None:
        nn.Module.__setattr__(self, name, value)

    return property(read, write)


@functools.cache
def region_class(plain: Any, mixin: Any, names: tuple[str, ...]) -> Any:
    """Return a class of ``mixin`` (a :class:`RegionModule`) and ``plain`` that sums gradients of ``names``."""
    if names:
        mixin = type(mixin.__name__, (mixin,), {name: _gradient_property(name) for name in names})
    return mixed_class(mixin, plain, f"{mixin.__name__}{plain.__name__}")


class ShardedNorm(RegionModule):
    """A norm over sharded features: ``[..., n/tp] -> [..., n/tp]``, weight Shard(0)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with GlobalMeans(self.autopar, self.tp, (*args, *kwargs.values())):
            return super().forward(*args, **kwargs)


class GlobalMeans(TorchFunctionMode):
    """Compute means over the last dim from the features of all ranks; ``given``: arguments of the norm."""

    def __init__(self, plan: ModulePlan, axis: Axis, given: tuple[Any, ...]) -> None:
        super().__init__()
        assert plan.layout is not None
        self.dims = max((x.ndim for x in given if isinstance(x, torch.Tensor)), default=0)
        self.layout, self.groups, self.axis, self.where = plan.layout, plan.groups, axis, plan.where

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.mean, torch.Tensor.mean):
            return self._mean(*args, **kwargs)
        if func in (torch.sum, torch.Tensor.sum) and self.groups is None:
            return self._mean(*args, **kwargs) * self.layout.size
        if func in (F.layer_norm, torch.layer_norm):
            return self._layer_norm(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return self._rms_norm(*args, **kwargs)
        if func in _REDUCTIONS:
            raise PolicyError(f"a norm over sharded features must not call {func.__name__}\n{_OTHER_RULES}", self.where)
        return func(*args, **kwargs)

    def _mean(self, x: torch.Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> torch.Tensor:
        last = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        if last not in (-1, x.ndim - 1):
            words = f"a norm over sharded features must take its mean over the last dim, got dim {dim}\n{_OTHER_RULES}"
            raise PolicyError(words, self.where)
        total = self._total(x.to(kwargs["dtype"]) if kwargs.get("dtype") else x)
        return total if keepdim else total.squeeze(-1)

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over the features of all ranks, or of each group; the last dim is kept."""
        layout, axis = self.layout, self.axis
        if self.groups is not None:
            return self._mean_of_groups(x, self.groups)
        if x.shape[-1] != layout.local_size(axis.rank) or x.ndim > self.dims:
            raise PolicyError(
                f"expected a mean over {layout.local_size(axis.rank)} of {layout.size} sharded features in a norm, got "
                f"{x.shape[-1]}\n  For a norm of groups write {{norm_over: ..., within: GROUPS}} or {{sharded: ...}}.",
                self.where,
            )
        if layout.replicated:  # only the lowest of the ranks that hold an element adds it
            owned = x.new_zeros(x.shape[-1])
            for start, stop in layout.owned_local(axis.rank):
                owned[start:stop] = 1
            x = x * owned
        return _over_ranks(x.sum(-1, keepdim=True), axis) / layout.size

    def _mean_of_groups(self, x: torch.Tensor, groups: Layout) -> torch.Tensor:
        axis = self.axis
        if not groups.replicated:
            return x.mean(-1, keepdim=True)  # groups are not split
        ((start, stop),) = groups.ranges(axis.rank)
        sums = x.sum(-1, keepdim=True)  # [..., groups of this rank, 1]
        own = torch.zeros(groups.size, device=x.device, dtype=x.dtype)
        own[start:stop] = 1
        placed = sums * own if stop - start == 1 else sums  # [..., 1, groups]
        if x.ndim == 1 or stop - start != 1:
            raise PolicyError(f"expected one group per rank where ranks share groups, got {stop - start}", self.where)
        gathered = _over_ranks(placed, axis)
        return gathered[..., start:stop] / (self.layout.size // groups.size)

    def _layer_norm(
        self, x: torch.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        y = self._rms_norm(wide - self._total(wide), shape, None, eps).to(x.dtype)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def _rms_norm(self, x: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        eps = torch.finfo(wide.dtype).eps if eps is None else eps
        y = (wide * torch.rsqrt(self._total(wide * wide) + eps)).to(x.dtype)
        return y if weight is None else y * weight


def _over_ranks(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over the ranks in the forward and the backward pass, since each rank uses the sum for its features."""
    return copy(reduce(x, axis), axis)


_OTHER_RULES = "  Use the rule {replicated: ...} or {sharded: ...}."
_REDUCTIONS = {
    *(torch.var, torch.Tensor.var, torch.std, torch.Tensor.std, torch.norm, torch.Tensor.norm, F.normalize),
    *(torch.linalg.vector_norm, torch.sum, torch.Tensor.sum, torch.var_mean, torch.amax, torch.Tensor.amax),
}

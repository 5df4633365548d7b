"""Region modules: no layers of their own kind, but at the border of a sharded region, or with parameters inside it.

A plain module becomes one by a class swap, like the layers. Around its own forward:

* ``inputs``: an argument is sharded to this rank's units (ALiBi, a bias per head),
* ``region``: every floating-point argument enters the region, every output is summed (experts as bare parameters);
  with ``opens`` only the first, with ``closes`` only the second,
* ``enter_output``: the output enters the region (the part of a key that all heads use),
* ``once``: its output, replicated inside a region, counts on the first rank only,
* ``gathered``: its first argument is gathered, its outputs are sharded again (what works on all heads at once).

While one of them runs, parameters that work on sharded activations are read with their incoming gradient summed, by any
reader (a mixer reads the weight of its convolution); otherwise they are the Parameters themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import copy, gather, reduce, scatter, sum_replicas
from autopar.foreign.tensors import tree_map
from autopar.layout import Layout
from autopar.plan.plan import InputPlan, ModulePlan
from autopar.swap import mixed_class
from autopar.tensor_parallel.regions import Region


class RegionModule:
    """Mixin of a module at the border of a sharded region, or with parameters whose gradients are summed."""

    tp: Axis
    region: Region
    autopar: ModulePlan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.autopar
        if plan.inputs:
            args, kwargs = with_inputs(type(self), plan.inputs, args, kwargs, self._shard_input)
        opens, closes = plan.rule == "region" and not plan.closes, plan.rule == "region" and not plan.opens
        if opens:  # readers of one tensor get the same copy where a layer closes the region
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
            if closes:  # checkpointing ends a recomputation by an exception from inside
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
        """The layout along a dim of ``size`` (of the full tensor, or of this rank's shard) for units of any width."""
        layout = self.autopar.layout
        assert layout is not None
        width = size // (layout.size if full else layout.local_size(self.tp.rank))
        return Layout.of(layout.dim, [replace(block, width=block.width * width) for block in layout.blocks])

    def _shard_input(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        sharded = shard_input(x, layout, lambda x, dim: scatter(x, self.tp, layout, dim))
        return x if sharded is x else self.region.mark_sharded(sharded)


def with_inputs(
    kind: Any,
    inputs: tuple[InputPlan, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shard: Callable[[torch.Tensor, Layout], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module of class ``kind`` with those tensors sharded that are planned to be."""
    names = argument_names(kind)
    values, named = list(args), dict(kwargs)
    for planned in inputs:
        place = names.index(planned.name)
        if place < len(values) and isinstance(values[place], torch.Tensor):
            values[place] = shard(values[place], planned.layout)
        elif isinstance(named.get(planned.name), torch.Tensor):
            named[planned.name] = shard(named[planned.name], planned.layout)
    return tuple(values), named


def shard_input(x: torch.Tensor, layout: Layout, shard: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Return a rank's units of an argument, as often as they lie in the dim of ``layout``; ``shard(x, dim)`` cuts."""
    dim = layout.dim % x.ndim
    if x.shape[dim] % layout.size or x.shape[dim] == 1:
        return x  # the same for all units
    if x.shape[dim] == layout.size:
        return shard(x, dim)
    return shard(x.unflatten(dim, (-1, layout.size)), dim + 1).flatten(dim, dim + 1)  # [..., batch, heads, ...]


def _map_floats(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Map the floating-point tensors in nested values."""
    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, values)


@functools.cache
def argument_names(kind: type[nn.Module]) -> list[str]:
    """Return the names of the arguments that a parallel module's plain forward takes."""
    plain = next(c for c in kind.__mro__ if issubclass(c, nn.Module) and not issubclass(c, RegionModule))
    return [name for name in inspect.signature(plain.forward).parameters if name != "self"]


def _gradient_property(name: str) -> property:
    def read(self: Any) -> Any:
        if name in self._buffers:
            return self._buffers[name]  # has no gradient
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
    """Return ``plain`` after ``mixin`` (a :class:`RegionModule`); gradients of the parameters ``names`` are summed."""
    if names:
        mixin = type(mixin.__name__, (mixin,), {name: _gradient_property(name) for name in names})
    return mixed_class(mixin, plain, f"{mixin.__name__}{plain.__name__}")

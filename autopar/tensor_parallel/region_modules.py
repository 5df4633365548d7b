"""Modules that are not layers of their own kind but border on the sharded region, or hold parameters inside it.

A module becomes one by a change of class, like the layers. Around its own forward:

* ``inputs``: an argument is cut to this rank's units (ALiBi, a bias per head),
* ``region``: every floating-point argument enters the region, every output is summed (experts as bare parameters);
  with ``opens`` only the first, with ``closes`` only the second,
* ``enter_output``: the output enters the region (the part of a key that all heads share),
* ``once``: its output, the same on all ranks inside a region, counts on the first one only,
* ``gathered``: its first argument is gathered, its outputs are cut again (what works on all heads at once).

While one of them runs, parameters that work on shared-out activations are read with their incoming gradient summed, by
whoever reads them (a mixer reads the weight of its convolution); otherwise they are the Parameters themselves.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import copy, gather, reduce, scatter, sum_replicas
from autopar.layout import Layout
from autopar.plan.plan import InputPlan, ModulePlan
from autopar.tensor_parallel.regions import Region

__all__ = ["Boundary", "bounded_class"]


class Boundary:
    """A module with something around its forward, or with parameters that are read in their own way."""

    tp: Axis
    region: Region
    autopar: ModulePlan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.autopar
        if plan.inputs:
            args, kwargs = self._cut_inputs(args, kwargs)
        opens, closes = plan.rule == "region" and not plan.closes, plan.rule == "region" and not plan.opens
        if opens:
            args, kwargs = tree_map(self._enter_once if plan.opens else self._enter, (args, kwargs))
            self.region.draw_apart(self.training)  # type: ignore[attr-defined]
        elif plan.rule == "gathered":
            x, dim = args[0], self._dim
            x = gather(x, self.tp, self._features(x.shape[dim], whole=False), dim)
            args = (self.region.close(x), *args[1:])
        self.region.depth += 1
        try:
            y = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.region.depth -= 1
            if closes:  # checkpointing ends a recomputation by an exception from inside
                self.region.leave()
        if closes:
            return tree_map(self._sum, y)
        if plan.rule == "gathered":
            return tree_map(self._cut_again, y)
        if plan.rule == "once":
            return tree_map(self._first_only, y)
        return tree_map(self._enter, y) if plan.enter_output else y

    def _enter(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return self.region.alias(copy(x, self.tp))
        return x

    def _enter_once(self, x: Any) -> Any:
        """As layers do: those that read the same tensor get the same copy."""
        return self.region.enter(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def _sum(self, y: Any) -> Any:
        return self.region.close(reduce(y, self.tp)) if isinstance(y, torch.Tensor) and y.is_floating_point() else y

    def _first_only(self, y: Any) -> Any:
        return y * float(self.tp.rank == 0) if isinstance(y, torch.Tensor) and y.is_floating_point() else y

    def _cut_again(self, y: Any) -> Any:
        if not isinstance(y, torch.Tensor) or y.ndim <= self._dim:
            return y
        return self.region.open(scatter(y, self.tp, self._features(y.shape[self._dim], whole=True), self._dim))

    @property
    def _dim(self) -> int:
        assert self.autopar.layout is not None
        return self.autopar.layout.dim

    def _features(self, size: int, whole: bool) -> Layout:
        """The layout along a dim of ``size`` (of the whole, or of this rank's part), however wide its units are."""
        layout = self.autopar.layout
        assert layout is not None
        width = size // (layout.size if whole else layout.local_size(self.tp.rank))
        return Layout.of(layout.dim, [replace(block, width=block.width * width) for block in layout.blocks])

    def _cut_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = _argument_names(type(self))  # type: ignore[arg-type]
        values = list(args)
        for cut in self.autopar.inputs:
            place = names.index(cut.name)
            if place < len(values):
                values[place] = self._cut_input(values[place], cut)
            elif cut.name in kwargs:
                kwargs[cut.name] = self._cut_input(kwargs[cut.name], cut)
        return tuple(values), kwargs

    def _cut_input(self, x: Any, cut: InputPlan) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        layout, dim = cut.layout, cut.layout.dim % x.ndim
        if x.shape[dim] % layout.size or x.shape[dim] == 1:
            return x  # the same for all units
        if x.shape[dim] == layout.size:
            return self.region.open(scatter(x, self.tp, layout, dim))
        parts = x.unflatten(dim, (-1, layout.size))  # [..., batch, heads, ...]
        return self.region.open(scatter(parts, self.tp, layout, dim + 1).flatten(dim, dim + 1))


@functools.cache
def _argument_names(kind: type[nn.Module]) -> list[str]:
    plain = next(c for c in kind.__mro__ if issubclass(c, nn.Module) and not issubclass(c, Boundary))
    return [name for name in inspect.signature(plain.forward).parameters if name != "self"]


def _read_in_forward(name: str) -> property:
    def read(self: Any) -> Any:
        if name in self._buffers:
            return self._buffers[name]  # has no gradient
        parameter = self._parameters[name]
        if not self.region.depth or parameter is None:
            return parameter
        plan: ModulePlan = self.autopar
        if name in plan.summed:
            used = self.region.summed(copy(parameter, self.tp), parameter)
            return used * float(self.tp.rank == 0) if name in plan.once else used
        layout = plan.layouts[name]
        return sum_replicas(parameter, self.tp, layout) if layout.replicated else parameter

    def write(self: Any, value: Any) -> None:
        nn.Module.__setattr__(self, name, value)

    return property(read, write)


@functools.cache
def bounded_class(plain: type[nn.Module], first: type[Any], names: tuple[str, ...]) -> type[nn.Module]:
    """``plain`` with ``first`` (a :class:`Boundary`) before it, and ``names`` read in their own way in its forward."""
    return type(f"{first.__name__}{plain.__name__}", (first, plain), {name: _read_in_forward(name) for name in names})

"""Parameters that work on rows of the sequence: their gradients, of each rank's rows, are summed over the ranks.

Summed is the incoming gradient, not the accumulated one, so that micro-batches add up; once for all such parameters of
a block: they enter the block through one function, whose backward runs when the gradients of all of them are there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import reduce_
from autopar.distributed.derivatives import keep_none, single_backward
from autopar.distributed.profiling import named_collective
from autopar.swap import mixed_class
from autopar.tensor_parallel.regions import Region

__all__ = ["ReadByRows", "reader_class", "summed_over_rows"]


class _SumRows(torch.autograd.Function):
    keeps_nothing = True

    @staticmethod
    def forward(ctx: Any, axis: Axis, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keep_none(ctx)
        ctx.axis = axis
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @named_collective("all-reduce: gradients of parameters that work on rows of the sequence")
    @single_backward
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, *sum_flat(gradients, ctx.axis)


def sum_flat(tensors: Sequence[torch.Tensor | None], axis: Axis) -> list[torch.Tensor | None]:
    """Sum tensors over the axis in one all-reduce for each dtype, out of place; all ranks have the same ones."""
    found: list[torch.Tensor | None] = [None] * len(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors if x is not None):
        chosen = [(place, x) for place, x in enumerate(tensors) if x is not None and x.dtype == dtype]
        flat = reduce_(torch.cat([x.reshape(-1) for _, x in chosen]), axis)
        for (place, x), part in zip(chosen, flat.split([x.numel() for _, x in chosen]), strict=True):
            found[place] = part.view_as(x)
    return found


def summed_over_rows(parameters: Sequence[nn.Parameter | None], axis: Axis) -> Mapping[int, torch.Tensor]:
    """Return what stands for each parameter in a forward with rows, by id: its gradient is summed over the axis."""
    trained = [p for p in parameters if p is not None and p.requires_grad] if torch.is_grad_enabled() else []
    if not trained:
        return {}
    return {id(p): used for p, used in zip(trained, _SumRows.apply(axis, *trained), strict=True)}


class ReadByRows:
    """Class before that of a module whose own parameters work on rows."""

    rows_region: Region


def _property(name: str) -> property:
    def read(self: Any) -> Any:
        parameter = self._parameters[name]
        used = self.rows_region.rows_of_parameters
        return used.get(id(parameter), parameter) if used else parameter

    def write(self: Any, value: Any) -> None:
        nn.Module.__setattr__(self, name, value)

    return property(read, write)


@functools.cache
def _reader(names: tuple[str, ...]) -> type:
    return type(ReadByRows.__name__, (ReadByRows,), {name: _property(name) for name in names})


def reader_class(plain: type[nn.Module], names: tuple[str, ...]) -> Any:
    """Return the class of a module that reads its parameters ``names`` as :func:`summed_over_rows` gives them."""
    return mixed_class(_reader(names), plain)  # type: ignore[arg-type]

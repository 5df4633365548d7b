"""Rows that leave the ranks they lie on: gathered, and in the backward the gradients of all ranks summed for each.

Behind that every rank computes the whole, and a loss is the same on all of them. In front of it the gradient on each
rank is that of its rows: a part, which whoever averages adds up. What is not a sum of parts (a penalty on gradients)
cannot be made of them.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gather_sum, reduce
from autopar.distributed.derivatives import keep_none, single_backward
from autopar.distributed.profiling import named_collective
from autopar.foreign.tensors import tree_map
from autopar.layout import Layout

__all__ = ["entered", "join"]


def join(x: torch.Tensor, axis: Axis, dim: int, rows: Layout) -> torch.Tensor:
    """Gather rows along ``dim``, ``[..., rows/cp, ...] -> [..., rows, ...]``.

    Raises:
        ConfigError: in a backward that is to be differentiated.
    """
    if x.requires_grad and torch.is_grad_enabled():
        x = _Parts.apply(x)
    return gather_sum(x, axis, dim, rows)


def entered(values: Any, axis: Axis) -> Any:
    """Return what the model is given, so that tensors which want a gradient get the whole one, on every rank."""

    def whole(x: Any) -> Any:
        wants = type(x) in (torch.Tensor, torch.nn.Parameter) and x.requires_grad and torch.is_grad_enabled()
        return _Entered.apply(x, axis) if wants else x

    return tree_map(whole, values)


class _Entered(torch.autograd.Function):
    """In front of it gradients are those of the whole, behind it parts of them, as large as an average needs them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @named_collective("all-reduce: gradient of what the model is given")
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce(grad, ctx.axis) / ctx.axis.size, None


class _Parts(torch.autograd.Function):
    """Behind it gradients are those of the whole, in front of it parts of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        keep_none(ctx)
        return x.view_as(x)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad

"""The input gradient of a sharded region is summed over the ranks while its first layer's weight gradient is computed.

[Note: order of the backward pass] The column-parallel layers at the entry of a region read one copy of their input,
whose gradient is all-reduced (:func:`~autopar.distributed.collectives.copy`). torch's engine runs of all nodes that are
ready the one that was made last. So the nodes are made in this order, and run in the reverse one:

    wait          the gradient of x: waits for the sum, made first
    weight        the gradient of the first layer's weight, [out/tp, in]
    launch        the gradient of the copy: all layers have added to it, the all-reduce is begun
    y = x W^T     the first layer, with a weight that autograd does not see: its input gradient
    attach        hands the gradient of y to the layer and to ``weight``

A backward with ``create_graph=True`` overlaps nothing: ``wait`` sums. There the gradient of x has to depend on W, and
that of W on x, but the layer and ``weight`` have detached ones. ``attach`` adds the difference: 0, with derivatives.

Megatron-LM has one function for a layer instead, and so one all-reduce for each of q, k and v
(core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autopar.distributed.autograd_functions import any_order, is_watched, keep_none, named_collective, record
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import copy, reduce, start_all_reduce


class WeightGradient(NamedTuple):
    """How the weight's gradient follows from the input, ``[tokens, in]``, and the output's gradient.

    Attributes:
        out_dim: dim of the weight that holds the output features.
        of: ``(x, grad) -> gradient``, ``grad`` being ``[tokens, out/tp]``.
        layer: ``(x, weight) -> [tokens, out/tp]``, of which this is the gradient.
    """

    out_dim: int
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


LINEAR = WeightGradient(0, lambda x, grad: grad.t() @ x, lambda x, weight: x @ weight.t())  # [out/tp, in]
CONV1D = WeightGradient(1, lambda x, grad: x.t() @ grad, lambda x, weight: x @ weight)  # [in, out/tp]


class Late(NamedTuple):
    """A weight's gradient beside its layer.

    Attributes:
        gradient: how it follows.
        entered: what makes the layer's input ``[tokens, in]`` of ``x``, differentiable.
        tensor: ``[tokens, out/tp]`` without memory, the output of :class:`LateWeight`.
        weight, x: of the layer, with their graphs.
    """

    gradient: WeightGradient
    entered: Callable[[torch.Tensor], torch.Tensor]
    tensor: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    x: torch.Tensor | None = None


def can_compute_late(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the gradient of ``weight`` can be computed from ``x``, or rows of it, next to the layer."""
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and type(x) is torch.Tensor
        and x.dtype == weight.dtype
        and not torch.compiler.is_compiling()
        and (x.is_meta or not torch.is_autocast_enabled(x.device.type))
        and not is_watched(x)  # what the layer returns was kept: it must not be written to
    )


def enter(x: torch.Tensor, weight: torch.Tensor, gradient: WeightGradient, axis: Axis) -> tuple[torch.Tensor, Late]:
    """Copy ``x``, ``[..., in]``, into a sharded region; its gradient is summed beside that of ``weight``.

    Returns:
        The copy, and what :func:`attach` needs.
    """
    pending = _Pending()
    waiting = _Wait.apply(x, axis, pending)
    tokens = x.detach().flatten(0, -2)
    made = LateWeight.apply(weight, tokens, len(tokens), gradient, lambda x: x)
    late = Late(gradient, lambda x: copy(x, axis).flatten(0, -2), made, weight, x)
    return _Launch.apply(waiting, axis, pending), late


def attach(y: torch.Tensor, late: Late) -> torch.Tensor:
    """Return ``y``, in place: the layer's output, ``[tokens, out/tp]``, no view, computed with a detached weight."""
    return _Attach.apply(y, late.tensor, late.weight, late.x, late)


class _Pending:
    """The all-reduce between its launch and its end."""

    wait: Callable[[], None] | None = None


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, pending: _Pending) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.pending = axis, pending
        return x.view_as(x)


class _Wait(_Identity):
    @staticmethod
    @any_order(lambda ctx, grad: (reduce(grad, ctx.axis), None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        wait, ctx.pending.wait = ctx.pending.wait, None
        if wait is not None:
            with record(lambda: "wait: gradient at the entry of a sharded region"):
                wait()
        return grad, None, None


class _Launch(_Identity):
    @staticmethod
    @named_collective("all-reduce: gradient at the entry of a sharded region")
    @any_order(lambda ctx, grad: (grad, None, None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may hand it to two branches
        ctx.pending.wait = start_all_reduce(grad, ctx.axis)
        return grad, None, None


def _weight_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of a weight, differentiable in ``grad``."""
    (x,) = ctx.saved_tensors
    return ctx.gradient.of(ctx.whole(x), grad), None, None, None, None


class LateWeight(torch.autograd.Function):
    """A weight's gradient, computed when that of what a layer made comes: ``[tokens, out/tp]``, without memory.

    Kept is ``x``, of which ``whole`` makes the layer's input ``[tokens, in]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        x: torch.Tensor,
        tokens: int,
        gradient: WeightGradient,
        whole: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        keep_none(ctx)
        ctx.gradient, ctx.whole = gradient, whole
        ctx.save_for_backward(x)
        return weight.new_empty(()).expand(tokens, weight.shape[gradient.out_dim])

    @staticmethod
    @any_order(_weight_gradient)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _weight_gradient(ctx, grad)


def _owed(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of the weight and of the input that are 0 and depend on both, as the layer's own would."""

    def of(weight: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor]:
        y = ctx.late.gradient.layer(ctx.late.entered(x), weight)  # [tokens, out/tp]
        return torch.autograd.grad(y, (weight, x) if x.requires_grad else weight, grad, create_graph=True)

    if not torch.is_grad_enabled():
        return None, None
    saved = ctx.saved_tensors
    full = of(*(each.view_as(each) for each in saved))  # a view: not what else a tied weight is read by
    seen = of(*(each.detach().requires_grad_(each.requires_grad) for each in saved))
    owed = [one - other for one, other in zip(full, seen, strict=True)]
    return owed[0], owed[1] if len(owed) > 1 else None


class _Attach(torch.autograd.Function):
    keeps_nothing = True  # for its own backward, which can run again, and for one of its inputs

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, late: Late
    ) -> torch.Tensor:
        keep_none(ctx)
        ctx.late = Late(late.gradient, late.entered)
        ctx.save_for_backward(weight, x)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @any_order(lambda ctx, grad: (grad, grad, *_owed(ctx, grad), None))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, grad, None, None, None

"""This rank's part of logits whose vocabulary is sharded, and what may be done to it instead of to the whole logits.

A loss does little to logits before the cross entropy: it takes some tokens, flattens them, casts, scales, caps, adds a
bias. Each of that can be done to ``[..., vocab/tp]``, and what works on tokens even to ``[..., hidden]``, before the
head's product.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from autopar.compat.tensors import version_of
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather, copy, scatter
from autopar.errors import ConsistencyError
from autopar.layout import Layout
from autopar.tensor_parallel.loss import sharded_cross_entropy
from autopar.tensor_parallel.sharded_logits import Change, Gradients, LogitsPart


class Head(NamedTuple):
    """The product that makes logits: ``[..., hidden] -> [..., vocab/tp]``.

    Attributes:
        seen: of the forward: the weights' versions then, and whether a gradient went back.
    """

    weight: torch.Tensor  # [vocab/tp, hidden]
    bias: torch.Tensor | None  # [vocab/tp]
    seen: HeadState

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def check(self) -> None:
        """Raise ConsistencyError if the product would be another one than in the forward."""
        state = self.seen
        if state.went_back or any(version_of(x) != version for x, version in state.versions):
            raise ConsistencyError(
                "logits are read after the backward pass or a step of the optimizer. With loss.chunk they are computed "
                "when they are read,\n  from weights that are others by then: read them before, or use loss: {chunk: 0}"
            )


class HeadState:
    """A head's weights at the time when logits were asked for."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.versions = [(x, version_of(x)) for x in weights]
        self.went_back = False


@dataclass(frozen=True)
class Shards(LogitsPart):
    """This rank's columns of the logits, or what they are made of.

    Attributes:
        rows: ``[..., vocab/tp]``, or ``[..., hidden]`` with a ``head``.
        layout: of the vocabulary over ``axis``; each rank has one range.
        dtype: of the logits; ``rows`` may still be narrower.
        name: which logits they are, in words that are the same on all ranks.
        chunk: tokens whose logits the loss makes at a time, with a ``head``.
        head: makes ``[..., vocab/tp]`` of ``rows``; None if they are that.
        changes: what is done to the product, element by element.
    """

    rows: torch.Tensor
    axis: Axis
    layout: Layout
    dtype: torch.dtype
    name: str = ""
    chunk: int = 0
    head: Head | None = None
    changes: tuple[Change, ...] = ()

    kind = "columns"
    advice = (
        "Whole logits are gathered when they are read, which takes every tensor-parallel rank: read them on all of\n"
        "  them (if rank == 0: around the print, not around the reading: logits.argmax(-1), logits.cpu(), whatever "
        "needs\n  the vocabulary; logits + 0 does not), or have them gathered in the forward: under\n"
        "  torch.no_grad(), or always by loss: {gather_logits: always}. loss: {read_timeout: ...} waits longer."
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """``[..., vocab]``, of the whole logits."""
        return (*self.rows.shape[:-1], self.layout.size)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that receive gradients."""
        if self.head is None:
            return [self.rows]
        return [self.rows, *(x for x in (self.head.weight, self.head.bias) if x is not None)]

    def of_inputs(self, inputs: list[torch.Tensor]) -> Shards:
        """Return the same shards made of other ``inputs``."""
        if self.head is None:
            return replace(self, rows=inputs[0])
        return replace(
            self, rows=inputs[0], head=Head(inputs[1], inputs[2] if len(inputs) > 2 else None, self.head.seen)
        )

    def detached(self) -> Shards:
        """Return the same shards without gradients."""
        return self.of_inputs([x.detach() for x in self.inputs])

    def local(self) -> torch.Tensor:
        """Return ``[..., vocab/tp]``; without a ``head`` in the dtype of ``rows``."""
        if self.head is None:
            return self.rows
        local = self.head(self.rows)
        for change in self.changes:
            local = change(local)
        return local

    def settled(self) -> Shards:
        """Return shards without a ``head``: the product is made now."""
        if self.head is None:
            return self
        self.head.check()
        return replace(self, rows=self.local(), head=None, changes=())

    def change(self, function: Change) -> Shards:
        """Do something to each element, in the logits' dtype."""
        dtype = self.dtype
        if self.head is None:
            return replace(self, rows=function(self.rows.to(dtype)))
        return replace(self, changes=(*self.changes, lambda x: function(x.to(dtype))))

    @property
    def saved(self) -> Sequence[torch.Tensor]:
        """The factors of the product, which is computed again."""
        return () if self.head is None else self.inputs

    def gradients(self) -> Gradients:
        """Return what cuts the whole gradient, and goes back through the head's product if that is not made yet."""
        if self.head is None:
            return partial(_columns_of, self.axis, self.layout, self.rows.dtype)
        return self._gradients_of_inputs

    gradients_again = gradients

    def _gradients_of_inputs(self, grad: torch.Tensor, *saved: torch.Tensor) -> Sequence[torch.Tensor | None]:
        again = torch.is_grad_enabled()
        with torch.enable_grad():  # of views, or a tied weight would get its other gradients here
            inputs = [x.view_as(x) if again else x.detach().requires_grad_(x.requires_grad) for x in saved]
            local = self.of_inputs(inputs).local()
        (part,) = _columns_of(self.axis, self.layout, local.dtype, grad)
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(local, wanted, part, create_graph=again))
        return [next(found) if x.requires_grad else None for x in inputs]

    def gathered(self) -> torch.Tensor:
        """Return the whole logits. A collective of the axis."""
        if self.head is not None:
            self.head.check()
        return all_gather(self.local(), self.axis, self.layout, -1).to(self.dtype)

    def after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shards | None:
        """Return the columns after ``whole.name(*args, **kwargs)``, or None if that needs the whole logits."""
        operation = _OPERATIONS.get(name)
        return None if operation is None else operation(self, *args, **kwargs)

    def cross_entropy(
        self, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
    ) -> torch.Tensor:
        """Return ``F.cross_entropy`` of ``[tokens, vocab]`` or ``[vocab]``.

        With a pending head the logits of ``chunk`` tokens are the most that exist, forward and backward.
        """
        loss = sharded_cross_entropy(self, target, ignore_index, label_smoothing, reduction)
        device = self.rows.device.type
        return loss if device != "meta" and torch.is_autocast_enabled(device) else loss.to(self.dtype)  # as torch's


def _columns_of(axis: Axis, layout: Layout, dtype: torch.dtype, grad: torch.Tensor) -> Sequence[torch.Tensor | None]:
    return [scatter(grad, axis, layout, -1).to(dtype)]


def asked_shape(whole: Sequence[int], shape: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape that ``view(*shape, **kwargs)`` gives a tensor of shape ``whole``; None if that is not known."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if kwargs or not sizes or {*map(type, sizes)} != {int}:
        return None
    known, total = math.prod([size for size in sizes if size != -1]), math.prod(whole)
    if not known or not total:
        return None
    full = tuple([size if size != -1 else total // known for size in sizes])
    return full if math.prod(full) == total else None


def _reshape(shards: Shards, *shape: Any, **kwargs: Any) -> Shards | None:
    full = asked_shape(shards.shape, shape, kwargs)
    if full is None or full[-1] != shards.layout.size:
        return None
    return replace(shards, rows=shards.rows.reshape(*full[:-1], shards.rows.shape[-1]))


def _index(shards: Shards, index: Any) -> Shards | None:
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is ... or isinstance(item, int | slice | torch.Tensor) for item in items):
        return None
    taken = sum(_dims(item) for item in items)
    dims = len(shards.shape)
    if taken >= dims:  # the vocabulary is indexed: only by a full slice
        last = items[-1]
        if taken > dims or not (isinstance(last, slice) and last == slice(None)):
            return None
    elif any(item is ... for item in items[:-1]) and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
        return None  # what follows an ellipsis ends at the vocabulary
    return replace(shards, rows=shards.rows[index])


def _dims(item: Any) -> int:
    if item is None or item is ... or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _to(shards: Shards, *args: Any, **kwargs: Any) -> Shards | None:
    wanted = [*args, *kwargs.values()]
    if set(kwargs) - {"dtype", "device"} or not wanted:
        return None
    dtype = shards.dtype
    for value in wanted:
        if isinstance(value, torch.dtype):
            dtype = value
        elif not isinstance(value, str | torch.device) or torch.device(value) != shards.rows.device:
            return None
    return _cast(shards, dtype)


def _cast(shards: Shards, dtype: torch.dtype) -> Shards | None:
    if not dtype.is_floating_point:
        return None
    if dtype == shards.dtype:
        return shards
    if torch.promote_types(dtype, shards.dtype) != dtype:  # narrower: that rounds
        shards = shards.change(lambda x: x.to(dtype))
    return replace(shards, dtype=dtype)


def _unary(function: Change) -> Callable[..., Shards | None]:
    return lambda shards, *args, **kwargs: None if args or kwargs else shards.change(function)


def _binary(function: Callable[[Any, Any], torch.Tensor]) -> Callable[..., Shards | None]:
    def operate(shards: Shards, *args: Any, **kwargs: Any) -> Shards | None:
        if len(args) != 1 or kwargs:
            return None
        other = args[0]
        if not isinstance(other, torch.Tensor):
            if not isinstance(other, int | float):
                return None
        else:
            if other.requires_grad or (other.ndim > 1 and other.numel() > 1):
                shards = shards.settled()  # it gets a gradient, or differs by token
            fitting = _operand(shards, other)
            if fitting is None:
                return None
            other = fitting
        return shards.change(lambda x: function(x, other))

    return operate


def _operand(shards: Shards, other: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a tensor that logits meet element by element; its gradient is summed over the axis."""
    logits = torch.empty(shards.shape, dtype=shards.dtype, device="meta")
    try:
        same_shape = torch.broadcast_shapes(other.shape, shards.shape) == shards.shape
    except RuntimeError:
        return None
    if not same_shape or torch.result_type(logits, other.to("meta")) != shards.dtype:
        return None
    if other.device != shards.rows.device and other.ndim:
        return None
    if other.ndim and other.shape[-1] == shards.layout.size and shards.layout.size > 1:
        other = scatter(other, shards.axis, shards.layout, -1)
    else:
        other = copy(other, shards.axis)
    return other if shards.head is None else other.clone()  # it may change before it is used


_OPERATIONS: dict[str, Callable[..., Shards | None]] = {
    "view": _reshape,
    "reshape": _reshape,
    "__getitem__": _index,
    "to": _to,
    "float": lambda shards: _cast(shards, torch.float32),
    "double": lambda shards: _cast(shards, torch.float64),
    "half": lambda shards: _cast(shards, torch.float16),
    "bfloat16": lambda shards: _cast(shards, torch.bfloat16),
    "detach": Shards.detached,
    "contiguous": lambda shards: shards,
    "clone": lambda shards: shards,
    "tanh": _unary(torch.tanh),
    "neg": _unary(operator.neg),
    "__neg__": _unary(operator.neg),
    "mul": _binary(operator.mul),
    "__mul__": _binary(operator.mul),
    "__rmul__": _binary(operator.mul),
    "div": _binary(torch.true_divide),
    "true_divide": _binary(torch.true_divide),
    "__truediv__": _binary(torch.true_divide),
    "add": _binary(operator.add),
    "__add__": _binary(operator.add),
    "__radd__": _binary(operator.add),
    "sub": _binary(operator.sub),
    "__sub__": _binary(operator.sub),
}
BY_ELEMENT = frozenset(_OPERATIONS) - {"view", "reshape", "__getitem__"}
"""Operations that work on each element by itself."""

"""Logits of which each rank has some rows, and which are whole for whoever reads them: gathered then, and only then.

A loss takes ``[batch, rows, vocab]`` apart by rows: it casts, scales, shifts, flattens, and computes a cross entropy
for each. All of that is done to this rank's rows, whose losses, one number a row, are gathered. Any other operation
gathers the logits first. They may be sharded by vocabulary as well (:mod:`autopar.tensor_parallel.sharded_logits`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autopar.context_parallel.rows import join
from autopar.distributed.agree import meet
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather, reduce_scatter
from autopar.distributed.derivatives import keep_none, single_backward
from autopar.distributed.whole_on_read import WholeOnRead
from autopar.foreign.tensors import wrapper_subclass
from autopar.layout import Block, Layout
from autopar.tensor_parallel.loss import check_targets
from autopar.tensor_parallel.whole_logits import REPEATED, WholeLogits, placed

__all__ = ["RowLogits", "row_logits"]


class RowLogits(WholeLogits):
    """The whole logits, ``[batch, rows, vocab]`` or ``[batch * rows, vocab]``, of which this rank has some rows.

    Attributes:
        own: this rank's, ``[batch, rows/cp, vocab]``.
        title: which logits they are, in words that are the same on all ranks.
        flat: whether they are ``[batch * rows, vocab]``.

    Raises:
        ConsistencyError: on reading, if other ranks of the axis do not read the same.
    """

    own: torch.Tensor
    axis: Axis
    rows: Layout
    title: str
    flat: bool

    @staticmethod
    def __new__(cls, own: torch.Tensor, axis: Axis, rows: Layout, title: str, flat: bool) -> RowLogits:
        """Make a tensor of the shape of the whole logits, without memory; no graph, no family yet."""
        batch, _, vocab = own.shape
        shape = (batch * rows.size, vocab) if flat else (batch, rows.size, vocab)
        made: RowLogits = wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        made.own, made.axis, made.rows, made.title, made.flat, made._whole = own, axis, rows, title, flat, None
        return made

    def held(self) -> str:
        """Return which rows this rank has."""
        held = ", ".join(f"{start} to {stop - 1}" for start, stop in self.rows.ranges(self.axis.rank)) or "none"
        return f"{self.axis.name} rank {self.axis.rank} of {self.axis.size} has rows {held}"

    def parts(self) -> list[torch.Tensor]:
        """Return this rank's rows."""
        return [self.own]

    def gathered(self) -> torch.Tensor:
        """Return a plain tensor of the same values. A collective of the axis."""
        meet(self.axis, f"logits {list(self.shape)} of {self.title}", self.axis.read_timeout, _ADVICE)
        return self.gathered_at_once()

    def gathered_at_once(self) -> torch.Tensor:
        """Return :meth:`gathered` where all ranks are known to do so."""
        gathered: torch.Tensor = _Gather.apply(self)
        return gathered.flatten(0, 1) if self.flat else gathered

    def after(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation makes of this rank's rows, or None."""
        if name == "cross_entropy":
            return _cross_entropy(self, *args, **kwargs)
        found = _OPERATIONS[name](self, *args, **kwargs) if name in _OPERATIONS else None
        if found is None:
            return None
        own, rows, flat = found
        if name in REPEATED:
            return _made(self, own, rows, flat, lambda whole: func(whole, *args, **kwargs))
        return self if own is self.own and name != "clone" else _made(self, own, rows, flat)

    def hook_for_a_library(self, func: Any, hook: Any) -> Any:
        """Register a hook for torch's own wrappers (FSDP): every gradient comes by this rank's rows."""
        return self.own.register_hook(hook)


_ADVICE = (
    "Whole logits are gathered when they are read, which takes every context-parallel rank: read them on all of\n"
    "  them (if rank == 0: around the print, not around the reading: logits.argmax(-1), logits.cpu()), or have them\n"
    "  gathered in the forward: under torch.no_grad(), or always by loss: {gather_logits: always}.\n"
    "  loss: {read_timeout: ...} waits longer."
)


def row_logits(own: torch.Tensor, axis: Axis, rows: Layout, title: str) -> RowLogits:
    """Return whole logits ``[batch, rows, vocab]`` of this rank's own, ``[batch, rows/cp, vocab]``."""
    made: RowLogits = _Wrap.apply(own if torch.is_grad_enabled() else own.detach(), axis, rows, title, False)
    return placed(made)


def _made(source: RowLogits, own: torch.Tensor, rows: Layout, flat: bool, step: Any = None) -> RowLogits:
    made: RowLogits = _Wrap.apply(own, source.axis, rows, source.title, flat)
    return placed(made, source, step)


class _Wrap(torch.autograd.Function):
    """From this rank's rows to the whole logits: their place in the graph."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, axis: Axis, rows: Layout, title: str, flat: bool) -> RowLogits:
        keep_none(ctx)
        ctx.axis, ctx.rows, ctx.flat = axis, rows, flat
        return RowLogits(own, axis, rows, title, flat)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Sum the gradients of all ranks, of which each has one of the whole."""
        deep = grad.reshape(-1, ctx.rows.size, grad.shape[-1]) if ctx.flat else grad
        return reduce_scatter(deep, ctx.axis, 1, ctx.rows), None, None, None, None


class _Gather(torch.autograd.Function):
    """From the whole logits to a plain tensor of the same values, ``[batch, rows, vocab]``."""

    @staticmethod
    def forward(ctx: Any, logits: RowLogits) -> torch.Tensor:
        keep_none(ctx)
        ctx.flat = logits.flat
        own = logits.own.whole() if isinstance(logits.own, WholeOnRead) else logits.own
        return all_gather(own.detach(), logits.axis, logits.rows, 1)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.flatten(0, 1) if ctx.flat else grad


# -- operations on own rows: own, rows, flat, or None ---------------------------------------------------------------

_Found = tuple[torch.Tensor, Layout, bool] | None


def _elementwise(method: str) -> Callable[..., _Found]:
    def operate(logits: RowLogits, *args: Any, **kwargs: Any) -> _Found:
        others = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if any(x.ndim > 1 or x.requires_grad for x in others):
            return None  # may differ from row to row; has a gradient of all rows
        own = getattr(logits.own, method)(*args, **kwargs)
        return (own, logits.rows, logits.flat) if own.shape == logits.own.shape else None

    return operate


def _reshape(logits: RowLogits, *shape: Any, **kwargs: Any) -> _Found:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if kwargs or not all(type(size) is int for size in sizes):
        return None
    batch, _, vocab = logits.own.shape
    total = batch * logits.rows.size * vocab
    known = math.prod(size for size in sizes if size != -1)
    full = tuple(size if size != -1 else total // known for size in sizes) if known else tuple(sizes)
    flat, deep = (batch * logits.rows.size, vocab), (batch, logits.rows.size, vocab)
    return (logits.own, logits.rows, full == flat) if full in (flat, deep) else None


def _index(logits: RowLogits, index: Any) -> _Found:
    """Some rows of each sequence: ``[:, :-1]``, ``[..., 1:, :]``, ``[:, slice, :]``."""
    items = list(index) if isinstance(index, tuple) else [index]
    if logits.flat or not all(item is ... or isinstance(item, slice) for item in items):
        return None
    if ... in items:
        place = items.index(...)
        items[place : place + 1] = [slice(None)] * (4 - len(items))
    items += [slice(None)] * (3 - len(items))
    start, stop, step = items[1].indices(logits.rows.size)
    if len(items) != 3 or items[0] != slice(None) or items[2] != slice(None) or step != 1:
        return None
    rows = _clipped(logits.rows, start, max(stop, start))
    held = [row for low, high in logits.rows.ranges(logits.axis.rank) for row in range(low, high)]
    kept = [place for place, row in enumerate(held) if start <= row < stop]
    own = logits.own
    if len(kept) < len(held):
        runs = kept == list(range(kept[0], kept[0] + len(kept))) if kept else True
        first = kept[0] if kept else 0
        own = own[:, first : first + len(kept)] if runs else own[:, torch.tensor(kept, device=own.device)]
    return own, rows, False


def _clipped(rows: Layout, start: int, stop: int) -> Layout:
    """The rows ``[start, stop)`` of a layout, counted from ``start``."""
    blocks, offset = [], 0
    for block in rows.blocks:
        low, high = (min(max(bound - offset, 0), block.count) for bound in (start, stop))
        ranges = tuple((min(max(a, low), high) - low, min(max(b, low), high) - low) for a, b in block.ranges)
        blocks.append(Block(block.unit, high - low, block.width, ranges))
        offset += block.count
    return Layout.of(rows.dim, blocks)


def _cross_entropy(
    logits: RowLogits,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """``F.cross_entropy`` of ``[batch * rows, vocab]``."""
    own, rows, axis = logits.own, logits.rows, logits.axis
    batch, _, vocab = own.shape
    if not logits.flat or target.is_floating_point() or target.shape != (batch * rows.size,):
        return None
    if any(x is not None for x in (weight, size_average, reduce)) or reduction not in ("none", "mean", "sum"):
        return None
    ignored = target == ignore_index
    check_targets(target, ignored, vocab)  # all of them, so that all ranks find the same
    targets = rows.shard(target.view(batch, rows.size), axis.rank, 1).reshape(-1)  # [batch * rows/cp]
    losses = F.cross_entropy(
        own.reshape(-1, vocab), targets, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    losses = join(losses.view(batch, -1), axis, 1, rows).view(-1)  # [batch * rows]
    logits.lose()
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


_OPERATIONS: dict[str, Callable[..., _Found]] = {
    **{name: _elementwise(name) for name in ("float", "double", "half", "bfloat16", "to", "contiguous", "clone")},
    **{name: _elementwise(name) for name in ("detach", "tanh", "neg", "__neg__", "mul", "__mul__", "__rmul__")},
    **{name: _elementwise(name) for name in ("div", "true_divide", "__truediv__", "add", "__add__", "__radd__")},
    **{name: _elementwise(name) for name in ("sub", "__sub__")},
    "view": _reshape,
    "reshape": _reshape,
    "__getitem__": _index,
}

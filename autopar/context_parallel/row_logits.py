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
from torch.utils._pytree import tree_map_only

from autopar.distributed.axis import Axis
from autopar.distributed.barrier import meet
from autopar.distributed.collectives import gather_sum
from autopar.layout import Block, Layout
from autopar.tensor_parallel.sharded_logits import FACTS, PATIENCE

__all__ = ["RowLogits", "row_logits"]


class RowLogits(torch.Tensor):
    """The whole logits, ``[batch, rows, vocab]`` or ``[batch * rows, vocab]``, of which this rank has some rows.

    Raises:
        ConsistencyError: on reading, if other ranks of the axis do not read the same.
    """

    _own: torch.Tensor  # [batch, rows/cp, vocab]
    _axis: Axis
    _rows: Layout
    _name: str
    _flat: bool
    _plain: torch.Tensor | None
    _source: RowLogits | None  # what it was made of, and how, for readers of both
    _step: Callable[[torch.Tensor], torch.Tensor] | None

    @staticmethod
    def __new__(cls, own: torch.Tensor, axis: Axis, rows: Layout, name: str, flat: bool) -> RowLogits:
        """Make a tensor of the shape of the whole logits, without memory."""
        batch, _, vocab = own.shape
        shape = (batch * rows.size, vocab) if flat else (batch, rows.size, vocab)
        made: RowLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        made._own, made._axis, made._rows, made._name, made._flat = own, axis, rows, name, flat
        made._plain = made._source = made._step = None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._plain is not None:
            return repr(self._plain)
        held = ", ".join(f"{start} to {stop - 1}" for start, stop in self._rows.ranges(self._axis.rank)) or "none"
        place = f"{self._axis.name} rank {self._axis.rank} of {self._axis.size}"
        with torch._C.DisableTorchFunctionSubclass():
            return f"RowLogits({list(self.shape)}, {self.dtype}: {place} has rows {held})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def whole(self) -> torch.Tensor:
        """Return the logits as a plain tensor, gathered. A collective of the axis the first time."""
        if self._plain is None and self._source is not None and self._step is not None:
            self._plain = self._step(self._source.whole())
        if self._plain is None:
            with torch._C.DisableTorchFunctionSubclass():
                shape = tuple(self.shape)
            meet(self._axis, f"logits {list(shape)} of {self._name}", PATIENCE, _ADVICE)
            own = self._own
            own = own.whole() if hasattr(own, "whole") else own
            self._plain = gather_sum(own, self._axis, 1, self._rows).view(shape)
        return self._plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from this rank's rows what can be, gather for everything else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        first = args[0] if args else kwargs.get("input") if name == "cross_entropy" else None
        if isinstance(first, RowLogits) and first._plain is None:
            if name in ("requires_grad", "grad_fn", "is_leaf"):
                return getattr(first._own, name)
            if name in FACTS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            operation = _OPERATIONS.get(name)
            result = None if operation is None else operation(first, *_rest(args, first), **_but_input(kwargs))
            if result is not None:
                return result
        args, kwargs = tree_map_only(RowLogits, lambda x: x.whole(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Gather for what does not come through Python."""
        args, kwargs = tree_map_only(RowLogits, lambda x: x.whole().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


_ADVICE = (
    "Whole logits are gathered when they are read, which takes every context-parallel rank: read them on all of\n"
    "  them (if rank == 0: around the print, not around the reading)"
)


def row_logits(own: torch.Tensor, axis: Axis, rows: Layout, name: str) -> RowLogits:
    """Return whole logits ``[batch, rows, vocab]`` of this rank's own, ``[batch, rows/cp, vocab]``."""
    return RowLogits(own, axis, rows, name, False)


def _rest(args: tuple[Any, ...], first: RowLogits) -> tuple[Any, ...]:
    return args[1:] if args and args[0] is first else args


def _but_input(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "input"}


def _made(source: RowLogits, own: torch.Tensor, step: Any, rows: Layout | None = None, flat: bool = False) -> RowLogits:
    made = RowLogits(own, source._axis, rows or source._rows, source._name, flat)
    made._source, made._step = source, step
    return made


def _elementwise(method: str) -> Callable[..., Any]:
    def operate(logits: RowLogits, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and x.ndim > 1 for x in (*args, *kwargs.values())):
            return None  # may differ from row to row

        def step(x: torch.Tensor) -> torch.Tensor:
            done: torch.Tensor = getattr(x, method)(*args, **kwargs)
            return done

        own = step(logits._own)
        return _made(logits, own, step, flat=logits._flat) if own.shape == logits._own.shape else None

    return operate


def _reshape(logits: RowLogits, *shape: Any, **kwargs: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if kwargs or not all(type(size) is int for size in sizes):
        return None
    batch, _, vocab = logits._own.shape
    total = batch * logits._rows.size * vocab
    known = math.prod(size for size in sizes if size != -1)
    full = tuple(size if size != -1 else total // known for size in sizes) if known else sizes
    flat, deep = (batch * logits._rows.size, vocab), (batch, logits._rows.size, vocab)
    if full not in (flat, deep):
        return None
    return _made(logits, logits._own, lambda x: x.view(full), flat=full == flat)


def _index(logits: RowLogits, index: Any) -> Any:
    """Some rows of each sequence: ``[:, :-1]``, ``[..., 1:, :]``, ``[:, slice, :]``."""
    items = list(index) if isinstance(index, tuple) else [index]
    if logits._flat or not all(item is ... or isinstance(item, slice) for item in items):
        return None
    if ... in items:
        place = items.index(...)
        items[place : place + 1] = [slice(None)] * (4 - len(items))
    items += [slice(None)] * (3 - len(items))
    start, stop, step = items[1].indices(logits._rows.size)
    if len(items) != 3 or items[0] != slice(None) or items[2] != slice(None) or step != 1:
        return None
    rows = _clipped(logits._rows, start, max(stop, start))
    rank = logits._axis.rank
    held = [row for low, high in logits._rows.ranges(rank) for row in range(low, high)]
    kept = [place for place, row in enumerate(held) if start <= row < stop]
    own = logits._own
    if len(kept) < len(held):
        runs = kept == list(range(kept[0], kept[0] + len(kept))) if kept else True
        first = kept[0] if kept else 0
        own = own[:, first : first + len(kept)] if runs else own[:, torch.tensor(kept, device=own.device)]
    return _made(logits, own, lambda x: x[index], rows)


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
    own, rows, axis = logits._own, logits._rows, logits._axis
    batch, _, vocab = own.shape
    if not logits._flat or target.is_floating_point() or target.shape != (batch * rows.size,):
        return None
    if any(x is not None for x in (weight, size_average, reduce)) or reduction not in ("none", "mean", "sum"):
        return None
    targets = rows.shard(target.view(batch, rows.size), axis.rank, 1).reshape(-1)  # [batch * rows/cp]
    losses = F.cross_entropy(
        own.reshape(-1, vocab), targets, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    losses = gather_sum(losses.view(batch, -1), axis, 1, rows).view(-1)  # [batch * rows]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _elementwise(name) for name in ("float", "double", "half", "bfloat16", "to", "contiguous", "clone")},
    **{name: _elementwise(name) for name in ("detach", "tanh", "neg", "__neg__", "mul", "__mul__", "__rmul__")},
    **{name: _elementwise(name) for name in ("div", "true_divide", "__truediv__", "add", "__add__", "__radd__")},
    **{name: _elementwise(name) for name in ("sub", "__sub__")},
    "view": _reshape,
    "reshape": _reshape,
    "__getitem__": _index,
    "cross_entropy": _cross_entropy,
}

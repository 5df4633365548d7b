"""Lazily gathered tensors under context parallelism: embeddings before the blocks, and logits after them.

:class:`LazyRows` holds the local rows of embeddings. Sums, scaling, norms and projections run on the local rows, and
the boundary of the first block takes them. Any other operation gathers the full tensor. The dry run finds the
embeddings that reach the blocks this way.

:class:`RowsOfLogits` holds the local rows of logits ([Note: sharded logits]). Casts, scaling, shifts, flattening and
the cross entropy run on the local rows; only the losses, one number per row, are gathered. The vocabulary of these rows
may be sharded too (:mod:`autopar.tensor_parallel.sharded_logits`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from autopar.compat.tensors import tree_flatten, tree_leaves, tree_map_only, tree_unflatten, wrapper_subclass
from autopar.distributed.agree import meet
from autopar.distributed.autograd_functions import keep_none, single_backward
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather, reduce_scatter
from autopar.features.context_parallel.state import RowState, join
from autopar.layout import Block, Layout
from autopar.swap import argument_names
from autopar.tensor_parallel.loss import check_targets
from autopar.tensor_parallel.sharded_logits import BY_ELEMENT, Gradients, LogitsShard, viewed_shape
from autopar.tensor_tracking import LazyGatherTensor, name_of, without_overrides

_ADVICE = (
    "Each context-parallel rank has some rows of the embeddings, and reading gathers them: read them on all ranks."
)
_LOST = (
    "context_parallel_size is not supported with an autograd function on sharded embeddings: their gradient would be "
    "lost\n  Pass the full tensor: function.apply(embeddings[:])"
)


class LazyRows(LazyGatherTensor):
    """The full embeddings before the blocks, of which this rank holds some rows.

    Attributes:
        own: Local rows.
        rows_dim: Dim of the rows.
        sources: Paths of the embedding modules that it was computed from, for a dry run.
    """

    own: torch.Tensor
    rows_dim: int
    rows: Layout
    sources: frozenset[str]
    _state: RowState
    _plain: torch.Tensor | None
    _node: Any  # grad_fn at creation

    @property
    def is_full(self) -> bool:
        """True if code has read the tensor."""
        return self._plain is not None

    def held(self) -> str:
        """Return a description of the local rows."""
        axis = self._state.axis
        held = ", ".join(f"{start} to {stop - 1}" for start, stop in self.rows.ranges(axis.rank)) or "none"
        return f"{axis.name} rank {axis.rank} of {axis.size} has rows {held}"

    def made_of(self) -> list[torch.Tensor]:
        """Return the full tensor if it was read, else the local rows."""
        return [self.full() if self.is_full else self.own]

    def opened(self, rows: Layout, dim: int) -> torch.Tensor | None:
        """Return the local rows if they are ``rows`` along ``dim`` and the full tensor was not read; else None."""
        self._check_node()
        if self._plain is not None or self.rows != rows or self.rows_dim != dim:
            return None
        self._state.opened |= self.sources
        return self.own

    def full(self) -> torch.Tensor:
        """Return the full tensor. The first call is a collective of the axis."""
        if self._plain is None:
            self._check_node()
            state = self._state
            state.spoiled |= self.sources
            meet(state.axis, f"embeddings {list(self.shape)}", state.axis.read_timeout, _ADVICE)
            with torch.inference_mode(self.own.is_inference()), torch.set_grad_enabled(self.own.requires_grad):
                self._plain = state.unmark(join(self.own, state.axis, self.rows_dim, self.rows))
        return self._plain

    def _check_node(self) -> None:
        """Raise for the result of an autograd function, whose gradient would not reach the local rows."""
        if without_overrides(lambda: self.grad_fn, (), {}) is not self._node:
            raise RuntimeError(_LOST)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from the local rows if possible, otherwise gather the full tensor."""
        first, name = args[0] if args else None, name_of(func)
        if isinstance(first, LazyRows) and not first.is_full and name in ("requires_grad", "grad_fn", "is_leaf"):
            return getattr(first.own, name)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def from_parts(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply an operation that treats rows separately to the local rows; return None for other operations."""
        leaves, structure = tree_flatten((args, kwargs))
        lead = next((x for x in leaves if isinstance(x, LazyRows)), None)
        if lead is None or lead.is_full:
            return None
        lead._check_node()
        if name == "requires_grad_":
            lead.own.requires_grad_(*args[1:], **kwargs)
            return lead
        if name == "dropout":
            return _dropout(lead, func, args, kwargs)
        if name in BY_ELEMENT and "out" not in kwargs:
            parts = [_part(x, lead) if isinstance(x, torch.Tensor) else x for x in leaves]
            if any(isinstance(x, torch.Tensor) and part is None for part, x in zip(parts, leaves, strict=True)):
                return None
        elif leaves[0] is lead and _is_of_features(lead, name, args, kwargs):
            parts = [lead.own, *leaves[1:]]
        else:
            return None
        mine, named = tree_unflatten(parts, structure)
        own = func(*mine, **named)
        if own is lead.own:  # unchanged
            return lead
        sources = frozenset[str]().union(*(x.sources for x in leaves if isinstance(x, LazyRows)))
        return lazy_rows(own, own.ndim - (lead.ndim - lead.rows_dim), lead.rows, lead._state, sources)


def lazy_rows(own: torch.Tensor, dim: int, rows: Layout, state: RowState, sources: frozenset[str]) -> LazyRows:
    """Return the full tensor, without memory, whose local rows along ``dim`` are ``own``."""
    made: LazyRows = _Closed.apply(own, [*own.shape[:dim], rows.size, *own.shape[dim + 1 :]])
    made.own, made.rows_dim, made.rows, made.sources = state.mark(own), dim, rows, sources
    made._state, made._plain, made._node = state, None, without_overrides(lambda: made.grad_fn, (), {})
    return made


class _Closed(torch.autograd.Function):
    """Raise in the backward pass of a use outside Python, which would lose the gradient of the rows."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, shape: list[int]) -> Any:
        keep_none(ctx)
        return wrapper_subclass(LazyRows, shape, dtype=own.dtype, device=own.device)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> NoReturn:
        raise RuntimeError(_LOST)


def full_tensors(value: Any) -> Any:
    """Return a nested value with lazy tensors replaced by full tensors."""
    found = any(isinstance(x, LazyRows) for x in tree_leaves(value))
    return tree_map_only(LazyRows, lambda x: x.full(), value) if found else value


def _is_of_features(lead: LazyRows, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation works only along the last dims, which hold features."""
    if name in ("layer_norm", "rms_norm"):
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return lead.rows_dim < lead.ndim - len(shape)
    return name == "linear" and lead.rows_dim < lead.ndim - 1


def _part(x: torch.Tensor, lead: LazyRows) -> torch.Tensor | None:
    """Return the local rows of a tensor that broadcasts with ``lead``, or ``x`` if it is equal for all rows."""
    dim = x.ndim - (lead.ndim - lead.rows_dim)
    if isinstance(x, LazyRows):
        if x._plain is None:
            return x.own if x.rows == lead.rows and x.rows_dim == dim else None
        x = x._plain
    if dim < 0 or x.shape[dim] == 1:
        return x
    return lead.rows.shard(x, lead._state.axis.rank, dim) if x.shape[dim] == lead.rows.size else None


def _dropout(lead: LazyRows, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyRows | None:
    """Apply ``F.dropout`` to the local rows, with a mask per rank as inside the blocks."""
    given = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
    if not given.get("training", given.get("train", True)) or given.get("p", 0.5) == 0:
        return lead
    region = lead._state.region
    if not args or given.get("inplace") or not region.draws(True):
        return None
    region.draw_per_rank(True)
    own = func(lead.own, *args[1:], **kwargs)
    region.draw_alike()
    return lazy_rows(own, lead.rows_dim, lead.rows, lead._state, lead.sources)


def may_own_rows(module: nn.Module) -> bool:
    """Return whether a module before the blocks is an embedding that looks up each row separately."""
    plain = isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq
    return plain and len(argument_names(module)) == 1


class OwnRows:
    """Mixin for an embedding before the blocks that looks up only the local rows of ids, ``[batch, rows]``."""

    num_embeddings: int
    _autopar_rows: RowState
    _autopar_own: str  # path of the embedding

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, path = self._autopar_rows, self._autopar_own
        ids = args[0] if len(args) == 1 and not kwargs else None
        rows = self._rows_of(ids) if isinstance(ids, torch.Tensor) and ids.ndim == 2 else None
        if ids is None or rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        own = super().forward(state.mark(rows.shard(ids, state.axis.rank, 1)))  # type: ignore[misc]
        return lazy_rows(own, 1, rows, state, frozenset((path,)))

    def _rows_of(self, ids: torch.Tensor) -> Layout | None:
        """Return the layout of the rows of ``ids``; None if every rank looks up all rows."""
        state, length = self._autopar_rows, ids.shape[1]
        if not state.cutting or (state.tracking is not None and length != state.tracking.prime * state.axis.size):
            return None
        if ids.is_cpu and ids.numel():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= self.num_embeddings:
                return None  # the module then raises on every rank
        return state.rows_of(length)


@dataclass(frozen=True)
class RowsOfLogits(LogitsShard):
    """The local rows of the logits, ``[batch, rows, vocab]`` or ``[batch * rows, vocab]``."""

    own: torch.Tensor  # [batch, rows/cp, vocab]
    axis: Axis
    layout: Layout
    name: str
    flat: bool = False  # [batch * rows, vocab]

    kind, ranks = "rows", "context-parallel"
    gets_every_gradient = True

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.own.dtype

    @property
    def deep(self) -> tuple[int, int, int]:
        """Shape of the full logits, ``(batch, rows, vocab)``."""
        return self.own.shape[0], self.layout.size, self.own.shape[2]

    @property
    def shape(self) -> tuple[int, ...]:
        batch, rows, vocab = self.deep
        return (batch * rows, vocab) if self.flat else self.deep

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.own]

    def detached(self) -> RowsOfLogits:
        return replace(self, own=self.own.detach())

    def gradients(self) -> Gradients:
        """Return a function that sums the gradients of all ranks, each of which has one for the full logits."""
        axis, layout = self.axis, self.layout
        return lambda grad: [reduce_scatter(grad.reshape(-1, layout.size, grad.shape[-1]), axis, 1, layout)]

    def gathered(self) -> torch.Tensor:
        own = self.own.full() if isinstance(self.own, LazyGatherTensor) else self.own
        full = all_gather(own.detach(), self.axis, self.layout, 1)
        return full.flatten(0, 1) if self.flat else full

    def after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RowsOfLogits | None:
        if name in ("view", "reshape"):
            full, (batch, rows, vocab) = viewed_shape(self.shape, args, kwargs), self.deep
            return replace(self, flat=full != self.deep) if full in ((batch * rows, vocab), self.deep) else None
        if name == "__getitem__":
            return self._some_rows(args[0])
        if name not in BY_ELEMENT:
            return None
        others = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if any(x.ndim > 1 or x.requires_grad for x in others):
            return None  # it may differ between rows, or needs the gradients of all rows
        own = getattr(self.own, name)(*args, **kwargs)
        if own is self.own:
            return self
        return replace(self, own=own) if own.shape == self.own.shape else None

    def _some_rows(self, index: Any) -> RowsOfLogits | None:
        """Return a slice of the rows of each sequence: ``[:, :-1]``, ``[..., 1:, :]``, ``[:, slice, :]``."""
        items = list(index) if isinstance(index, tuple) else [index]
        if self.flat or not all(item is ... or isinstance(item, slice) for item in items):
            return None
        if ... in items:
            place = items.index(...)
            items[place : place + 1] = [slice(None)] * (4 - len(items))
        items += [slice(None)] * (3 - len(items))
        start, stop, step = items[1].indices(self.layout.size)
        if len(items) != 3 or items[0] != slice(None) or items[2] != slice(None) or step != 1:
            return None
        layout = _clipped(self.layout, start, max(stop, start))
        held = [row for low, high in self.layout.ranges(self.axis.rank) for row in range(low, high)]
        kept = [place for place, row in enumerate(held) if start <= row < stop]
        first = kept[0] if kept else 0  # rows ascend, so the kept ones are contiguous
        own = self.own[:, first : first + len(kept)] if len(kept) < len(held) else self.own
        return replace(self, own=own, layout=layout)

    def cross_entropy(
        self, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
    ) -> torch.Tensor | None:
        """Return ``F.cross_entropy`` of ``[batch * rows, vocab]``."""
        batch, rows, vocab = self.deep
        if not self.flat or reduction not in ("none", "mean", "sum"):
            return None
        ignored = target == ignore_index
        check_targets(target, ignored, vocab)  # the full targets, so that all ranks raise the same error
        targets = self.layout.shard(target.view(batch, rows), self.axis.rank, 1).reshape(-1)  # [batch * rows/cp]
        losses = F.cross_entropy(
            self.own.reshape(-1, vocab),
            targets,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        losses = join(losses.view(batch, -1), self.axis, 1, self.layout).view(-1)  # [batch * rows]
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


def _clipped(rows: Layout, start: int, stop: int) -> Layout:
    """Return the layout of the rows ``[start, stop)``, counted from ``start``."""
    blocks, offset = [], 0
    for block in rows.blocks:
        low, high = (min(max(bound - offset, 0), block.count) for bound in (start, stop))
        ranges = tuple((min(max(a, low), high) - low, min(max(b, low), high) - low) for a, b in block.ranges)
        blocks.append(Block(block.unit, high - low, block.width, ranges))
        offset += block.count
    return Layout.of(rows.dim, blocks)

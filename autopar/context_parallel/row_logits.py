"""This rank's rows of logits, and what may be done to them instead of to the whole logits.

A loss takes ``[batch, rows, vocab]`` apart by rows: it casts, scales, shifts, flattens, and computes a cross entropy
for each. All of that is done to this rank's rows, whose losses, one number a row, are gathered. They may be sharded by
vocabulary as well (:mod:`autopar.tensor_parallel.sharded_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from autopar.context_parallel.rows import join
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather, reduce_scatter
from autopar.distributed.whole_on_read import WholeOnRead
from autopar.layout import Block, Layout
from autopar.tensor_parallel.logits_shards import BY_ELEMENT, asked_shape
from autopar.tensor_parallel.loss import check_targets
from autopar.tensor_parallel.sharded_logits import Gradients, LogitsPart


@dataclass(frozen=True)
class RowsOfLogits(LogitsPart):
    """This rank's rows of the logits, ``[batch, rows, vocab]`` or ``[batch * rows, vocab]``.

    Attributes:
        own: this rank's, ``[batch, rows/cp, vocab]``.
        flat: whether the logits are ``[batch * rows, vocab]``.
    """

    own: torch.Tensor
    axis: Axis
    layout: Layout
    name: str
    flat: bool = False

    kind = "rows"
    gets_every_gradient = True
    advice = (
        "Whole logits are gathered when they are read, which takes every context-parallel rank: read them on all of\n"
        "  them (if rank == 0: around the print, not around the reading: logits.argmax(-1), logits.cpu()), or have "
        "them\n  gathered in the forward: under torch.no_grad(), or always by loss: {gather_logits: always}.\n"
        "  loss: {read_timeout: ...} waits longer."
    )

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of the logits."""
        return self.own.dtype

    @property
    def deep(self) -> tuple[int, int, int]:
        """``(batch, rows, vocab)``, of the whole logits."""
        return self.own.shape[0], self.layout.size, self.own.shape[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole logits."""
        batch, rows, vocab = self.deep
        return (batch * rows, vocab) if self.flat else self.deep

    @property
    def inputs(self) -> list[torch.Tensor]:
        """This rank's rows."""
        return [self.own]

    def detached(self) -> RowsOfLogits:
        """Return the same rows without gradients."""
        return replace(self, own=self.own.detach())

    def gradients(self) -> Gradients:
        """Return what sums the gradients of all ranks, of which each has one of the whole."""
        return partial(_gradient_of_rows, self.axis, self.layout)

    def gathered(self) -> torch.Tensor:
        """Return the whole logits. A collective of the axis."""
        own = self.own.whole() if isinstance(self.own, WholeOnRead) else self.own
        whole = all_gather(own.detach(), self.axis, self.layout, 1)
        return whole.flatten(0, 1) if self.flat else whole

    def after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RowsOfLogits | None:
        """Return the rows after ``whole.name(*args, **kwargs)``, or None if that needs the whole logits."""
        if name in ("view", "reshape"):
            full, (batch, rows, vocab) = asked_shape(self.shape, args, kwargs), self.deep
            return replace(self, flat=full != self.deep) if full in ((batch * rows, vocab), self.deep) else None
        if name == "__getitem__":
            return self._some_rows(args[0])
        if name not in BY_ELEMENT:
            return None
        others = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if any(x.ndim > 1 or x.requires_grad for x in others):
            return None  # may differ from row to row; has a gradient of all rows
        own = getattr(self.own, name)(*args, **kwargs)
        if own is self.own:
            return self
        return replace(self, own=own) if own.shape == self.own.shape else None

    def _some_rows(self, index: Any) -> RowsOfLogits | None:
        """Some rows of each sequence: ``[:, :-1]``, ``[..., 1:, :]``, ``[:, slice, :]``."""
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
        own = self.own
        if len(kept) < len(held):
            runs = kept == list(range(kept[0], kept[0] + len(kept))) if kept else True
            first = kept[0] if kept else 0
            own = own[:, first : first + len(kept)] if runs else own[:, torch.tensor(kept, device=own.device)]
        return replace(self, own=own, layout=layout)

    def cross_entropy(
        self, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
    ) -> torch.Tensor | None:
        """Return ``F.cross_entropy`` of ``[batch * rows, vocab]``."""
        batch, rows, vocab = self.deep
        if not self.flat or reduction not in ("none", "mean", "sum"):
            return None
        ignored = target == ignore_index
        check_targets(target, ignored, vocab)  # all of them, so that all ranks find the same
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


def _gradient_of_rows(axis: Axis, layout: Layout, grad: torch.Tensor) -> Sequence[torch.Tensor]:
    deep = grad.reshape(-1, layout.size, grad.shape[-1])
    return [reduce_scatter(deep, axis, 1, layout)]


def _clipped(rows: Layout, start: int, stop: int) -> Layout:
    """The rows ``[start, stop)`` of a layout, counted from ``start``."""
    blocks, offset = [], 0
    for block in rows.blocks:
        low, high = (min(max(bound - offset, 0), block.count) for bound in (start, stop))
        ranges = tuple((min(max(a, low), high) - low, min(max(b, low), high) - low) for a, b in block.ranges)
        blocks.append(Block(block.unit, high - low, block.width, ranges))
        offset += block.count
    return Layout.of(rows.dim, blocks)

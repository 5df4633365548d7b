"""Activations while a block computes with rows of the sequence: which parameters work on rows, and what may not meet.

Beside the kinds of :mod:`~autopar.dry_run.activation_tracking` there is one more: *rows*, an activation between regions
of which this rank has some rows. A replicated parameter in it has a partial gradient. It must not meet a sharded
activation, nor a whole one with a gradient of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.dry_run.activation_tracking import ActivationTracking, Kind
from autopar.dry_run.row_tracking import MixedRows, RowTracking
from autopar.tensor_tracking import tensors_in

__all__ = ["SequenceTracking"]

_ROWS = Kind("rows")


class SequenceTracking(ActivationTracking):
    """A dispatch mode that follows rows, and gives each tensor its kind.

    Args:
        rows: follows the dims of rows.
        blocks: paths of the blocks.
        stack: paths of the modules that run.

    Attributes:
        on_rows: block -> parameters that work on rows in it.
        on_whole: parameters that work on whole sequences.
        worked: blocks that computed with rows.
    """

    def __init__(self, rows: RowTracking, blocks: Sequence[str], stack: list[str]) -> None:
        super().__init__(self._whole_meets_sharded)
        self.rows, self.stack = rows, stack
        self.on_rows: dict[str, set[str]] = {block: set() for block in blocks}
        self.on_whole: set[str] = set()
        self.worked: set[str] = set()

    @property
    def block(self) -> str:
        """The block that runs; empty outside of blocks."""
        return next((path for path in self.stack if path in self.on_rows), "")

    def mark_rows(self, value: Any) -> Any:
        """Mark every tensor in ``value`` as rows; returns ``value``."""
        self.rows.mark_rows(value)
        for tensor in tensors_in(value):
            self.set_kind(tensor, _ROWS)
        return value

    def mark_replicated(self, value: Any) -> Any:
        """Mark every tensor in ``value`` that holds no rows as replicated; returns ``value``."""
        for tensor in tensors_in(value):
            if not self.rows.holds_rows(tensor):
                super().mark_replicated(tensor)
        return value

    def mark_sharded(self, value: Any) -> Any:
        """Mark every tensor in ``value`` as sharded; returns ``value``."""
        if self.rows.holds_rows(value):
            raise MixedRows("rows enter a sharded region")
        return super().mark_sharded(value)

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` as another tensor, marked as sharded."""
        if self.rows.holds_rows(x):
            raise MixedRows("rows enter a sharded region")
        return super().alias(x)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.block or self.rows.holds_rows((args, kwargs)):
            self.rows.track(func, args, kwargs, result)
        super().track(func, args, kwargs, result)

    def _whole_meets_sharded(self) -> None:
        raise MixedRows("a replicated activation meets sharded ones")

    def _combine(self, kinds: list[Kind]) -> Kind:
        names = {kind.name for kind in kinds}
        parameters = {name for kind in kinds for name in kind.parameters}
        if "rows" not in names:
            if names & {"replicated", "sharded"}:
                self.on_whole |= parameters
            return super()._combine(kinds)
        if "sharded" in names:
            raise MixedRows("rows meet what a sharded region has made")
        if "replicated" in names:
            raise MixedRows("rows meet a whole activation that has a gradient")
        inside = sorted(name[1:] for name in parameters if name.startswith("+"))
        if inside:
            raise MixedRows(f"rows meet {inside[0]}, which works inside a sharded region")
        if self.block:
            self.worked.add(self.block)
            self.on_rows[self.block] |= parameters
        elif parameters:
            raise MixedRows(f"rows meet {min(parameters)} outside of blocks")
        return _ROWS

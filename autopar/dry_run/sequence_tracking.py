"""Activations while a block computes with rows of the sequence: which parameters work on rows, and what may not meet.

Beside the kinds of :mod:`~autopar.dry_run.activation_tracking` there is one more: *rows*, an activation between regions
of which this rank has some rows. A replicated parameter in it has a partial gradient. It must not meet a sharded
activation, nor a whole one with a gradient of its own. Notes say which modules ran, and with which arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autopar.dry_run.activation_tracking import ActivationTracking, Kind
from autopar.dry_run.row_tracking import MixedRows, RowTracking
from autopar.foreign.tensors import tree_leaves
from autopar.layout import Layout
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sequence_parallel import RowsOfList, SequencePlan, argument_names
from autopar.tensor_parallel.sequence_rows import rows_of
from autopar.tensor_tracking import tensors_in

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


def note_modules(shard: nn.Module, ran: dict[str, set[str]], tracking: SequenceTracking) -> Iterator[Any]:
    """Register hooks that note which modules run in each block."""
    for path, module in shard.named_modules():

        def before(_: nn.Module, args: Any, path: str = path) -> None:
            if tracking.block:
                ran[tracking.block].add(path)

        yield module.register_forward_pre_hook(before)


def note_given(names: set[str], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the names of arguments that hold tensors; a forward pre-hook but for its first argument."""
    given = [*zip(argument_names(model), args, strict=False), *kwargs.items()]
    tensors = (name for name, value in given if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)))
    names.update(tensors)


def note_inputs(blocks: Sequence[nn.Module], length: int, names: set[str], every: set[str]) -> Iterator[Any]:
    """Register hooks that note arguments of blocks, ``[batch, seq, features]``, besides hidden states."""

    def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*zip(argument_names(block), args, strict=False), *kwargs.items()][1:]
        note_given(every, block, args, kwargs)
        for name, value in given:
            if isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[1] == length:
                names.add(name)

    for block in blocks:
        yield block.register_forward_pre_hook(before, with_kwargs=True)


class SampleRows(RowsOfList):
    """Rows of a sequence of one length, whatever the model makes of its sample (the patches of an image)."""

    def __init__(self, batch: int, length: int, region: Region, plan: SequencePlan) -> None:
        super().__init__(region, plan)
        self.batch, self.length = batch, length
        self.known = _Everything()
        self.whole: list[int] = []

    def note_length(self, x: torch.Tensor) -> torch.Tensor:
        """Note the length of the sample."""
        natural = x.ndim > 2 and x.shape[1] == self.length
        if x.shape[0] % self.batch or not (natural or x.ndim == 3):
            raise MixedRows(f"hidden states have the shape {list(x.shape)}, not that of [batch, seq, hidden]")
        self.whole = list(x.shape)
        self.rows = rows_of(self.length, self.region.axis.size)
        return x

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the sample."""
        return super().enter(self.region.mark_replicated(x.new_empty(x.shape[0], self.length, *x.shape[2:])))

    def leave(self, x: torch.Tensor, rows: Layout | None = None) -> torch.Tensor:
        """Return whole hidden states, as long as they were."""
        y = super().leave(x, rows)
        return self.region.mark_replicated(y.new_empty(*self.whole[:2], *y.shape[2:]))


class _Everything(frozenset[str]):
    """All names: nothing is unknown to a dry run."""

    def __contains__(self, name: object) -> bool:
        return True

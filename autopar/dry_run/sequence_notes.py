"""Notes of a dry run of sequence parallelism: modules that ran, and arguments of models and blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autopar.dry_run.row_tracking import MixedRows
from autopar.dry_run.sequence_tracking import SequenceTracking
from autopar.foreign.trees import tree_leaves
from autopar.layout import Layout
from autopar.plan.sequence import SequencePlan
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sequence_parallel.blocks import RowsOfList
from autopar.tensor_parallel.sequence_parallel.borders import argument_names
from autopar.tensor_parallel.sequence_parallel.rows import rows_of

__all__ = ["SampleRows", "note_given", "note_inputs", "note_modules"]


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

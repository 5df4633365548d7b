"""Sequence parallelism of one model: the classes of its blocks and of what lies at borders, and all of that undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.foreign.modules import own_parameters
from autopar.plan.sequence import SequencePlan
from autopar.swap import swap, unswap
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sequence_parallel.blocks import Arguments, RowsBlock, RowsOfList
from autopar.tensor_parallel.sequence_parallel.borders import Entry, Whole
from autopar.tensor_parallel.sequence_parallel.parameters import ReadByRows, reader_class

__all__ = ["apply", "undo"]


def apply(model: nn.Module, plan: SequencePlan, region: Region, kind: Callable[..., RowsOfList] = RowsOfList) -> None:
    """Swap the classes of blocks and of modules inside them, in place; parameters stay where they are.

    The last of all swaps: the boundaries of blocks are in front of those of pipeline stages.
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    owned = {block: tuple(_held(modules, names)) for block, names in plan.parameters.items()}
    ids = {id(own_parameters(module)[name]) for held in owned.values() for module, name in held}
    for module in modules.values():
        own = tuple(sorted(name for name, parameter in own_parameters(module).items() if id(parameter) in ids))
        if own and not isinstance(module, ReadByRows):
            module.__class__ = reader_class(type(module), own)
            module.rows_region = region
    for path in plan.entries:
        swap(modules[path], Entry, rows_region=region)
    for path in plan.wholes:
        swap(modules[path], Whole, rows_region=region)
    for blocks in plan.lists:
        of = kind(region, plan)
        around = _model_around(modules, blocks[0])
        if around is not None:
            around.register_forward_pre_hook(Arguments(of, plan.seen), with_kwargs=True)
        for place, path in enumerate(blocks):
            ends = (place == 0, place == len(blocks) - 1)
            swap(modules[path], RowsBlock, rows_list=of, rows_ends=ends, rows_parameters=owned.get(path, ()))


def _held(modules: Mapping[str, nn.Module], names: Iterable[str]) -> Iterator[tuple[nn.Module, str]]:
    """Yield modules and names of the parameters that this stage holds."""
    for name in names:
        path, _, own = name.rpartition(".")
        if own_parameters(modules[path]).get(own) is not None:
            yield modules[path], own


def _model_around(modules: Mapping[str, nn.Module], block: str) -> nn.Module | None:
    """Return the Hugging Face model next around a block."""
    while block:
        block = block.rpartition(".")[0]
        if isinstance(modules[block], PreTrainedModel):
            return modules[block]
    return None


def undo(model: nn.Module, plan: SequencePlan) -> None:
    """Undo :func:`apply`, before what it came after; its hooks go with the others."""
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    for blocks in plan.lists:
        for path in blocks:
            unswap(modules[path], RowsBlock, "rows_list", "rows_ends", "rows_parameters")
    for path in plan.wholes:
        unswap(modules[path], Whole)
    for path in plan.entries:
        unswap(modules[path], Entry)
    for module in modules.values():
        if isinstance(module, ReadByRows):
            module.__class__ = type(module)._autopar_plain  # type: ignore[attr-defined]
        vars(module).pop("rows_region", None)

"""Where rows of the sequence become whole inside a block, and rows again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sequence_parallel.rows import gather_rows, own_rows

__all__ = ["Entry", "Whole", "argument_names", "change_first", "change_named", "change_output"]


class Entry:
    """Class before that of a module with a region: its first argument is the whole sequence, its rows leave it.

    What the region makes is summed into rows by its row-parallel layer, here or in a later module.
    """

    rows_region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region = self.rows_region
        if region.rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = change_first(self, args, kwargs, region.enter_whole)
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        region.leave()
        return output


class Whole:
    """Class before that of a module which mixes rows: it computes with whole sequences, as without sequence parallel.

    Its first argument is gathered, the first tensor that it returns becomes rows again.
    """

    rows_region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region = self.rows_region
        rows = region.rows
        if rows is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]

        def gathered(x: torch.Tensor) -> torch.Tensor:
            return region.mark_replicated(gather_rows(x, region.axis, rows))

        args, kwargs = change_first(self, args, kwargs, gathered)
        with region.whole():
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return change_output(output, lambda y: region.mark_rows(own_rows(y, region.axis, rows)))


def argument_names(module: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward."""
    kind: Any = type(module)
    return _names_of(kind)


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    while (swapped := next((each for each in kind.__mro__ if "_autopar_plain" in vars(each)), None)) is not None:
        kind = swapped._autopar_plain  # also below a class that FSDP2 has put on top
    return tuple(name for name in inspect.signature(inspect.unwrap(kind.forward)).parameters if name != "self")


def change_first(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a forward of which the first one, hidden states, is changed, wherever it is given."""
    if args:
        first = args[0]
    else:
        name = argument_names(module)[0]
        first = kwargs[name] if name in kwargs else next(x for x in kwargs.values() if isinstance(x, torch.Tensor))
    changed = change(first)
    return (
        tuple(changed if value is first else value for value in args),
        {name: changed if value is first else value for name, value in kwargs.items()},
    )


def change_named(
    module: Any,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a forward of which the tensors called ``names`` are changed."""
    known = argument_names(module)[: len(args)]
    positional = [
        change(value) if name in names and isinstance(value, torch.Tensor) else value
        for name, value in zip(known, args, strict=False)
    ]
    return (*positional, *args[len(known) :]), {
        name: change(value) if name in names and isinstance(value, torch.Tensor) else value
        for name, value in kwargs.items()
    }


def change_output(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return what a module returned with its first tensor changed: hidden states."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if type(output) in (tuple, list) and output and isinstance(output[0], torch.Tensor):
        changed = change(output[0])
        return output if changed is output[0] else type(output)([changed, *output[1:]])
    raise TypeError(f"a {type(output).__name__} is returned, where hidden states or a tuple of them is expected")

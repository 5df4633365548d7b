"""Hidden states that a model collects from its blocks: rows there, whole in what the model returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from autopar.tensor_parallel.regions import Region

__all__ = ["gather_hidden_states", "note_rows"]


def note_rows(x: torch.Tensor, region: Region, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Note that ``x`` is rows of hidden states, and what makes them whole; returns ``x``."""
    region.row_tensors[id(x)] = (weakref.ref(x), gather)
    return x


def gather_hidden_states(output: Any, region: Region) -> Any:
    """Return what a model returns with hidden states gathered; a collective of the axis if it holds rows."""
    if isinstance(output, torch.Tensor):
        ref, gather = region.row_tensors.get(id(output), (None, None))
        return gather(output) if ref is not None and gather is not None and ref() is output else output
    if isinstance(output, dict):
        for name, value in list(output.items()):
            changed = gather_hidden_states(value, region)
            if changed is not value:
                output[name] = changed
        return output
    if type(output) in (tuple, list):
        entries = [gather_hidden_states(entry, region) for entry in output]
        same = all(new is old for new, old in zip(entries, output, strict=True))
        return output if same else type(output)(entries)
    return output

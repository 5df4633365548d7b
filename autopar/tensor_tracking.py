"""What dispatch modes that follow tensors through operations have in common: identity of storages, in-place writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["storage_key", "written_in_place"]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number that all views of a storage share while it lives; None for a sparse tensor, which has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def written_in_place(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes into, lists of tensors as single entries."""
    if not func._schema.is_mutable:
        return []
    leaves: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            leaves += tree_leaves(args[number] if number < len(args) else kwargs.get(argument.name))
    return leaves

"""What is computed from tensors that a stage does not hold, found exactly: by following every operation.

The code in front of a stage's blocks runs on placeholders, and what it makes is replaced by what the stage receives.
Were anything of it used after all, the result would be wrong. A dispatch mode follows each tensor from the placeholders
on, through views, writes in place and comparisons too, where a value that is not a number leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.pipeline_parallel.p2p import map_tensors

__all__ = ["Absent"]

# Operations that read shapes and dtypes only.
_VALUELESS = frozenset(
    f"{name}{ending}"
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    for ending in ("_like",)
) | {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}


class Absent(TorchDispatchMode):
    """A dispatch mode in which each tensor knows from which marked tensors it was made, by their names.

    Attributes:
        looked_at: names whose values decided which code ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, frozenset[str]] = {}  # of a storage
        self._alive: list[Any] = []  # so that no other storage gets the number of a marked one
        self.looked_at: frozenset[str] = frozenset()

    def mark(self, value: Any, names: Iterable[str]) -> None:
        """Say of every tensor in ``value`` that it was made from these."""
        found = frozenset(names)
        map_tensors(value, lambda tensor: self._set(tensor, found))

    def origins(self, value: Any) -> frozenset[str]:
        """The names that any tensor in ``value`` was made from."""
        found: list[frozenset[str]] = []
        map_tensors(value, lambda tensor: found.append(self._of(tensor)))
        return frozenset().union(*found)

    def _of(self, tensor: torch.Tensor) -> frozenset[str]:
        number = _storage(tensor)
        return self._origins.get(number, frozenset()) if number is not None else frozenset()

    def _set(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        number = _storage(tensor)
        if number is None or names == self._origins.get(number, frozenset()):
            return
        if names and number not in self._origins:
            self._alive.append(tensor.untyped_storage())
        self._origins[number] = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        found = frozenset().union(*(self._of(leaf) for leaf in inputs))
        if not found or func._schema.name.rpartition("::")[2] in _VALUELESS:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            self.looked_at |= found
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._set(leaf, found)
        if func.namespace in ("c10d", "_c10d_functional"):  # their schemas do not say what they write
            written = inputs
        else:
            written = [leaf for leaf in _written(func, args, kwargs) if isinstance(leaf, torch.Tensor)]
        for leaf in written:
            self._set(leaf, found)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What an operation writes in place."""
    if not func._schema.is_mutable:
        return []
    leaves: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            leaves += tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return leaves


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor
        return None

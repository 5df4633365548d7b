"""Provenance of tensors: which results of a stage were computed from tensors that it does not hold.

The code in front of a stage's blocks runs on placeholders, and what it computes is replaced by what the stage receives.
Were anything of it used after all, the result would be wrong. A dispatch mode follows each tensor from the placeholders
on, through views, writes in place and comparisons too, where a value that is not a number leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autopar.pipeline_parallel.p2p import map_tensors
from autopar.tensor_tracking import TensorTracking, storage_key, tensors_in, written_in_place

__all__ = ["Provenance"]

# Operations that read shapes and dtypes only.
_VALUELESS = frozenset(
    f"{name}{ending}"
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    for ending in ("_like",)
) | {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}


class Provenance(TensorTracking):
    """Dispatch mode in which each tensor knows the names of the marked tensors from which it was computed.

    Attributes:
        read_by_control_flow: names whose values decided which code ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, frozenset[str]] = {}  # of a storage
        self._alive: list[Any] = []  # so that no other storage gets the number of a marked one
        self.read_by_control_flow: frozenset[str] = frozenset()

    def mark(self, value: Any, names: Iterable[str]) -> None:
        """Set the origins of every tensor in ``value``."""
        found = frozenset(names)
        map_tensors(value, lambda tensor: self._set(tensor, found))

    def origins(self, value: Any) -> frozenset[str]:
        """Return the names from which any tensor in ``value`` was computed."""
        found: list[frozenset[str]] = []
        map_tensors(value, lambda tensor: found.append(self._of(tensor)))
        return frozenset().union(*found)

    def _of(self, tensor: torch.Tensor) -> frozenset[str]:
        key = storage_key(tensor)
        return self._origins.get(key, frozenset()) if key is not None else frozenset()

    def _set(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        key = storage_key(tensor)
        if key is None or names == self._origins.get(key, frozenset()):
            return
        if names and key not in self._origins:
            self._alive.append(tensor.untyped_storage())
        self._origins[key] = names

    def track(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the result, and what is written in place, the origins of the arguments."""
        inputs = list(tensors_in((args, kwargs)))
        found = frozenset().union(*map(self._of, inputs))
        if not found or func._schema.name.rpartition("::")[2] in _VALUELESS:
            return
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read_by_control_flow |= found
        # the schemas of collectives do not say what they write
        collective = func.namespace in ("c10d", "_c10d_functional")
        for tensor in [*tensors_in(result), *(inputs if collective else written_in_place(func, args, kwargs))]:
            self._set(tensor, found)

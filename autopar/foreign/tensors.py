"""torch.Tensor: how often one was written into, what it is a view of, and subclasses without memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, cast

import torch

__all__ = [
    "assert_soon",
    "base_of",
    "storage_id",
    "swap_implementation",
    "version_of",
    "wrapper_subclass",
    "writes_into",
]

_VERSION = operator.attrgetter("_version")  # without a call of Python for each tensor
wrapper_subclass = torch.Tensor._make_wrapper_subclass  # (class, shape, dtype=, device=): a tensor without memory
assert_soon = torch._assert_async  # raises on the device, without waiting for it
swap_implementation = torch._C._swap_tensor_impl  # two tensors change places, their Python objects do not


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or what it shares memory with, was written into; ``.data`` does not count.

    0 for one of inference mode, of which torch does not count it.
    """
    return 0 if tensor.is_inference() else tensor._version


def writes_into(tensors: Iterable[torch.Tensor]) -> int:
    """Return how often tensors were written into, all together; 0 if one of them is of inference mode."""
    try:
        return sum(map(_VERSION, tensors))
    except RuntimeError:
        return 0


def base_of(tensor: Any) -> Any:
    """Return what a tensor is a view of; None if it is no view."""
    return tensor._base


def storage_id(storage: Any) -> int:
    """Return a number that tells storages apart as long as they live."""
    return cast("int", storage._cdata)

"""torch's operators as dispatch modes see them: their schemas, and some without a public name."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["GROUPED_MM", "ITEM", "TO_COPY", "UNSAFE_VIEW", "operator_of", "safe_softmax", "schema_of"]

ITEM = torch.ops.aten._local_scalar_dense.default  # reads a number
GROUPED_MM = torch.ops.aten._grouped_mm.default
TO_COPY = torch.ops.aten._to_copy
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
safe_softmax = torch.ops.aten._safe_softmax  # zeros where all scores are masked


def schema_of(func: Any) -> Any:
    """Return an operator's schema: ``name``, ``arguments``, ``returns``, ``is_mutable``."""
    return func._schema


def operator_of(func: Any) -> Any:
    """Return the operator of which ``func`` is one overload."""
    return func._overloadpacket

"""Refuse fused kernels that read sharded weights directly and would skip the all-reduce of their layers.

transformers takes such a function from an installed package (mamba-ssm) where there is one, and its own torch code
otherwise. A policy names them under ``without_kernels``; a model that would call one cannot be tensor-parallel.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from autopar.errors import UnsupportedModelError
from autopar.policy.schema import Policy

__all__ = ["check_kernels"]


def check_kernels(policy: Policy, model: nn.Module) -> None:
    """Raise UnsupportedModelError if a function that the policy names is not transformers' own torch code."""
    for name in policy.without_kernels:
        function = getattr(sys.modules.get(type(model).__module__), name, None)
        if _is_foreign(function):
            raise UnsupportedModelError(
                f"{type(model).__name__} would compute with the kernel '{name}' of an installed package, which "
                "multiplies by weights that tensor parallelism shards and never sums the result.\n"
                "  Uninstall that package (mamba-ssm, causal-conv1d) here, or leave tensor_parallel_size at 1 "
                f"({policy.where})."
            )


def _is_foreign(function: Any) -> bool:
    """Whether transformers' wrapper around a function has found another implementation than its own."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    found = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
    return bool(found.get("is_new_implementation", False))

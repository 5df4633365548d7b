"""The weight of an embedding or of a language model's head, whose rows here are not those that an id names."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from autopar.call_site import is_library, warn_user

__all__ = ["TOLD", "own_rows"]

TOLD = "_autopar_told"


def _read(self: Any) -> Any:
    weight = self._parameters.get("weight")
    if weight is None:
        if "weight" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no weight")
        weight = vars(self)["weight"]
    if not torch.compiler.is_compiling() and TOLD not in vars(self) and not is_library(sys._getframe(1)):
        _tell(self)
    return weight


def _write(self: Any, value: Any) -> None:
    vars(self)["weight"] = value  # nn.Module takes Parameters itself


def _delete(self: Any) -> None:
    del vars(self)["weight"]


def _tell(module: nn.Module) -> None:
    """Say once to code that is no library's that ``weight[id]`` is another token on each rank.

    Not of a layer that was constructed sharded (its plan has no path): who did that knows.
    """
    plan: Any = vars(module).get("autopar")
    layout = vars(module).get("autopar_layouts", {}).get("weight")
    if plan is None or not plan.path or layout is None or not (plan.rule == "embedding" or plan.gather_output):
        return
    vars(module)[TOLD] = True
    axis: Any = vars(module)["tp"]
    held = ", ".join(f"{start} to {stop - 1}" for start, stop in layout.ranges(axis.rank)) or "none"
    warn_user(
        f"{plan.path}.weight: this is tensor-parallel rank {axis.rank} of {axis.size} and has rows {held} of "
        f"{layout.size}, so weight[id] means another id on each rank.\n"
        "  Read or change rows before autopar.initialize, or after autopar.deparallelize(model)."
    )


own_rows = property(_read, _write, _delete, "This rank's rows, a Parameter.")
"""``weight`` of a layer that may hold a part of the vocabulary's rows."""

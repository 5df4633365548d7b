"""torch's optimizers: the parts of a step of Muon, which torch has in one piece for whole matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import _muon


def newton_schulz(direction: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return what Muon steps along instead of a direction: a matrix, nearly orthogonal, in bfloat16."""
    return _muon._zeropower_via_newtonschulz(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])


def muon_rates(group: Mapping[str, Any], shape: Sequence[int]) -> tuple[Any, Any]:
    """Return by what a step of Muon multiplies the weights of a matrix of ``shape``, and how far it goes."""
    rate: Any = group["lr"].squeeze() if isinstance(group["lr"], torch.Tensor) else group["lr"]
    return 1 - rate * group["weight_decay"], _muon._adjust_lr(rate, group["adjust_lr_fn"], torch.Size(shape))

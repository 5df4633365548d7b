"""Compare the planned memory of a rank with the allocated, in one line."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.config import ParallelConfig
from autopar.distributed.mesh import MPU
from autopar.plan.plan import Plan
from autopar.plan.stages import StagePlan
from autopar.tools.planner.model_states import ModelStates, RankBytes

__all__ = ["allocated_line", "planned_bytes"]

_KNOWN = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}


def planned_bytes(
    model: nn.Module, inner: nn.Module, plan: Plan, stages: StagePlan, config: ParallelConfig, mpu: MPU, optimizer: Any
) -> tuple[RankBytes, bool]:
    """Return what this rank will hold of ``model``, which is whole; and whether the optimizer's state is known."""
    name = _KNOWN.get(type(optimizer))
    if name == "sgd" and any(group.get("momentum") for group in optimizer.param_groups):
        name = "sgd-momentum"
    states = ModelStates(model, inner, plan, name or "sgd")
    place = (mpu.tp.rank, mpu.pp.rank, mpu.dp_cp.rank)
    return states.of_rank(stages, config, *place, mpu.dp_cp.size), name is not None


def allocated_line(model: nn.Module, planned: tuple[RankBytes, bool], device: torch.device) -> str:
    """Return planned and allocated bytes of this rank as one line."""
    held, known = planned
    local: list[Any] = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    weights, buffers = sum(p.nbytes for p in local), sum(b.nbytes for b in model.buffers())
    later = f", gradients {_megabytes(held.gradients)}" + (f", optimizer {_megabytes(held.optimizer)}" if known else "")
    measured = device.type != "cpu" and hasattr(torch.get_device_module(device), "memory_allocated")
    used = f"; {_megabytes(torch.get_device_module(device).memory_allocated(device))} of {device}" if measured else ""
    return (
        f"planned: weights {_megabytes(held.weights)}, buffers {_megabytes(held.buffers)}{later}; "
        f"allocated: weights {_megabytes(weights)}, buffers {_megabytes(buffers)}{used}"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"

"""Gradient clipping that counts every logical parameter once, and loss scaling with one verdict for all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import ConfigError
from autopar.layout import Layout
from autopar.mesh import MPU
from autopar.policy.plan import Plan

__all__ = ["GradScaler", "clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of a parallelized model to ``max_norm`` and return their norm, the same on every rank.

    ``torch.nn.utils.clip_grad_norm_`` sees only this rank's shards: it returns another, too small norm on each rank,
    scales the ranks differently, and replicated parameters drift apart. Here a shard counts where it lies, and what
    several ranks hold (replicated parameters, KV heads on more ranks than one, tied weights) counts once. Gradients
    are taken to be averaged over data parallel already, as ``DistributedDataParallel`` leaves them.

    Args:
        model: what ``autopar.initialize`` returned, or a wrapper such as ``DistributedDataParallel`` around it.
        max_norm: the largest norm that is left as it is.
        norm_type: p of the p-norm; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, if the norm is nan or infinite.

    Returns:
        The norm before clipping, a scalar in fp32 (fp64 for fp64 gradients).

    Raises:
        ConfigError: the model is not parallelized, ``max_norm`` or ``norm_type`` is no positive number.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_norm must be a number of at least 0, not {max_norm}")
    if not norm_type > 0:
        raise ConfigError(f"norm_type must be above 0, not {norm_type}")
    root, plan, mpu = _parallelized(model)
    gradients = [parameter.grad for parameter in root.parameters() if parameter.grad is not None]
    parts = []
    for name, parameter in root.named_parameters():  # a tied parameter comes once
        if parameter.grad is not None:
            parts += _counted_here(name, parameter.grad, plan.tensors[plan.canonical(name)].layout, mpu)
    norm = _combine(parts, norm_type, mpu, gradients)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, which is not finite"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(scale.to(local.device, local.dtype))
    return norm


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a parallelized model: an overflow on one rank skips the step on all of them.

    torch's own looks at this rank's gradients only: the rank that overflows skips, the others step, and they drift
    apart. Use it as torch's: ``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``.

    Args:
        mpu: ``model.mpu``; the verdict is shared over one model replica.
        device: ``cuda`` or ``cpu``; by default where the mpu computes.
        kwargs: what ``torch.amp.GradScaler`` takes.
    """

    def __init__(self, mpu: MPU, device: str | None = None, **kwargs: Any) -> None:
        super().__init__(device or mpu.device.type, **kwargs)
        self._mpu = mpu

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._unscale_grads_(*args, **kwargs)  # device -> 1.0 if its gradients are not finite
        flag = torch.zeros(1, device=self._mpu.device)
        for value in found.values():
            flag = torch.maximum(flag, value.to(flag.device).view(1))
        if self._mpu.model.size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._mpu.model.group)
        for value in found.values():
            value.copy_(flag.view(value.shape))
        return found


def _parallelized(model: nn.Module) -> tuple[nn.Module, Plan, MPU]:
    for module in model.modules():  # through wrappers
        state = vars(module).get("_autopar")
        if state is not None:
            return module, state.plan, state.mpu
    raise ConfigError(
        f"{type(model).__name__} is not parallelized: use torch.nn.utils.clip_grad_norm_, or autopar.initialize first"
    )


def _counted_here(name: str, gradient: torch.Tensor, layout: Layout | None, mpu: MPU) -> list[torch.Tensor]:
    """The parts of a local gradient that this rank counts."""
    sharded = isinstance(gradient, DTensor)
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if layout is None:
        return [local] if mpu.tp.rank == 0 else []
    if not layout.replicated:
        return [local]
    if sharded:
        raise ConfigError(
            f"{name} is held by several tensor-parallel ranks (fewer KV heads than ranks) and shared out by FSDP: "
            "its norm cannot be counted; use DistributedDataParallel"
        )
    return [gradient.narrow(layout.dim, start, stop - start) for start, stop in layout.owned_local(mpu.tp.rank)]


def _combine(parts: list[torch.Tensor], p: float, mpu: MPU, gradients: list[torch.Tensor]) -> torch.Tensor:
    sharded = any(isinstance(gradient, DTensor) for gradient in gradients)  # FSDP2 over dp
    axes = [axis for axis in ((mpu.tp, mpu.dp) if sharded else (mpu.tp,)) if axis.size > 1]
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    parts = [part for part in parts if part.numel()]
    if parts:
        norms = torch.stack([torch.linalg.vector_norm(part, p, dtype=dtype).to(mpu.device) for part in parts])
    else:
        norms = torch.zeros(1, dtype=dtype, device=mpu.device)
    if math.isinf(p):
        pair = torch.stack([norms.nan_to_num(nan=0.0, posinf=math.inf).max(), norms.isnan().any().to(dtype)])
        for axis in axes:
            dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=axis.group)  # gloo's MAX loses nan
        return pair[0] if pair[1] == 0 else pair[0] * math.nan
    total = norms.pow(p).sum()
    for axis in axes:
        dist.all_reduce(total, group=axis.group)
    return total.pow(1 / p)

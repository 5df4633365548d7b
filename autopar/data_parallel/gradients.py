"""Gradients of a parallelized model: averaged over the replicas, clipped by a norm that counts each parameter once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.data_parallel.grad_norm import clip_factor, own_axis, own_norm, scale_gradients
from autopar.data_parallel.grad_sync import average_over_replicas
from autopar.errors import ConfigError

__all__ = ["average_gradients", "clip_grad_norm_"]


def average_gradients(model: nn.Module) -> None:
    """Average the gradients of a parallelized model over data parallel, in place; every rank calls it.

    For training loops without ``DistributedDataParallel``, after the backward pass of the last micro-batch and before
    ``optimizer.step()``; also after ``execute_pipeline`` inside ``no_sync``. A gradient that some replicas lack counts
    as zero there.

    Raises:
        ConfigError: the model is not parallelized.
    """
    root, state = _parallelized(model)
    with state.steps.failures.wait("averaging the gradients over the data-parallel replicas", state.mpu.dp_cp.ranks):
        average_over_replicas(root, state.plan, state.stages, state.mpu)
    if state.pp is not None:
        state.pp.unaveraged = False


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of a parallelized model to ``max_norm`` and return their norm, the same on every rank.

    A shard counts where it lies, and what several ranks hold (replicated parameters, KV heads on more ranks than one,
    tied weights, also on two pipeline stages) counts once. ``torch.nn.utils.clip_grad_norm_`` of parameters of a
    parallelized model does the same, on every rank of a replica. Gradients are taken to be averaged over data parallel
    already, as ``DistributedDataParallel`` leaves them.

    Args:
        model: what ``autopar.initialize`` returned, or a model of ``ColumnParallelLinear`` and its like; or a wrapper
            such as ``DistributedDataParallel`` around it.
        max_norm: the largest norm that is left as it is.
        norm_type: p of the p-norm; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, if the norm is nan or infinite.

    Returns:
        The norm before clipping, a scalar in fp32 (fp64 for fp64 gradients).

    Raises:
        ConfigError: the model is not parallelized, its precision is fp16, ``max_norm`` or ``norm_type`` is no positive
            number.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_norm must be a number of at least 0, not {max_norm}")
    if not norm_type > 0:
        raise ConfigError(f"norm_type must be above 0, not {norm_type}")
    axis = None if any("_autopar" in vars(module) for module in model.modules()) else own_axis(model)
    norm = _norm(model, norm_type) if axis is None else own_norm(model, axis, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, which is not finite"
        )
    scale_gradients(model.parameters(), clip_factor(max_norm, norm))
    return norm


def _norm(model: nn.Module, norm_type: float) -> torch.Tensor:
    root, state = _parallelized(model)
    gradients = {name: p.grad for name, p in root.named_parameters() if p.grad is not None}  # a tied one comes once
    return state.dp.norm.of(gradients, norm_type)


def _parallelized(model: nn.Module) -> tuple[nn.Module, Any]:
    for module in model.modules():  # through wrappers
        state = vars(module).get("_autopar")
        if state is not None:
            return module, state
    raise ConfigError(
        f"{type(model).__name__} is not parallelized: use torch.nn.utils.clip_grad_norm_, or autopar.initialize first"
    )

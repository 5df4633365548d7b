"""Gradients of a parallelized model: averaged over the replicas, clipped by a norm that counts each parameter once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.data_parallel.grad_norm import counted_here, gradient_norm, local_part, own_axis, own_norm
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
    with state.steps.failures.blame("averaging the gradients over the data-parallel replicas", state.mpu.dp.ranks):
        average_over_replicas(root, state.plan, state.stages, state.mpu)
    vars(root)["_autopar_pipeline"].unaveraged = False


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of a parallelized model to ``max_norm`` and return their norm, the same on every rank.

    ``torch.nn.utils.clip_grad_norm_`` sees only this rank's shards: it returns another, too small norm on each rank,
    scales the ranks differently, and replicated parameters drift apart. Here a shard counts where it lies, and what
    several ranks hold (replicated parameters, KV heads on more ranks than one, tied weights, also on two pipeline
    stages) counts once. Gradients are taken to be averaged over data parallel already, as ``DistributedDataParallel``
    leaves them.

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
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            local.mul_(scale.to(local.device, local.dtype))
    return norm


def _norm(model: nn.Module, norm_type: float) -> torch.Tensor:
    root, state = _parallelized(model)
    if state.config.precision == "fp16":
        raise ConfigError(
            "clip_grad_norm_ would clip scaled gradients: with precision.dtype fp16 the optimizer takes the loss scale "
            "off inside of step(). Write gradient_clipping into the config; optimizer.gradient_norm is the norm."
        )
    parameters = dict(root.named_parameters())  # a tied parameter comes once
    if state.counted is None:
        state.counted = counted_here(parameters, state.plan, state.mpu)
    with state.steps.failures.blame("the norm of the gradients", state.mpu.model.ranks):
        return gradient_norm(parameters, state.plan, state.mpu, state.counted, norm_type)


def _parallelized(model: nn.Module) -> tuple[nn.Module, Any]:
    for module in model.modules():  # through wrappers
        state = vars(module).get("_autopar")
        if state is not None:
            return module, state
    raise ConfigError(
        f"{type(model).__name__} is not parallelized: use torch.nn.utils.clip_grad_norm_, or autopar.initialize first"
    )

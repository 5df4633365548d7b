"""DeepSpeed's engine with a parallelized model: check its mesh, and let its norm cover the full model.

DeepSpeed counts a parameter on every rank or only on the first rank, depending on attributes. Both are wrong for a
fused ``q | k | v`` with fewer KV heads than ranks, where several ranks hold the same KV heads. Without ZeRO torch's
patched ``clip_grad_norm_`` computes the norm; with ZeRO such clipping raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.compat.patches import patch_member
from autopar.data_parallel.gradients import ReplicaNorm
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.integrations.accelerate import alive, inside


def install() -> None:
    """Patch DeepSpeed after its import."""
    from deepspeed.runtime import engine

    patch_member(engine.DeepSpeedEngine, "__init__", _init)
    patch_member(engine, "clip_grad_norm_", _clip_grad_norm)


def _init(plain: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedEngine.__init__``, which broadcasts the weights to all replicas: check its arguments."""
    given = inspect.signature(plain).bind(engine, *args, **kwargs).arguments
    _check_mesh(given["model"], given.get("mpu"))
    plain(engine, *args, **kwargs)
    _check_norm(engine)


def _check_mesh(model: Any, mpu: Any) -> None:
    if isinstance(mpu, MPU) and mpu.cp.size > 1:
        raise ConfigError(
            f"context_parallel_size={mpu.cp.size}: DeepSpeed averages gradients over mpu.dp.group, without the "
            "context-parallel ranks\n  Use torch's DistributedDataParallel, or context_parallel_size=1."
        )
    if isinstance(mpu, MPU) and mpu.ep.size > mpu.tp.size:
        raise ConfigError(
            f"expert_parallel_size={mpu.ep.size} above tensor_parallel_size={mpu.tp.size}: DeepSpeed averages all "
            "gradients over mpu.dp.group,\n  whose replicas hold different experts. Use torch's "
            "DistributedDataParallel, or zero: {stage: 1} in autopar's config."
        )
    if mpu is None and isinstance(model, nn.Module) and inside(model) is not None:
        raise ConfigError(
            "deepspeed.initialize requires mpu= for a parallelized model, whose ranks hold different shards\n"
            "  Call deepspeed.initialize(model=model, mpu=model.mpu, ...). accelerate's DeepSpeed plugin cannot pass "
            "mpu: use\n  deepspeed.initialize, or zero: {stage: 1} in autopar's config."
        )


def _check_norm(engine: Any) -> None:
    """Raise ConfigError if the engine clips by a norm that omits shards or counts KV heads more than once."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    zero, mpu = engine.optimizer, inside(engine.module)
    if isinstance(zero, FP16_UnfusedOptimizer) and zero.clip_grad and mpu is not None and mpu.tp.size > 1:
        raise ConfigError(
            f"gradient_clipping is not supported with DeepSpeed's {type(zero).__name__} (half precision without ZeRO), "
            "whose norm counts the\n  shards of the first rank only. Use zero_optimization.stage 1 or 2, or remove "
            "gradient_clipping from DeepSpeed's config."
        )
    if isinstance(zero, torch.optim.Optimizer | None) or not engine.gradient_clipping():
        return
    parameters = [*engine.module.parameters()]
    name = next((name for one in alive() for name in one.mine(parameters) if _is_partly_counted(one, name)), None)
    if name is not None:
        raise ConfigError(
            f"gradient_clipping is not supported with DeepSpeed's {type(zero).__name__}, which counts KV heads of "
            f"{name} several times\n  Use zero: {{stage: 1}} in autopar's config instead of zero_optimization, or "
            "remove gradient_clipping."
        )


def _is_partly_counted(one: ReplicaNorm, name: str) -> bool:
    """Return whether several ranks hold some but not all elements of a parameter, which no attribute can describe."""
    layout = one.plan.tensors[one.plan.canonical(name)].layout
    if layout is None or not layout.replicated:
        return False
    counted = [sum(stop - start for start, stop in layout.owned_local(rank)) for rank in range(one.plan.tp)]
    return any(0 < own < layout.local_size(rank) for rank, own in enumerate(counted))


def _clip_grad_norm(plain: Any, parameters: Any, max_norm: float, norm_type: float = 2.0, mpu: Any = None) -> Any:
    """Replace DeepSpeed's ``clip_grad_norm_``, with which its engine clips without ZeRO."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(one.mine(listed) for one in alive()):
        return torch.nn.utils.clip_grad_norm_(listed, max_norm, norm_type)
    return plain(listed, max_norm, norm_type, mpu)

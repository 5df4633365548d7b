"""DeepSpeed's engine around a parallelized model: its mesh is given, and its norms count each element once.

DeepSpeed counts a parameter on every rank or on the first one only, as its marks say. Both would be wrong for a fused
``q | k | v`` with fewer KV heads than ranks, where several ranks hold the same KV heads. So the parts of its norms are
exchanged, and the elements that a lower rank counts are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autopar.data_parallel.replica_norm import ReplicaNorm
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.foreign.patches import patch_member, patch_name
from autopar.integrations.accelerate import alive, inside
from autopar.layout import Layout


def install() -> None:
    """Patch DeepSpeed, which has been imported."""
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    patch_member(engine.DeepSpeedEngine, "__init__", _init)
    patch_name(engine, "clip_grad_norm_", _clip_grad_norm)
    patch_member(DeepSpeedZeroOptimizer, "get_grad_norm_direct", _norm_of_partition)


def _init(plain: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """The body of ``DeepSpeedEngine.__init__``, which makes all that it takes for replicas alike."""
    given = inspect.signature(plain).bind(engine, *args, **kwargs).arguments
    _check_mesh(given["model"], given.get("mpu"))
    plain(engine, *args, **kwargs)
    _check_norm(engine)


def _check_mesh(model: Any, mpu: Any) -> None:
    if isinstance(mpu, MPU) and mpu.cp.size > 1:
        raise ConfigError(
            f"context_parallel_size={mpu.cp.size}: DeepSpeed averages gradients over mpu.get_data_parallel_group(), "
            "which\n  leaves out ranks that share their sequences. Use torch's DistributedDataParallel, or cp size 1."
        )
    if isinstance(mpu, MPU) and mpu.ep.size > mpu.tp.size:
        raise ConfigError(
            f"expert_parallel_size={mpu.ep.size} above tensor_parallel_size={mpu.tp.size}: DeepSpeed averages all "
            "gradients over mpu.get_data_parallel_group(),\n  whose replicas hold different experts. Use torch's "
            "DistributedDataParallel, or zero: {stage: 1} in autopar's config."
        )
    if mpu is None and isinstance(model, nn.Module) and inside(model) is not None:
        raise ConfigError(
            "deepspeed.initialize without mpu= takes all ranks for replicas of the model, and they hold different "
            "shards of it:\n  deepspeed.initialize(model=model, mpu=model.mpu, ...). accelerate's DeepSpeed plugin "
            "cannot give it; use deepspeed.initialize,\n  or zero: {stage: 1} in autopar's config."
        )


def _check_norm(engine: Any) -> None:
    """Raise ConfigError if the engine clips by a norm that leaves out shards, or counts KV heads more than once."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    zero, mpu = engine.optimizer, inside(engine.module)
    if isinstance(zero, FP16_UnfusedOptimizer) and zero.clip_grad and mpu is not None and mpu.tp.size > 1:
        raise ConfigError(
            f"DeepSpeed's {type(zero).__name__} (half precision without ZeRO) takes the norm of gradients without "
            "asking whose they are,\n  and so counts the shards of the first rank only: gradient_clipping would be "
            "wrong. Use zero_optimization.stage 1 or 2,\n  or leave gradient_clipping out of DeepSpeed's config."
        )
    exact = isinstance(zero, DeepSpeedZeroOptimizer | torch.optim.Optimizer | None) and not getattr(
        zero, "cpu_offload", False
    )
    if exact or not engine.gradient_clipping():
        return
    parameters = [*engine.module.parameters()]
    name = next((name for one in alive() for name, _ in _partly_counted(one, parameters)), None)
    if name is not None:
        raise ConfigError(
            f"DeepSpeed's {type(zero).__name__} would count KV heads of {name} several times, which more ranks hold "
            "than one:\n  gradient_clipping would be wrong. Use zero_optimization.stage 1 or 2 without "
            "offload_optimizer and with\n  data_types.grad_accum_dtype as it is by default, or leave "
            "gradient_clipping out."
        )


def _partly_counted(one: ReplicaNorm, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[str, Layout]]:
    """Yield name and layout of those of a model's parameters of which this rank counts a part only."""
    for name in one.mine(list(parameters)):
        layout = one.plan.tensors[one.plan.canonical(name)].layout
        if layout is not None and layout.replicated and any(_is_part(layout, rank) for rank in range(one.plan.tp)):
            yield name, layout


def _is_part(layout: Layout, rank: int) -> bool:
    return 0 < sum(stop - start for start, stop in layout.owned_local(rank)) < layout.local_size(rank)


def _clip_grad_norm(plain: Any, parameters: Any, max_norm: float, norm_type: float = 2.0, mpu: Any = None) -> Any:
    """The body of DeepSpeed's ``clip_grad_norm_``, by which its engine clips without ZeRO."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(one.mine(listed) for one in alive()):
        return torch.nn.utils.clip_grad_norm_(listed, max_norm, norm_type)
    return plain(listed, max_norm, norm_type, mpu)


def _norm_of_partition(plain: Any, zero: Any, gradients: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
    """The body of ``get_grad_norm_direct`` of ZeRO 1 and 2.

    Args:
        gradients: of ``params``, each flat; of the first and the last one what lies in this rank's partition.
    """
    params, gradients = list(params), list(gradients)
    layouts: dict[int, tuple[Layout, int]] = {}
    for one in alive():
        named = one.mine(params)
        layouts |= {id(named[name]): (layout, one.mpu.tp.rank) for name, layout in _partly_counted(one, params)}
    if not layouts:
        return plain(zero, gradients, params, *args, **kwargs)
    first = next(
        offset
        for group, offset in zip(zero.params_in_partition, zero.first_offset, strict=True)
        if group[:1] and group[0] is params[0]
    )
    given = iter(params)

    def counted(gradient: torch.Tensor) -> torch.Tensor:
        if getattr(gradient, "_zero_padding", False):
            return gradient
        parameter = next(given)
        if id(parameter) not in layouts:
            return gradient
        start = first if parameter is params[0] else 0
        mask = _counted_elements(parameter, *layouts[id(parameter)]).flatten()[start : start + gradient.numel()]
        return gradient.flatten() * mask.to(gradient.device)

    return plain(zero, [counted(gradient) for gradient in gradients], params, *args, **kwargs)


def _counted_elements(parameter: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Return which elements of this rank's shard no lower rank holds, too."""
    mask = torch.zeros(parameter.shape, dtype=torch.bool)
    for start, stop in layout.owned_local(rank):
        mask.narrow(layout.dim, start, stop - start).fill_(True)
    return mask

"""ZeRO stage 3: torch's FSDP2 over the data-parallel axis of a tensor-parallel model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.foreign.modules import own_parameters
from autopar.foreign.transformers import unsplit_modules

__all__ = ["blocks_of", "check_offload", "fully_shard"]


def check_offload(cpu_offload: bool) -> None:
    """Raise ConfigError where FSDP2 cannot offload: it copies through an accelerator's streams."""
    if cpu_offload and not torch.accelerator.is_available():
        raise ConfigError(
            "zero.cpu_offload moves shards between the CPU and an accelerator, and this machine has none; leave it out"
        )


def fully_shard(
    model: nn.Module,
    inner: nn.Module,
    mpu: MPU,
    dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
    blocks: Sequence[nn.Module] = (),
) -> None:
    """Shard weights, gradients and the optimizer's future state over dp x cp, block by block, in place.

    ``Parameter`` objects are replaced by ones that hold a ``DTensor``, this rank's shard.

    Args:
        dtype: in which the model computes; weights, gradients and their sums stay in fp32.
        cpu_offload: shards lie in the CPU's memory.
        blocks: of a plain module, what its policy names so.
    """
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, torch.float32)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
    mesh = mpu.dp_cp_mesh
    for module in (*blocks_of(inner, blocks), model):
        torch_fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    encodes = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    if encodes and callable(getattr(model, "generate", None)):  # which calls the encoder by itself
        register_fsdp_forward_method(model, "generate")


def blocks_of(inner: nn.Module, blocks: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Return the modules that transformers says must not be split, or recomputes one by one, and ``blocks``.

    Inner ones first; without those that share a weight with a module outside: it would no longer be one weight.
    """
    listed = unsplit_modules(inner)
    named = {id(block) for block in blocks}
    holders = _holders(inner)
    found = [
        module
        for module in inner.modules()
        if module is not inner
        and not isinstance(module, PreTrainedModel)
        and (
            isinstance(module, GradientCheckpointingLayer)
            or any(c.__name__ in listed for c in type(module).__mro__)
            or id(module) in named
        )
        and (own := _holders(module))
        and all(holders[key] == count for key, count in own.items())
    ]
    return found[::-1]


def _holders(root: nn.Module) -> Counter[int]:
    """``id(parameter)`` -> how many modules below ``root`` have it."""
    return Counter(id(p) for module in root.modules() for p in own_parameters(module).values() if p is not None)

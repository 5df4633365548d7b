"""What ``initialize`` does for data parallelism once a model is shared out over tp and pp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.config import ParallelConfig
from autopar.data_parallel.fsdp import fully_shard
from autopar.data_parallel.grad_norm import counted_here
from autopar.data_parallel.master_weights import DTYPES
from autopar.data_parallel.optimizer import ParallelStep
from autopar.data_parallel.optimizer_state import drop_absent, rebind, shard_state
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.plan.plan import Plan

__all__ = ["attach"]


def attach(
    model: nn.Module,
    inner: nn.Module,
    names: Mapping[int, str],
    plan: Plan,
    mpu: MPU,
    config: ParallelConfig,
    optimizer: Any,
    failures: FailureLog,
    blocks: Sequence[nn.Module] = (),
) -> ParallelStep | None:
    """ZeRO, precision and clipping of ``config``, for the model and the user's optimizer; every rank calls it.

    Args:
        inner: the Hugging Face model in ``model``, or a plain module.
        names: ``id(parameter)`` -> name, from when the model was whole.
        optimizer: checked already (:func:`~autopar.data_parallel.optimizer_state.check_optimizer`); or None.
        blocks: of the model.
    """
    if optimizer is not None:
        drop_absent(optimizer, model)
        shard_state(optimizer, names, plan, mpu.tp.rank)
    if config.zero_stage == 3:
        blocks = [] if isinstance(inner, PreTrainedModel) else blocks
        fully_shard(model, inner, mpu, DTYPES.get(config.precision), config.zero_cpu_offload, blocks)
        if optimizer is not None:
            rebind(optimizer, names, model)
    if optimizer is None:
        return None
    counted = counted_here(dict(model.named_parameters()), plan, mpu)
    return ParallelStep(optimizer, model, inner, plan, mpu, config, counted, failures)

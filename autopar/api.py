"""initialize() and deparallelize(): config -> mesh -> policy -> plan -> the model, in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn

from autopar import registry
from autopar.config import ParallelConfig
from autopar.distributed.agree import same_on_every_rank
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, not_parallelized
from autopar.policy.schema import Policy
from autopar.setup import steps
from autopar.setup.call import Call, check_call, make_plans
from autopar.setup.steps import Parallelized

__all__ = ["Parallelized", "deparallelize", "initialize"]

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


@overload
def initialize(
    model: Model,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    optimizer: None = None,
    lr_scheduler: None = None,
) -> Model: ...


@overload
def initialize(
    model: Model,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    optimizer: Optimizer,
    lr_scheduler: Any = None,
) -> tuple[Model, Optimizer]: ...


def initialize(
    model: Any,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
) -> Any:
    """Turn a Hugging Face model, or a custom module, into this rank's share of a parallel one, in place.

    The model sits in memory, or was built inside :func:`autopar.lazy_init`: then only this rank's shards ever do. Every
    process calls it with the same model and config. Parameter objects keep their identity, so an earlier optimizer
    continues to work. Under nccl the share moves to this rank's GPU.

    Args:
        model: A ``PreTrainedModel``, or a module with one inside; any other module with a ``policy``. Ranks may hold
            different random weights: all get rank 0's.
        config: Dict, path of a JSON or YAML file, or :class:`~autopar.config.ParallelConfig`. The data-parallel size
            is the rest of the world. Without torchrun the world is this one process.
        policy: Path, dict or YAML text of a custom policy, before the config's ``policy``. If neither is given, the
            policy that lists the model type is used, or one is derived where transformers ships a ``tp_plan``. Without
            ``match`` it describes ``model`` in full. ``"derive"`` derives one from the structure of a Hugging Face
            model and dry runs; ``autopar policy new`` writes the same one down, and proves it.
        optimizer: Any ``torch.optim`` optimizer over parameters of ``model``, made before. The config's ``zero``,
            ``precision`` and ``gradient_clipping`` then happen inside of its ``step``
            (:class:`~autopar.data_parallel.optimizer.ParallelStep`). Its state is sharded.
        lr_scheduler: Scheduler of ``optimizer``; only checked.

    Returns:
        ``model`` itself, or ``(model, optimizer)``, the same objects, if an optimizer was given. The model has
        ``model.mpu`` (:class:`~autopar.distributed.mesh.MPU`), ``model.save_parallelized`` and
        ``model.from_parallelized``. Rank 0 logs one line (INFO): policy, mesh, parameters and bytes.

    Raises:
        ConfigError, UnsupportedModelError, PolicyError: the call is wrong; nothing is changed.
        ConsistencyError: on the other ranks, if a rank raises or was called differently.
    """
    # 1. The call is right, and the same on every rank.
    registry.begin_asked()
    given = (model, config, policy, optimizer, lr_scheduler)
    call = same_on_every_rank(lambda: check_call(*given), Call.fingerprint)
    # 2. The mesh: process groups of all axes.
    mpu = MPU.of(call.config)
    try:  # 3. What each rank will hold, tried without data. The model is untouched so far.
        plans, weights = make_plans(model, call, mpu, optimizer)
    except Exception:
        mpu.destroy()
        raise
    # 4. The changes, in the order of autopar.setup.steps.STEPS.
    steps.apply(model, Parallelized(call, plans, mpu), steps.Given(weights, optimizer))
    return model if optimizer is None else (model, optimizer)


def deparallelize(model: Model) -> Model:
    """Give back the plain model with full weights on every rank; every rank calls it.

    Parameter objects keep their identity, gradients become full too. The optimizer's state does not: make a new one.
    Weights that ``precision`` made half become fp32 again where the optimizer kept fp32 weights. The process groups of
    ``model.mpu`` are destroyed, with the last one of a model and its copies.

    Raises:
        ConfigError: the model is not parallelized.
        CheckpointError: a save in the background failed; the model is unchanged, and a second call continues.
    """
    state: Parallelized | None = vars(model).get("_autopar")
    if state is None:
        raise not_parallelized(model)
    if state.config.fully_sharded:
        stage = state.config.zero_stage
        raise ConfigError(
            f"deparallelize: with zero.stage {stage} torch's FSDP holds the weights, and it cannot be undone"
        )
    if state.mpu.pp.size > 1 and state.plan.quantized():
        raise ConfigError(
            "deparallelize: quantized weights of other stages are gone from this rank: load the model again.\n"
            "  adapter_only=True saves what was trained."
        )
    model.wait_for_save()  # type: ignore[operator]
    steps.undo(model, state)
    return model

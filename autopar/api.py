"""``initialize`` and ``deparallelize``: from config to mesh, policy and plan, applied to the model in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from autopar import registry
from autopar.checkpoint import methods
from autopar.config import ParallelConfig
from autopar.distributed.agree import same_on_every_rank
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, not_parallelized
from autopar.pipeline_parallel import pipeline
from autopar.policy.schema import Policy
from autopar.setup import steps
from autopar.setup.call import Call, check_call, make_plans
from autopar.setup.steps import Parallelized

__all__ = ["ParallelModel", "Parallelized", "deparallelize", "initialize"]

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class ParallelModel(nn.Module):
    """The type of a parallelized model for type checkers: ``mpu``, the methods, and the other attributes as ``Any``.

    The model keeps its class, so it is not an instance of this class. Assign it to a new variable, because type
    checkers keep the class of the variable that was passed to :func:`autopar.initialize`.
    """

    mpu: MPU
    save_parallelized = methods.save_parallelized
    from_parallelized = methods.from_parallelized
    wait_for_save = methods.wait_for_save
    execute_pipeline = pipeline.execute_pipeline
    no_sync = pipeline.no_sync

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@overload
def initialize(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    optimizer: None = None,
    lr_scheduler: None = None,
) -> ParallelModel: ...


@overload
def initialize(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    optimizer: Optimizer,
    lr_scheduler: Any = None,
) -> tuple[ParallelModel, Optimizer]: ...


def initialize(
    model: Any,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
) -> Any:
    """Parallelize a Hugging Face model, or a custom module, in place: keep this rank's shards.

    Every process calls it with the same model and config. The model is in memory, or was built inside
    :func:`autopar.lazy_init`; then only this rank's shards are allocated. Parameter objects keep their identity, so an
    earlier optimizer continues to work. With nccl the shards move to this rank's GPU.

    Args:
        model: A ``PreTrainedModel``, a module with one inside, or any other module with a ``policy``. All ranks get
            rank 0's weights.
        config: A dict, the path of a JSON or YAML file, or a :class:`~autopar.config.ParallelConfig`. The data-parallel
            size follows from the world size. Without torchrun the world is one process.
        policy: The path, dict or YAML text of a custom policy, which overrides the config's ``policy``. By default the
            policy that lists the model type is used, or a policy is derived if transformers ships a ``tp_plan``. A
            policy without ``match`` describes the full ``model``. ``"derive"`` derives a policy from the structure of a
            Hugging Face model by dry runs; ``autopar policy new`` saves and verifies the same policy.
        optimizer: A ``torch.optim`` optimizer of the model's parameters. Its state is sharded, and its ``step`` applies
            the config's ``zero``, ``precision`` and ``gradient_clipping``
            (:class:`~autopar.data_parallel.optimizer.ParallelStep`).
        lr_scheduler: The scheduler of ``optimizer``; it is only checked.

    Returns:
        The same object ``model``, or ``(model, optimizer)`` if an optimizer was passed. The model has ``model.mpu``
        (:class:`~autopar.distributed.mesh.MPU`), ``model.save_parallelized`` and ``model.from_parallelized``. Rank 0
        logs one line (INFO): policy, mesh, parameters and bytes.

    Raises:
        ConfigError, UnsupportedModelError, PolicyError: The call is wrong. Nothing has changed.
        ConsistencyError: Another rank raises, or has other arguments.
    """
    # 1. Check that the call is valid and identical on all ranks.
    registry.begin_asked()
    given = (model, config, policy, optimizer, lr_scheduler)
    call = same_on_every_rank(lambda: check_call(*given), Call.fingerprint)
    # 2. Make the process groups of the mesh.
    mpu = MPU.of(call.config)
    try:  # 3. Plan the shards of each rank, and run them without data. The model is unchanged.
        plans, weights = make_plans(model, call, mpu, optimizer)
    except Exception:
        mpu.destroy()
        raise
    # 4. Change the model ([Note: order of setup and undo]).
    steps.apply(model, Parallelized(call, plans, mpu), steps.Given(weights, optimizer))
    return model if optimizer is None else (model, optimizer)


def deparallelize(model: Model) -> Model:
    """Restore the original model with full weights and gradients on every rank. Every rank calls it.

    Parameter objects keep their identity. The optimizer's state is not restored, so make a new optimizer.
    Half-precision weights become fp32 again if the optimizer kept fp32 weights. The process groups of ``model.mpu`` are
    destroyed together with the last copy of the model.

    Raises:
        ConfigError: The model is not parallelized.
        CheckpointError: A save in the background failed. The model is unchanged, and a second call continues.
    """
    state: Parallelized | None = vars(model).get("_autopar")
    if state is None:
        raise not_parallelized(model)
    if state.config.fully_sharded:
        stage = state.config.zero_stage
        raise ConfigError(f"deparallelize is not supported with zero.stage {stage}: torch's FSDP2 cannot be undone")
    if state.mpu.pp.size > 1 and state.plan.quantized():
        raise ConfigError(
            "deparallelize is not supported with quantized weights and pipeline stages: this rank lost other stages' "
            "weights.\n  Load the model again. adapter_only=True saves the trained adapters."
        )
    model.wait_for_save()  # type: ignore[operator]
    steps.undo(model, state)
    return model

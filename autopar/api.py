"""initialize() and deparallelize(): config -> mesh -> policy -> plan -> the model, in place."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar import checkpoint
from autopar.config import ParallelConfig
from autopar.errors import CheckpointError, ConfigError, ConsistencyError
from autopar.lazy_model import in_lazy_init
from autopar.materialize import Materializer, lazy_facts
from autopar.mesh import MPU, start_process_group
from autopar.policy.match import find_policy
from autopar.policy.plan import ModulePlan, Plan
from autopar.policy.resolve import make_plan
from autopar.policy.schema import Policy
from autopar.policy.uses import hugging_face_model
from autopar.tensor_parallel import parallelize
from autopar.tensor_parallel.attach import attach, detach
from autopar.tensor_parallel.consistency import share_random_state
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.rehearsal import rehearse

__all__ = ["deparallelize", "initialize", "on_every_rank"]

_log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Result = TypeVar("Result")


def initialize(
    model: Model,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
) -> Model:
    """Turn a Hugging Face model into this rank's share of a parallel one, in place.

    The model sits in memory, or was built inside :func:`autopar.lazy_init`: then only this rank's shards ever do.

    Every process calls it with the same model and config. Parameter objects keep their identity, so an optimizer made
    before goes on working. Under nccl the share moves to this rank's GPU.

    Args:
        model: a ``PreTrainedModel``, or a module with one inside. Ranks may hold different random weights: all get
            those of rank 0.
        config: dict, path of a JSON or YAML file, or :class:`~autopar.config.ParallelConfig`. The data-parallel size
            is what remains of the world. Without torchrun the world is this one process.
        policy: path, dict or YAML text of a policy of your own; None finds the one that lists the model type.

    Returns:
        ``model`` itself, with ``model.mpu`` (:class:`~autopar.mesh.MPU`), ``model.save_parallelized`` and
        ``model.from_parallelized``.

    Raises:
        ConfigError, UnsupportedModelError, PolicyError: what is wrong with the call, before anything is changed.
        ConsistencyError: on the ranks where nothing is wrong, if another rank raises or was called differently.
    """
    parsed = on_every_rank(lambda: _check_call(model, config), dataclasses.astuple)
    mpu = MPU(parsed.tensor_parallel_size, parsed.pipeline_parallel_size)
    try:  # every check is here; the model is untouched so far
        prefix, inner = hugging_face_model(model)
        by_expert = parsed.expert_parallel_size > 1
        plan, lazy = on_every_rank(
            lambda: _plan(model, prefix, inner, policy, mpu, by_expert), lambda made: _facts(made[0], model)
        )
        lazy.make_equal(mpu)
        lazy.draw(mpu)
    except Exception:
        mpu.destroy()
        raise
    parallelize.make_equal(model, mpu)
    share_random_state(mpu)
    region = Region(mpu.tp)
    parallelize.apply(model, plan, mpu.tp, region)
    on_every_rank(lambda: lazy.fill(mpu), lambda _: None)
    if mpu.device.type == "cuda" and not any(parameter.is_meta for parameter in model.parameters()):
        model.to(mpu.device)
    if parsed.activation_checkpointing:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    region.watch(model)
    attach(inner, plan, mpu, region, parsed.consistency_check)
    checkpoint.attach(model, plan, mpu, inner, prefix)
    model.mpu = mpu  # type: ignore[assignment]
    model._autopar = _State(plan, mpu, parsed)  # type: ignore[assignment]
    return model


def deparallelize(model: Model) -> Model:
    """Give back the plain model with full weights on every rank; every rank calls it.

    Parameter objects keep their identity, gradients are made whole too. The state of an optimizer is not: make a new
    one. The process groups of ``model.mpu`` are destroyed.

    Raises:
        ConfigError: the model is not parallelized.
        CheckpointError: a save in the background failed; the model is as it was, and a second call goes on.
    """
    state: _State | None = vars(model).get("_autopar")
    if state is None:
        raise ConfigError(f"{type(model).__name__} is not parallelized; autopar.initialize does that")
    _, inner = hugging_face_model(model)
    model.wait_for_save()  # type: ignore[operator]
    parallelize.undo(model, state.plan, state.mpu.tp)
    detach(inner)
    if state.config.activation_checkpointing:
        inner.gradient_checkpointing_disable()
    checkpoint.detach(model)
    del model._autopar, model.mpu
    state.mpu.destroy()
    return model


class _State:
    """What initialize leaves on the model for deparallelize and for the second call to find."""

    def __init__(self, plan: Plan, mpu: MPU, config: ParallelConfig) -> None:
        self.plan, self.mpu, self.config = plan, mpu, config


def on_every_rank(step: Callable[[], Result], facts: Callable[[Result], Any]) -> Result:
    """Run ``step``; if it fails on one rank, or its facts differ between ranks, every rank raises.

    A rank that fails raises its own error, the others a ConsistencyError (for a CheckpointError the same) that
    quotes it.
    """
    result: Result | None = None
    error: Exception | None = None
    verdict: tuple[str, str]
    try:
        result = step()
        text = json.dumps(facts(result), default=str)
        verdict = ("fine", hashlib.blake2b(text.encode(), digest_size=12).hexdigest())
    except Exception as caught:  # whatever it is, the peers must not wait for this rank
        kind = "checkpoint" if isinstance(caught, CheckpointError) else "error"
        error, verdict = caught, (kind, f"{type(caught).__name__}: {caught}")
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start_process_group()
        verdicts: list[tuple[str, str]] = [verdict] * dist.get_world_size()
        dist.all_gather_object(verdicts, verdict)
        if error is None:
            _raise_for_others(verdicts)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _raise_for_others(verdicts: list[tuple[str, str]]) -> None:
    for rank, (kind, text) in enumerate(verdicts):
        if kind == "checkpoint":
            raise CheckpointError(f"rank {rank} cannot load the model, so no rank does:\n{text}")
        if kind == "error":
            raise ConsistencyError(f"rank {rank} cannot initialize its model, so no rank does:\n{text}")
    different = [rank for rank, verdict in enumerate(verdicts) if verdict != verdicts[0]]
    if different:
        raise ConsistencyError(
            f"ranks {different} call autopar.initialize differently than rank 0: the config, the policy, or names, "
            "shapes, dtypes, devices (meta) or requires_grad of the model's tensors differ"
        )


def _check_call(model: nn.Module, config: Any) -> ParallelConfig:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    parsed = ParallelConfig.parse(config, world)
    if in_lazy_init():
        raise ConfigError("initialize inside lazy_init would make a model without memory: call it after the with.")
    _refuse_second(model)
    _, inner = hugging_face_model(model)
    if torch.is_inference_mode_enabled():
        raise ConfigError("initialize inside torch.inference_mode would make weights that cannot be trained: leave it")
    if parsed.activation_checkpointing and not inner.supports_gradient_checkpointing:
        raise ConfigError(f"activation_checkpointing: {type(inner).__name__} does not support it; leave it out.")
    return parsed


def _refuse_second(model: nn.Module) -> None:
    for path, module in model.named_modules():
        place = f"{type(module).__name__}{f' at {path}' if path else ''}"
        state: _State | None = vars(module).get("_autopar")
        if state is not None:
            tp, pp, dp = state.mpu.sizes
            raise ConfigError(
                f"{place} is parallelized already: "
                f"tensor_parallel_size={tp}, pipeline_parallel_size={pp}, data-parallel size {dp}.\n"
                "  autopar.deparallelize(model) gives back the plain model, which can be initialized again."
            )
        if isinstance(vars(module).get("autopar"), ModulePlan):
            raise ConfigError(f"{place} is part of a model that is parallelized already.")


def _plan(
    model: nn.Module,
    prefix: str,
    inner: PreTrainedModel,
    policy: str | Path | Mapping[str, Any] | Policy | None,
    mpu: MPU,
    by_expert: bool,
) -> tuple[Plan, Materializer]:
    plan = make_plan(model, find_policy(inner, policy), mpu.tp.size, by_expert=by_expert)
    if not rehearse(inner, prefix, plan) and policy is not None and plan.tp > 1:
        _log.warning(
            "%s does not run without data, so your policy could not be rehearsed: compare its loss and gradients with "
            "the plain model's once.",
            type(inner).__name__,
        )
    return plan, Materializer(model, inner, plan)


def _facts(plan: Plan, model: nn.Module) -> Any:
    """All that must be the same on every rank."""
    return [
        plan.model_type,
        [[tensor.name, tensor.to_json()] for tensor in plan.tensors.values()],
        [module.facts() for module in plan.modules.values()],
        [[a.path, a.name, a.values] for a in plan.attributes],
        [[name, p.is_meta, p.requires_grad] for name, p in model.named_parameters()],
        lazy_facts(model),
    ]

"""initialize() and deparallelize(): config -> mesh -> policy -> plan -> the model, in place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar import checkpoint
from autopar.activation_checkpoint import keep, keep_on_cpu, recompute
from autopar.config import ParallelConfig
from autopar.data_parallel.apply import attach as attach_optimizer
from autopar.data_parallel.fsdp import check_offload
from autopar.data_parallel.grad_sync import held_alike
from autopar.data_parallel.optimizer import ParallelStep
from autopar.data_parallel.optimizer_state import check_optimizer, check_state
from autopar.data_parallel.replica_check import StepCheck
from autopar.data_parallel.wrapper_check import WrapperCheck
from autopar.deferred_init.context import in_lazy_init
from autopar.deferred_init.materialize import Materializer, deferred_fingerprint
from autopar.distributed.consensus import same_on_every_rank
from autopar.distributed.excepthook import publish_uncaught
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.distributed.rng import share
from autopar.dry_run.block_reads import trace_reads
from autopar.dry_run.inputs import sample_inputs
from autopar.dry_run.tensor_parallel import FirstForward, check_plan, warn_no_dry_run
from autopar.errors import ConfigError
from autopar.pipeline_parallel.pipeline import Pipeline
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import ModulePlan, Plan
from autopar.plan.stages import Reads, StagePlan, elements_of, make_stages
from autopar.policy.described_model import model_inside
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from autopar.policy.schema import Policy
from autopar.tensor_parallel import parallelize
from autopar.tensor_parallel.consistency import ForwardCheck
from autopar.tensor_parallel.hooks import attach, detach
from autopar.tensor_parallel.megatron import parameter_marks as megatron_marks
from autopar.tensor_parallel.regions import Region

__all__ = ["deparallelize", "initialize"]

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
    """Turn a Hugging Face model, or a module of your own, into this rank's share of a parallel one, in place.

    The model sits in memory, or was built inside :func:`autopar.lazy_init`: then only this rank's shards ever do.

    Every process calls it with the same model and config. Parameter objects keep their identity, so an optimizer made
    before goes on working. Under nccl the share moves to this rank's GPU.

    Args:
        model: a ``PreTrainedModel``, or a module with one inside; any other module with a ``policy``. Ranks may hold
            different random weights: all get those of rank 0.
        config: dict, path of a JSON or YAML file, or :class:`~autopar.config.ParallelConfig`. The data-parallel size
            is what remains of the world. Without torchrun the world is this one process.
        policy: path, dict or YAML text of a policy of your own; None finds the one that lists the model type.
            Without ``match`` it describes ``model`` as a whole.
        optimizer: any ``torch.optim`` optimizer over parameters of ``model``, made before. The config's ``zero``,
            ``precision`` and ``gradient_clipping`` then happen inside of its ``step``
            (:class:`~autopar.data_parallel.optimizer.ParallelStep`). State that it has already is shared out.
        lr_scheduler: only checked to drive ``optimizer``; it goes on doing so.

    Returns:
        ``model`` itself, or ``(model, optimizer)``, the same objects, if an optimizer was given. The model has
        ``model.mpu`` (:class:`~autopar.distributed.mesh.MPU`), ``model.save_parallelized`` and
        ``model.from_parallelized``.

    Raises:
        ConfigError, UnsupportedModelError, PolicyError: what is wrong with the call, before anything is changed.
        ConsistencyError: on the ranks where nothing is wrong, if another rank raises or was called differently.
    """
    parsed, _ = same_on_every_rank(
        lambda: _check_call(model, config, policy, optimizer, lr_scheduler),
        lambda checked: {"config": dataclasses.asdict(checked[0]), "optimizer": checked[1]},
    )
    mpu = MPU(parsed.tensor_parallel_size, parsed.pipeline_parallel_size)
    try:  # every check is here; the model is untouched so far
        prefix, inner = _inside(model, policy)
        by_expert = parsed.expert_parallel_size > 1
        plan, lazy = same_on_every_rank(
            lambda: _plan(model, prefix, inner, policy, mpu, by_expert, optimizer, parsed.zero_stage),
            lambda made: _facts(made[0], model),
        )
        stages = same_on_every_rank(lambda: _stages(model, inner, policy, mpu, parsed), StagePlan.to_json)
        lazy.sync_parameters(mpu)
        lazy.draw(mpu, lambda name: mpu.pp.rank in stages.holders(name))
    except Exception:
        mpu.destroy()
        raise
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parallelize.sync_parameters(model, mpu)
    share(mpu.model, mpu.device)
    region = Region(mpu.tp)
    plain = not isinstance(inner, PreTrainedModel)
    first_forward = FirstForward(inner, plan) if plain else None
    parallelize.apply(model, plan, mpu.tp, region)
    blocks = [model.get_submodule(path) for path in stages.elements]
    if parsed.activation_checkpointing and plain:
        recompute(blocks)
    failures = FailureLog(mpu, parsed.pipeline.timeout)
    mpu.tp.explain = failures.failure_of_layer
    publish_uncaught(failures)
    wrappers = WrapperCheck(model, mpu)  # says first what it finds in a step
    comparing = parsed.consistency_check and parsed.zero_stage != 3
    steps = StepCheck(model, inner, mpu, failures, held_alike(model, plan, mpu), compare=comparing)
    pipeline = Pipeline(
        model, inner, stages, mpu, parsed.pipeline, failures, check=parsed.consistency_check, steps=steps
    )
    same_on_every_rank(lambda: lazy.fill(mpu), lambda _: None)
    if mpu.device.type == "cuda" and not any(parameter.is_meta for parameter in model.parameters()):
        model.to(mpu.device)
    if parsed.activation_checkpointing and not plain:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if parsed.activation_checkpointing and parsed.cpu_checkpointing:
        keep_on_cpu(inner)
    region.find_dropout(model)
    check = _forward_check(parsed, mpu, failures, region, steps)
    if check is not None:
        check.find_sharded(inner)
    attach(inner, plan, mpu, region, failures, check)
    if first_forward is not None:
        first_forward.attach(inner)
    pipeline.attach(model)
    checkpoint.attach(model, plan, mpu, inner, prefix, {name: stages.holders(name) for name in plan.tensors})
    model.mpu = mpu
    model._autopar = _State(plan, stages, mpu, parsed, prefix, steps)
    model._autopar.wrappers = wrappers
    model._autopar.step = attach_optimizer(model, inner, names, plan, mpu, parsed, optimizer, failures, blocks)
    megatron_marks.mark(model, plan, stages, mpu)
    return model if optimizer is None else (model, optimizer)


def deparallelize(model: Model) -> Model:
    """Give back the plain model with full weights on every rank; every rank calls it.

    Parameter objects keep their identity, gradients are made whole too. The state of an optimizer is not: make a new
    one. What ``precision`` made half becomes fp32 again where the optimizer kept fp32 weights. The
    process groups of ``model.mpu`` are destroyed.

    Raises:
        ConfigError: the model is not parallelized.
        CheckpointError: a save in the background failed; the model is as it was, and a second call goes on.
    """
    state: _State | None = vars(model).get("_autopar")
    if state is None:
        raise ConfigError(f"{type(model).__name__} is not parallelized; autopar.initialize does that")
    if state.config.zero_stage == 3:
        raise ConfigError("deparallelize: with zero.stage 3 torch's FSDP holds the weights, and it cannot be undone")
    inner = model.get_submodule(state.prefix)
    model.wait_for_save()  # type: ignore[operator]
    state.steps.remove()
    if state.step is not None and state.step.model is model:
        state.step.give_back_weights()
        state.step.remove()
    vars(model)["_autopar_pipeline"].undo(model)
    parallelize.undo(model, state.plan, state.mpu.tp)
    detach(inner)
    if state.config.activation_checkpointing and isinstance(inner, PreTrainedModel):
        inner.gradient_checkpointing_disable()
    elif state.config.activation_checkpointing:
        keep(inner)
    checkpoint.detach(model)
    megatron_marks.unmark(model)
    if state.wrappers is not None:
        state.wrappers.remove()
    del model._autopar, model.mpu
    state.mpu.destroy()
    return model


class _State:
    """What initialize leaves on the model for deparallelize and for the second call to find."""

    def __init__(
        self, plan: Plan, stages: StagePlan, mpu: MPU, config: ParallelConfig, prefix: str, steps: StepCheck
    ) -> None:
        self.plan, self.stages, self.mpu, self.config, self.prefix = plan, stages, mpu, config, prefix
        self.steps = steps
        self.counted: frozenset[str] | None = None  # what counts in the gradient norm here; made when first needed
        self.step: ParallelStep | None = None
        self.wrappers: WrapperCheck | None = None


def _forward_check(
    config: ParallelConfig, mpu: MPU, failures: FailureLog, region: Region, steps: StepCheck
) -> ForwardCheck | None:
    if not config.consistency_check or mpu.tp.size == 1:
        return None
    kind, _, number = config.consistency_inputs.partition(" ")
    every = {"auto": 10 if mpu.device.type == "cuda" else 1, "first": 0, "always": 1}.get(kind)
    return ForwardCheck(mpu, failures, region, steps, int(number) if every is None else every)


def _check_call(
    model: nn.Module, config: Any, policy: Any, optimizer: Any, lr_scheduler: Any
) -> tuple[ParallelConfig, list[list[str]]]:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    parsed = ParallelConfig.parse(config, world)
    if in_lazy_init():
        raise ConfigError("initialize inside lazy_init would make a model without memory: call it after the with.")
    _refuse_second(model)
    _, inner = _inside(model, policy)
    if torch.is_inference_mode_enabled():
        raise ConfigError("initialize inside torch.inference_mode would make weights that cannot be trained: leave it")
    supported = getattr(inner, "supports_gradient_checkpointing", True)  # of a plain module its policy's blocks
    if parsed.activation_checkpointing and not supported:
        raise ConfigError(f"activation_checkpointing: {type(inner).__name__} does not support it; leave it out.")
    check_offload(parsed.zero_cpu_offload)
    return parsed, check_optimizer(optimizer, lr_scheduler, model, parsed)


def _inside(model: nn.Module, policy: Any) -> tuple[str, Any]:
    return model_inside(model, None if policy is None else read_user_policy(policy))


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
        plan = vars(module).get("autopar")
        if isinstance(plan, ModulePlan) and not plan.where:
            raise ConfigError(
                f"{place} was built parallel by hand: initialize takes plain layers (nn.Linear), and shards them by a "
                "policy."
            )
        if isinstance(plan, ModulePlan):
            raise ConfigError(f"{place} is part of a model that is parallelized already.")


def _plan(
    model: nn.Module,
    prefix: str,
    inner: nn.Module,
    policy: str | Path | Mapping[str, Any] | Policy | None,
    mpu: MPU,
    by_expert: bool,
    optimizer: Any,
    stage: int,
) -> tuple[Plan, Materializer]:
    plan = make_plan(model, find_policy(inner, policy), mpu.tp.size, by_expert=by_expert)
    if optimizer is not None:
        check_state(optimizer, model, plan, stage)
    checked = check_plan(inner, prefix, plan) or not isinstance(inner, PreTrainedModel)
    if not checked and policy is not None and plan.tp > 1:
        warn_no_dry_run(inner)
    return plan, Materializer(model, inner, plan)


def _stages(
    model: nn.Module,
    inner: nn.Module,
    policy: str | Path | Mapping[str, Any] | Policy | None,
    mpu: MPU,
    config: ParallelConfig,
) -> StagePlan:
    pipeline, found = config.pipeline, find_policy(inner, policy)
    if config.activation_checkpointing and not isinstance(inner, PreTrainedModel) and not elements_of(model, found)[0]:
        raise ConfigError(
            f"activation_checkpointing recomputes the blocks of a model, and the policy of {type(inner).__name__} "
            f"names no 'blocks' ({found.where}); leave it out."
        )
    return make_stages(
        model,
        found,
        mpu.pp.size,
        reads=_reads(model, inner, found) if mpu.pp.size > 1 else None,
        chunks=pipeline.chunks if mpu.pp.size > 1 else 1,
        folded=pipeline.folded,
        layers_per_stage=pipeline.layers_per_stage,
    )


def _reads(model: nn.Module, inner: nn.Module, policy: Policy) -> Reads | None:
    """What the forward reads; of a task model whose head looks at values, the base model's; None if it is not known."""
    prefix, _ = model_inside(model, policy)
    if not isinstance(inner, PreTrainedModel):
        return None
    base = inner.base_model
    for traced, path in ((inner, prefix), (base, ".".join(filter(None, (prefix, inner.base_model_prefix))))):
        if isinstance(traced, PreTrainedModel):
            try:
                inputs = sample_inputs(traced)
            except ValueError:
                continue
            reads = trace_reads(traced, path if traced is not inner else prefix, *elements_of(model, policy), inputs)
            if reads is not None:
                return reads
    return None


def _facts(plan: Plan, model: nn.Module) -> Any:
    """All that must be the same on every rank."""
    return {
        "model type": plan.model_type,
        "tensors": {tensor.name: tensor.to_json() for tensor in plan.tensors.values()},
        "modules": {module.path: module.facts() for module in plan.modules.values()},
        "attributes": {f"{a.path}.{a.name}": a.values for a in plan.attributes},
        "parameters": {n: {"meta": p.is_meta, "requires_grad": p.requires_grad} for n, p in model.named_parameters()},
        "lazy": deferred_fingerprint(model),
    }

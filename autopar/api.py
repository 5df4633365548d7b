"""initialize() and deparallelize(): config -> mesh -> policy -> plan -> the model, in place."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar import activation_checkpoint, checkpoint, compiled_blocks
from autopar.config import ParallelConfig
from autopar.context_parallel import apply as context_parallel
from autopar.context_parallel.state import RowPlan
from autopar.data_parallel import apply as data_parallel
from autopar.data_parallel.fsdp import check_offload
from autopar.data_parallel.optimizer import ParallelStep
from autopar.data_parallel.optimizer_state import check_optimizer, check_state
from autopar.data_parallel.replica_check import StepCheck
from autopar.deferred_init.context import in_lazy_init
from autopar.deferred_init.materialize import Materializer, deferred_fingerprint
from autopar.distributed.consensus import same_on_every_rank
from autopar.distributed.excepthook import publish_uncaught
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.distributed.rng import sync_generators
from autopar.dry_run.block_reads import find_reads
from autopar.dry_run.context_parallel import check_beside_sequence, plan_rows
from autopar.dry_run.first_forward import FirstForward, warn_no_dry_run
from autopar.dry_run.garbage import uncollected
from autopar.dry_run.imported_plan import rehearse
from autopar.dry_run.sequence_parallel import plan_sequence
from autopar.errors import ConfigError
from autopar.on_demand import tool
from autopar.pipeline_parallel.pipeline import Pipeline
from autopar.plan.make_plan import make_plan
from autopar.plan.own_forwards import check_forwards
from autopar.plan.plan import ModulePlan, Plan
from autopar.plan.sequence import SequencePlan
from autopar.plan.stages import StagePlan, elements_of, make_stages
from autopar.plan.summary import count, imported_notice, summarise
from autopar.policy.described_model import model_inside
from autopar.policy.given_policy import given_policy
from autopar.policy.match import find_policy
from autopar.policy.schema import Policy
from autopar.tensor_parallel import apply as tensor_parallel
from autopar.tensor_parallel.parallelize import sync_parameters
from autopar.tensor_parallel.sequence_parallel import apply as sequence_parallel
from autopar.tensor_parallel.shape_errors import shards_named

__all__ = ["deparallelize", "initialize"]

_log = logging.getLogger(__name__)

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
        policy: path, dict or YAML text of a policy of your own, before the config's ``policy``; None of both finds the
            one that lists the model type, or imports the ``tp_plan`` that comes with the model. Without ``match`` it
            describes ``model`` as a whole.
            ``"derive"`` derives one from the structure of a Hugging Face model and dry runs; ``autopar policy new``
            writes the same one down, and proves it.
        optimizer: any ``torch.optim`` optimizer over parameters of ``model``, made before. The config's ``zero``,
            ``precision`` and ``gradient_clipping`` then happen inside of its ``step``
            (:class:`~autopar.data_parallel.optimizer.ParallelStep`). State that it has already is sharded.
        lr_scheduler: only checked to drive ``optimizer``; it goes on doing so.

    Returns:
        ``model`` itself, or ``(model, optimizer)``, the same objects, if an optimizer was given. The model has
        ``model.mpu`` (:class:`~autopar.distributed.mesh.MPU`), ``model.save_parallelized`` and
        ``model.from_parallelized``. Rank 0 logs one line (INFO): policy, mesh, parameters and bytes;
        and (DEBUG) what was planned for it next to what it has allocated.

    Raises:
        ConfigError, UnsupportedModelError, PolicyError: what is wrong with the call, before anything is changed.
        ConsistencyError: on the ranks where nothing is wrong, if another rank raises or was called differently.
    """
    checked = same_on_every_rank(lambda: _check_call(model, config, policy, optimizer, lr_scheduler), _Call.fingerprint)
    config = checked.config
    tp, pp, cp = config.tensor_parallel_size, config.pipeline_parallel_size, config.context_parallel_size
    mpu = MPU(tp, pp, config.transport, cp, config.reduce_dtype)
    try:  # every check is in here: the model is untouched so far
        plans = _make_plans(model, checked, mpu, optimizer)
    except Exception:
        mpu.destroy()
        raise
    _apply(model, checked, plans, mpu, optimizer)
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
    state: Parallelized | None = vars(model).get("_autopar")
    if state is None:
        raise ConfigError(f"{type(model).__name__} is not parallelized; autopar.initialize does that")
    if state.config.zero_stage == 3:
        raise ConfigError("deparallelize: with zero.stage 3 torch's FSDP holds the weights, and it cannot be undone")
    model.wait_for_save()  # type: ignore[operator]
    state.dp.undo()
    context_parallel.undo(model)
    if state.sequence is not None:
        sequence_parallel.undo(model, state.sequence)
    state.pp.undo(model)
    if state.config.activation_checkpointing:
        activation_checkpoint.undo(state.inner_of(model))
    if state.config.compile:
        compiled_blocks.undo(model.get_submodule(path) for path in state.stages.elements)
    tensor_parallel.undo(model, state.inner_of(model), state.plan, state.mpu)
    checkpoint.detach(model)
    del model._autopar, model.mpu
    state.mpu.destroy()
    return model


class Parallelized:
    """What ``initialize`` leaves on the model, as ``model._autopar``: for ``deparallelize``, savers and gradient norms.

    Attributes:
        plan: what this rank holds of each tensor over tp.
        stages: what it holds over pp.
        sequence: what its blocks compute with rows of the sequence; None without sequence parallelism.
        prefix: path of the Hugging Face model in the model, ``""`` if it is that.
        policy: the one that fitted; ``own_policy``: that one if the user gave it.
        pp, dp: the parts that can be undone.
    """

    def __init__(
        self,
        checked: _Call,
        plan: Plan,
        stages: StagePlan,
        mpu: MPU,
        pp: Pipeline,
        dp: data_parallel.DataParallel,
    ) -> None:
        self.config, self.prefix = checked.config, checked.prefix
        self.policy = checked.policy
        self.own_policy = checked.policy if checked.own_policy else None
        self.plan, self.stages, self.mpu, self.pp, self.dp = plan, stages, mpu, pp, dp
        self.sequence: SequencePlan | None = None

    @property
    def steps(self) -> StepCheck:
        """The check of the steps of the model's optimizers."""
        return self.dp.steps

    @property
    def step(self) -> ParallelStep | None:
        """What happens around the step of the optimizer that ``initialize`` was given."""
        return self.dp.step

    def inner_of(self, model: nn.Module) -> nn.Module:
        """Return the Hugging Face model in ``model``, or the plain module."""
        return model.get_submodule(self.prefix)


class _Call(NamedTuple):
    """The arguments of ``initialize``, checked.

    Attributes:
        prefix, inner: path and object of the Hugging Face model; of a plain module ``""`` and itself.
        policy: the one that fits; ``own_policy``: the user gave it.
        optimizer: parameters of each of its groups, by name.
    """

    config: ParallelConfig
    prefix: str
    inner: Any
    policy: Policy
    own_policy: bool
    optimizer: list[list[str]]

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be the same on every rank."""
        return {"config": dataclasses.asdict(self.config), "optimizer": self.optimizer}


class _Plans(NamedTuple):
    tensors: Plan
    stages: StagePlan
    weights: Materializer
    rows: RowPlan | None = None
    sequence: SequencePlan | None = None

    def fingerprint(self, model: nn.Module) -> dict[str, Any]:
        fingerprint = self.tensors.fingerprint(model) | {"lazy": deferred_fingerprint(model)}
        sequence = None if self.sequence is None else self.sequence.to_json()
        rows = self.rows and dataclasses.asdict(self.rows)
        return fingerprint | {"stages": self.stages.to_json(), "rows of sequences": sequence, "rows": rows}


def _check_call(model: nn.Module, config: Any, policy: Any, optimizer: Any, lr_scheduler: Any) -> _Call:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    parsed = ParallelConfig.parse(config, world)
    if in_lazy_init():
        raise ConfigError("initialize inside lazy_init would make a model without memory: call it after the with.")
    _refuse_second(model)
    own = given_policy(model, policy, parsed.policy)
    prefix, inner = model_inside(model, own)
    if torch.is_inference_mode_enabled():
        raise ConfigError("initialize inside torch.inference_mode would make weights that cannot be trained: leave it")
    check_offload(parsed.zero_cpu_offload)
    named = check_optimizer(optimizer, lr_scheduler, model, parsed)
    found = find_policy(inner, own)
    if parsed.activation_checkpointing:
        blocks = () if isinstance(inner, PreTrainedModel) else elements_of(model, found)[0]
        activation_checkpoint.check(inner, blocks, found.where)
    if parsed.compile:
        compiled_blocks.check(inner, elements_of(model, found)[0], found.where, parsed.compile_backend)
    return _Call(parsed, prefix, inner, found, own is not None, named)


def _refuse_second(model: nn.Module) -> None:
    for path, module in model.named_modules():
        place = f"{type(module).__name__}{f' at {path}' if path else ''}"
        state: Parallelized | None = vars(module).get("_autopar")
        if state is not None:
            tp, pp, dp, cp = state.mpu.sizes
            context = f" context_parallel_size={cp}," if cp > 1 else ""
            raise ConfigError(
                f"{place} is parallelized already: "
                f"tensor_parallel_size={tp},{context} pipeline_parallel_size={pp}, data-parallel size {dp}.\n"
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


def _make_plans(model: nn.Module, checked: _Call, mpu: MPU, optimizer: Any) -> _Plans:
    """Plan what this rank holds, dry-run it, draw what a deferred model lacks; with the same result on every rank."""
    with uncollected():
        plans = same_on_every_rank(lambda: _plan(model, checked, mpu, optimizer), lambda made: made.fingerprint(model))
    plans.weights.sync_parameters(mpu)
    plans.weights.draw(mpu, lambda name: mpu.pp.rank in plans.stages.holders(name))
    return plans


def _plan(model: nn.Module, checked: _Call, mpu: MPU, optimizer: Any) -> _Plans:
    config, policy, inner = checked.config, checked.policy, checked.inner
    plan = make_plan(model, policy, mpu.tp.size, by_expert=config.expert_parallel_size > 1)
    check_forwards(model, plan)
    if optimizer is not None:
        check_state(optimizer, model, plan, config.zero_stage)
    tried = rehearse(inner, checked.prefix, plan) or not isinstance(inner, PreTrainedModel)
    if not tried and checked.own_policy and plan.tp > 1:
        warn_no_dry_run(inner)
    stages = make_stages(
        model,
        policy,
        mpu.pp.size,
        reads=find_reads(model, policy) if mpu.pp.size > 1 else None,
        chunks=config.pipeline.chunks,
        folded=config.pipeline.folded,
        layers_per_stage=config.pipeline.layers_per_stage,
    )
    rows = None
    if mpu.cp.size > 1:
        rows = plan_rows(inner, policy, checked.prefix, mpu.cp.size, by_heads=plan.tp == 1)
    sharded = config.sequence_parallel and plan.tp > 1
    if rows is not None and sharded:
        check_beside_sequence(inner, rows, mpu.cp.size)
    sequence = plan_sequence(inner, checked.prefix, plan, stages) if sharded else None
    return _Plans(plan, stages, Materializer(model, inner, plan), rows, sequence)


def _apply(model: nn.Module, checked: _Call, plans: _Plans, mpu: MPU, optimizer: Any) -> None:
    """Change the model in place: tensors, then stages, then memory, then hooks and methods, then the optimizer."""
    config, inner, (plan, stages, weights, rows, sequence) = checked.config, checked.inner, plans
    plain = not isinstance(inner, PreTrainedModel)
    blocks = [model.get_submodule(path) for path in stages.elements]
    whole, notice = count(model), imported_notice(model, plan) if mpu.is_master else None
    telling = mpu.is_master and _log.isEnabledFor(logging.DEBUG)
    allocated = tool("planner.allocated") if telling else None
    planned = allocated.planned_bytes(model, inner, plan, stages, config, mpu, optimizer) if allocated else None
    mpu.failures = failures = FailureLog(mpu, config.pipeline.timeout)
    for axis in (mpu.tp, mpu.cp, mpu.tp_cp):
        axis.explain, axis.read_timeout = failures.failure_of_layer, config.loss_read_timeout
    publish_uncaught(failures, shards_named(model))

    sync_parameters(model, mpu)  # rank 0's values
    sync_generators(mpu.model)  # and random states
    first_forward = FirstForward(inner, plan) if plain else None  # of a copy, while the module is whole
    region = tensor_parallel.apply(model, plan, mpu)  # layers swapped, parameters sharded
    if config.activation_checkpointing:
        activation_checkpoint.apply(inner, blocks, on_cpu=config.cpu_checkpointing)
    if config.compile:
        compiled_blocks.apply(blocks, config.compile_backend, config.compile_mode, fullgraph=config.compile_fullgraph)
    dp = data_parallel.apply(model, inner, plan, mpu, config, failures)  # knows the parameters of all stages
    check = config.consistency_check
    pp = Pipeline(model, inner, stages, mpu, config.pipeline, failures, check=check)  # others released
    if sequence is not None:
        sequence_parallel.apply(model, sequence, region)

    same_on_every_rank(lambda: weights.fill(mpu), lambda _: None)  # shards of a deferred model get memory
    if mpu.device.type != "cpu" and not any(parameter.is_meta for parameter in model.parameters()):
        model.to(mpu.device)

    tensor_parallel.attach(inner, plan, mpu, config, region, failures, dp.steps)
    if first_forward is not None:
        first_forward.attach(inner)
    pp.attach(model)
    if rows is not None:
        always = config.loss_gather_logits == "always"
        context_parallel.apply(inner, rows, mpu.cp, config.context_parallel_method, gather_logits=always)
    holders = {name: stages.holders(name) for name in plan.tensors}
    checkpoint.attach(model, plan, mpu, inner, checked.prefix, holders)
    model.mpu = mpu  # type: ignore[assignment]
    state = Parallelized(checked, plan, stages, mpu, pp, dp)
    state.sequence = sequence
    model._autopar = state  # type: ignore[assignment]
    dp.attach(optimizer, blocks)
    pp.expect_steps(optimizer)
    tensor_parallel.mark_parameters(model, plan, stages, mpu)
    if notice is not None:
        _log.info("%s", notice)
    if mpu.is_master:
        _log.info("%s", summarise(model, whole, mpu.sizes, mpu.device, checked.policy.where))
    if allocated is not None:
        _log.debug("%s", allocated.allocated_line(model, planned, mpu.device))

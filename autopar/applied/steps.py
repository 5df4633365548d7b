"""How a model changes, in which order, and why: the steps of ``initialize``, and what takes each of them back.

:data:`STEPS` is the order. A step changes the model in place, and says why it stands where it does. Nothing is checked
any more: what can be wrong was found on the plans. A step that can be undone puts that onto ``state.undo``;
``deparallelize`` takes it from there, the last one first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from autopar import activation_checkpoint, checkpoint, compiled_blocks
from autopar.applied.state import Parallelized
from autopar.applied.torch_words import explained
from autopar.data_parallel.apply import DataParallel
from autopar.deferred_init.materialize import Materializer
from autopar.distributed.agree import same_on_every_rank
from autopar.distributed.broadcast_data import sync_parameters
from autopar.distributed.digest import extremes
from autopar.distributed.failures import FailureLog, publish_uncaught
from autopar.distributed.rng import sync_generators
from autopar.errors import tell
from autopar.on_demand import tool
from autopar.pipeline_parallel import pipeline as pipeline_methods
from autopar.plan.plan import derived_notice, held, summarise
from autopar.quantized.layers import keep_form
from autopar.tensor_parallel import apply as tensor_parallel

if TYPE_CHECKING:
    from autopar.dry_run.tensor_parallel import FirstForward

_log = logging.getLogger("autopar.api")


@dataclass
class Given:
    """Inputs of the steps that no parallelized model keeps.

    Attributes:
        weights: where the shards of a model without memory come from.
        optimizer: of the user, or None.
        first_forward: the dry run of a plain module, which comes with its first forward.
    """

    weights: Materializer
    optimizer: Any
    first_forward: FirstForward | None = None


def open_failure_log(model: nn.Module, state: Parallelized, given: Given) -> None:
    """First: what fails from here on is told to the other ranks."""
    mpu, config = state.mpu, state.config
    mpu.failures = state.failures = FailureLog(mpu, config.pipeline.timeout)
    for axis in (mpu.tp, mpu.cp, mpu.tp_cp, mpu.ep):
        axis.explain, axis.read_timeout = state.failures.failure_of_layer, config.loss_read_timeout
    publish_uncaught(state.failures, explained(model, state))


def take_values_of_rank_0(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Before sharding: all ranks have the same tensors still, so each is one broadcast."""
    sync_parameters(model, state.mpu)
    sync_generators(state.mpu.model)


def shard_layers(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Before stages: swap layers and shard parameters while every rank has all of them, so that they do it alike."""
    inner = state.inner_of(model)
    if state.plan.tp > 1 and not isinstance(inner, PreTrainedModel):
        from autopar.dry_run.tensor_parallel import FirstForward

        given.first_forward = FirstForward(inner, state.plan)  # of a copy, while the module is whole
    keep_form(model, keep=True)
    state.undo.append(lambda model, own: keep_form(model, keep=False))
    state.region = tensor_parallel.apply(model, inner, state.plan, state.mpu, state.config)
    state.undo.append(lambda model, own: tensor_parallel.undo(model, own.inner_of(model), own.plan, own.mpu))


def recompute_blocks(model: nn.Module, state: Parallelized, given: Given) -> None:
    """After sharding, around it: blocks as they are now are run again."""
    config = state.config
    if config.activation_checkpointing:
        how: Any = {"on_cpu": config.cpu_checkpointing, "save": config.checkpoint_saves}
        every = config.checkpoint_every
        activation_checkpoint.apply(state.inner_of(model), state.blocks_of(model), **how, every=every)
        state.undo.append(lambda model, own: activation_checkpoint.undo(own.inner_of(model)))


def compile_blocks(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Around recomputation, which becomes part of the graph."""
    config = state.config
    if config.compile:
        how = (config.compile_backend, config.compile_mode)
        compiled_blocks.apply(state.blocks_of(model), *how, fullgraph=config.compile_fullgraph)
        state.undo.append(lambda model, own: compiled_blocks.undo(own.blocks_of(model)))


def watch_replicas(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Before stages release parameters: norms and averages know the parameters of all stages by name."""
    inner = state.inner_of(model)
    state.dp = DataParallel(model, inner, state.plan, state.mpu, state.config, state.failures)


def release_other_stages(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Before memory: parameters of other stages become placeholders, and are never filled."""
    if state.stages.stages > 1:
        state.pipeline(model)
        state.undo.append(lambda model, own: own.pipeline(model).undo(model))


def run_on_rows_between_regions(model: nn.Module, state: Parallelized, given: Given) -> None:
    """After stages: the first and the last block of the rank cut and join rows."""
    if state.sequence is not None:
        from autopar.tensor_parallel import sequence_parallel

        sequence_parallel.apply(model, state.sequence, state.region)
        state.undo.append(lambda model, own: sequence_parallel.undo(model, own.sequence))  # type: ignore[arg-type]


def fill_weights(model: nn.Module, state: Parallelized, given: Given) -> None:
    """When it is known what this rank holds: shards of a model from ``lazy_init`` get memory, and then a device."""
    same_on_every_rank(lambda: given.weights.fill(state.mpu), lambda _: None)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if state.mpu.device.type != "cpu" and not on_meta:
        model.to(state.mpu.device)


def hook_forwards(model: nn.Module, state: Parallelized, given: Given) -> None:
    """When weights have memory: what ranks compare at a forward is found out by their contents."""
    inner = state.inner_of(model)
    tensor_parallel.attach(inner, state.plan, state.mpu, state.config, state.region, state.failures, state.dp.steps)
    if given.first_forward is not None:
        given.first_forward.attach(inner)
    pipeline_methods.attach(model)
    state.undo.append(lambda model, own: pipeline_methods.detach(model))
    if state.pp is not None:
        state.pp.attach(model)


def run_on_rows_of_sequences(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Inside the hooks of tensor parallelism: these see the whole batch, and what is behind them this rank's rows."""
    if state.rows is not None:
        from autopar.context_parallel import apply as context_parallel

        config, always = state.config, state.config.loss_gather_logits == "always"
        method = config.context_parallel_method
        context_parallel.apply(state.inner_of(model), state.rows, state.mpu.cp, method, gather_logits=always)
        state.undo.append(lambda model, own: context_parallel.undo(model))


def add_savers(model: nn.Module, state: Parallelized, given: Given) -> None:
    """On the model as it stays: its state dict, ``save_parallelized`` and ``from_parallelized``."""
    holders = {name: state.stages.holders(name) for name in state.plan.tensors}
    inner: Any = state.inner_of(model)
    checkpoint.attach(model, state.plan, state.mpu, inner, state.prefix, holders)
    state.undo.append(lambda model, own: checkpoint.detach(model))
    model.mpu = state.mpu  # type: ignore[assignment]
    model._autopar = state  # type: ignore[assignment]


def prepare_optimizer(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Last: parameters are the final ones, so fp32 copies, shares of ZeRO and FSDP are made of these."""
    state.dp.attach(given.optimizer, state.blocks_of(model))
    state.undo.append(lambda model, own: own.dp.undo())
    if state.pp is not None:
        if state.config.fully_sharded:
            state.pp.tied.rebind(model)
        state.pp.expect_steps(given.optimizer)
    tensor_parallel.mark_parameters(model, state.inner_of(model), state.plan, state.stages, state.mpu)


STEPS: tuple[Callable[[nn.Module, Parallelized, Given], None], ...] = (
    open_failure_log,
    take_values_of_rank_0,
    shard_layers,
    recompute_blocks,
    compile_blocks,
    watch_replicas,
    release_other_stages,
    run_on_rows_between_regions,
    fill_weights,
    hook_forwards,
    run_on_rows_of_sequences,
    add_savers,
    prepare_optimizer,
)


def apply(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Make all steps, and say on rank 0 what has become of the model."""
    mpu, plan, stages = state.mpu, state.plan, state.stages
    whole, notice = held(model)[0], derived_notice(model, plan, state.policy) if mpu.is_master else None
    telling = mpu.is_master and _log.isEnabledFor(logging.DEBUG)
    allocated = tool("planner.memory_plan") if telling else None
    facts = (model, state.inner_of(model), plan, stages, state.config, mpu, given.optimizer)
    planned = allocated.planned_bytes(*facts) if allocated else None
    for step in STEPS:
        step(model, state, given)
    if notice is not None:
        tell(_log, notice)
    if mpu.is_master:
        tell(_log, summarise(model, whole, mpu.sizes, mpu.device, state.policy.where))
    if allocated is not None:
        _log.debug("%s", allocated.allocated_line(model, planned, mpu.device))


def undo(model: nn.Module, state: Parallelized) -> None:
    """Take back all steps, the last one first, and destroy the process groups, unless a copy goes on with them."""
    with state.failures.wait("deparallelize", range(state.mpu.world_size)):
        (kept,), _ = extremes([int(state.shares_its_mesh)], None)  # some ranks alone may hold a copy
    while state.undo:
        state.undo.pop()(model, state)
    del model._autopar, model.mpu
    state.forget()
    if not kept:
        state.mpu.destroy()

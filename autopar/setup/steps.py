"""The steps of ``initialize``, which change a model in place, and the functions that undo them.

[Note: order of setup and undo] :data:`STEPS` lists the steps in order; the docstring of each gives the reason for its
place. All checks have passed on the plans before, so a step does not check anything. Layers are sharded while every
rank has all of them. Then stages release the blocks of other ranks, and only then do weights from ``lazy_init`` get
memory. The optimizer comes last, because its fp32 copies and ZeRO shards need the final parameters. A step that can be
undone appends a function to ``state.undo``; ``deparallelize`` calls these in reverse order. The state is
``model._autopar``.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from autopar import checkpoint, registry
from autopar.data_parallel.apply import DataParallel
from autopar.data_parallel.grad_sync import ReplicaGradients
from autopar.deferred_init.materialize import Materializer
from autopar.distributed.agree import same_on_every_rank
from autopar.distributed.digest import extremes, sync_parameters
from autopar.distributed.failures import FailureLog, publish_uncaught
from autopar.distributed.mesh import MPU
from autopar.distributed.rng import sync_generators
from autopar.dry_run.plan_model import Plans
from autopar.errors import tell
from autopar.pipeline_parallel import pipeline as pipeline_methods
from autopar.plan.plan import Plan, derived_notice, held, summarise
from autopar.plan.stages import StagePlan
from autopar.policy.schema import DERIVED, Policy
from autopar.setup.call import Call
from autopar.stored import keep_form
from autopar.tensor_parallel import apply as tensor_parallel
from autopar.tensor_parallel.regions import Region

if TYPE_CHECKING:
    from autopar.dry_run.tensor_parallel import FirstForward
    from autopar.pipeline_parallel.microbatch import OwnLoss

_log = logging.getLogger("autopar.api")
_alive: weakref.WeakSet[Parallelized] = weakref.WeakSet()


class Parallelized:
    """The state of a parallelized model, for ``deparallelize``, savers and gradient norms.

    Attributes:
        plan: The shards of this rank over tp.
        stages: The stages of this rank over pp.
        features: The plans of features by name, and the objects that their steps keep on the model.
        prefix: The path of the Hugging Face model in the model; ``""`` if it is the model.
        policy: The policy of the model. ``own_policy``: the same policy if the user passed it, otherwise None.
        failures, region, dp: The objects that the steps create.
        pp: The stages on this rank; None before :meth:`pipeline` is called.
        undo: The functions ``undo(model, state)`` of the steps, in order.
    """

    failures: FailureLog
    region: Region
    dp: DataParallel

    def __init__(self, call: Call, plans: Plans, mpu: MPU) -> None:
        self.config, self.prefix, self.policy, self.mpu = call.config, call.prefix, call.policy, mpu
        self.own_policy: Policy | None = call.policy if call.own_policy else None
        self.plan: Plan = plans.tensors
        self.stages: StagePlan = plans.stages
        self.features: dict[str, Any] = dict(plans.features)
        self.undo: list[Callable[[Any, Parallelized], None]] = []
        self.pp: pipeline_methods.Pipeline | None = None
        _alive.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallelized:
        copied = memo[id(self)] = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        _alive.add(copied)
        return copied

    def pipeline(self, model: Any) -> pipeline_methods.Pipeline:
        """Return the stages of ``model`` on this rank. Without pipeline parallelism they are made at the first call."""
        if self.pp is None:
            inner, config = self.inner_of(model), self.config
            loss, check = self.own_loss(inner), config.consistency_check
            self.pp = pipeline_methods.Pipeline(
                model, inner, self.stages, self.mpu, config.pipeline, self.failures, loss, check=check
            )
        return self.pp

    def own_loss(self, inner: Any) -> OwnLoss:
        """Return facts about the loss that a Hugging Face model, or a custom module, computes itself."""
        from autopar.pipeline_parallel.microbatch import OwnLoss

        return OwnLoss.of(inner, self.policy if self.policy.name == DERIVED else self.own_policy)

    def inner_of(self, model: nn.Module) -> nn.Module:
        """Return the Hugging Face model in ``model``, or the custom module."""
        return model.get_submodule(self.prefix)

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of ``model`` on all stages."""
        return [model.get_submodule(path) for path in self.stages.elements]


@dataclass
class Given:
    """The inputs of the steps that the parallelized model does not keep.

    Attributes:
        weights: The source of the shards of a model on the meta device.
        optimizer: The user's optimizer, or None.
        first_forward: The dry run of a custom module, which needs the inputs of the first forward.
    """

    weights: Materializer
    optimizer: Any
    first_forward: FirstForward | None = None


def open_failure_log(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Open the failure log first, so that later failures are published to the other ranks."""
    mpu, config = state.mpu, state.config
    mpu.failures = state.failures = FailureLog(mpu, config.pipeline.timeout)
    for axis in (mpu.tp, mpu.cp, mpu.tp_cp, mpu.ep):
        axis.explain, axis.read_timeout = state.failures.failure_of_layer, config.loss_read_timeout
    publish_uncaught(state.failures)


def take_values_of_rank_0(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Broadcast rank 0's values before sharding, while all ranks have the same tensors."""
    sync_parameters(model, state.mpu)
    sync_generators(state.mpu.model)


def shard_layers(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Swap layers and shard parameters before stages release any, while every rank has all of them."""
    inner = state.inner_of(model)
    if state.plan.tp > 1 and state.own_policy is not None and not isinstance(inner, PreTrainedModel):
        from autopar.dry_run.tensor_parallel import FirstForward

        given.first_forward = FirstForward(inner, state.plan)  # it copies the module before sharding
    keep_form(model, keep=True)
    state.undo.append(lambda model, own: keep_form(model, keep=False))
    state.region = tensor_parallel.apply(model, inner, state.plan, state.mpu, state.config)
    state.undo.append(lambda model, own: tensor_parallel.undo(model, own.inner_of(model), own.plan, own.mpu))


def compile_blocks(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Compile blocks outside of recomputation, which becomes part of the graph.

    Each block is compiled at its first call. Equal blocks share their graphs, which contain the collectives. Code
    between blocks (masks, the loss, sharded logits) is not compiled.
    """

    def undo(model: Any, own: Parallelized) -> None:
        for block in own.blocks_of(model):
            vars(block).pop("_compiled_call_impl", None)

    config = state.config
    if config.compile:
        how: dict[str, Any] = {"mode": config.compile_mode} if config.compile_mode != "default" else {}
        for block in state.blocks_of(model):
            block.compile(backend=config.compile_backend, fullgraph=config.compile_fullgraph, **how)
        state.undo.append(undo)


def watch_replicas(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Set up data parallelism before stages release parameters: norms and averages need the names of all stages."""
    inner = state.inner_of(model)
    state.dp = DataParallel(model, inner, state.plan, state.mpu, state.config, state.failures)
    state.dp.replicas = ReplicaGradients(state.plan, state.stages, state.mpu, state.failures)


def release_other_stages(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Replace parameters of other stages by placeholders before weights get memory, so that they never get any."""
    if state.stages.stages > 1:
        state.pipeline(model)
        state.undo.append(lambda model, own: own.pipeline(model).undo(model))


def fill_weights(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Fill the shards of a model from ``lazy_init`` and move them to the device, once this rank's shards are final.

    FSDP2 does it later: it shards parameters on the meta device, or moves each block to the device before sharding it.
    """
    if state.config.fully_sharded:
        return
    _fill(state, given)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if state.mpu.device.type != "cpu" and not on_meta:
        model.to(state.mpu.device)


def _fill(state: Parallelized, given: Given) -> None:
    same_on_every_rank(lambda: given.weights.fill(state.mpu), lambda _: None)


def hook_forwards(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Hook the forwards after weights have memory, because comparisons read their values (not with FSDP2)."""
    inner = state.inner_of(model)
    tensor_parallel.attach(inner, state.plan, state.mpu, state.config, state.region, state.failures, state.dp.steps)
    if given.first_forward is not None:
        given.first_forward.attach(inner)
    pipeline_methods.attach(model)
    state.undo.append(lambda model, own: pipeline_methods.detach(model))
    if state.pp is not None:
        state.pp.attach(model)


def add_savers(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Add the methods for saving and loading once the modules are final."""
    holders = {name: state.stages.holders(name) for name in state.plan.tensors}
    inner: Any = state.inner_of(model)
    checkpoint.attach(model, state.plan, state.mpu, inner, state.prefix, holders)
    state.undo.append(lambda model, own: checkpoint.detach(model))
    model.mpu = state.mpu  # type: ignore[assignment]
    model._autopar = state  # type: ignore[assignment]


def prepare_optimizer(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Set up the optimizer last: fp32 copies, ZeRO shards and FSDP need the final parameters."""
    state.dp.attach(given.optimizer, state.blocks_of(model), lambda: _fill(state, given))
    state.undo.append(lambda model, own: own.dp.undo())
    if state.pp is not None:
        if state.config.fully_sharded:
            state.pp.tied.rebind(model)
        state.pp.expect_steps(given.optimizer)
    tensor_parallel.mark_parameters(model, state.inner_of(model), state.plan, state.mpu)


STEPS: tuple[Callable[[nn.Module, Parallelized, Given], None], ...] = (
    open_failure_log,
    take_values_of_rank_0,
    shard_layers,
    compile_blocks,
    watch_replicas,
    release_other_stages,
    fill_weights,
    hook_forwards,
    add_savers,
    prepare_optimizer,
)


def apply(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Run all steps, and log a summary on rank 0."""
    mpu = state.mpu
    whole, notice = held(model)[0], derived_notice(model, state.plan, state.policy) if mpu.is_master else None
    for step in registry.in_order(STEPS, state.config):
        step(model, state, given)
    if notice is not None:
        tell(_log, notice)
    unchecked = registry.missing("guards", "Comparisons of ranks (consistency_check)").strip()
    if unchecked and state.config.consistency_check and mpu.is_master:
        tell(_log, unchecked)
    if mpu.is_master:
        tell(_log, summarise(model, whole, mpu.sizes, mpu.device, state.policy.where))


def undo(model: nn.Module, state: Parallelized) -> None:
    """Undo all steps in reverse order, and destroy the process groups unless a copy of the model uses them."""
    copied = any(other is not state and other.mpu is state.mpu for other in _alive)
    with state.failures.wait("deparallelize", range(state.mpu.world_size)):
        (kept,), _ = extremes([int(copied)], None)  # only some ranks may have a copy
    while state.undo:
        state.undo.pop()(model, state)
    del model._autopar, model.mpu
    _alive.discard(state)
    if not kept:
        state.mpu.destroy()

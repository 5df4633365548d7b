"""Set up the data parallelism of a model: ZeRO, precision, clipping, and checks of its wrappers and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from autopar import registry
from autopar.config import ParallelConfig
from autopar.data_parallel.fully_sharded import FullySharded
from autopar.data_parallel.grad_sync import ReplicaGradients, held_alike
from autopar.data_parallel.gradients import ReplicaNorm, counted_here
from autopar.data_parallel.optimizer_state import keep_stage, look_at_new, rebind, shard_state, stepped_whole
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.guards.model_changes import WrapperCheck
from autopar.guards.step import StepCheck, forget
from autopar.plan.plan import Plan

if TYPE_CHECKING:
    from autopar.data_parallel.optimizer import ParallelStep


class DataParallel:
    """The data parallelism of a model, created after tp shards its weights and before stages release any.

    Attributes:
        wrappers: The check of wrappers around the model.
        steps: The check of the steps of its optimizers.
        fully_sharded: The FSDP2 model of ZeRO stages 2 and 3; None for other stages.
        norm: The norm of its gradients, also for torch's clippers and loss scalers.
        replicas: The average of its gradients over the replicas.
        step: The hooks around ``step()`` of the optimizer in :meth:`attach`; None without one.
    """

    def __init__(
        self, model: nn.Module, inner: nn.Module, plan: Plan, mpu: MPU, config: ParallelConfig, failures: FailureLog
    ) -> None:
        self.model, self.inner, self.plan, self.mpu, self.config = model, inner, plan, mpu, config
        self.failures = failures
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.wrappers = WrapperCheck(
            model, mpu, shares_experts=bool(plan.experts), fully_sharded=config.fully_sharded
        )  # before StepCheck, so that its errors come first
        compares = config.consistency_check and not config.fully_sharded and mpu.dp_cp.size > 1
        make = registry.entry("guards", "step") if compares else None
        comparison = None if make is None else make(mpu, failures, config.parameters_every, plan.experts)
        look = partial(look_at_new, plan, config)
        self.steps = StepCheck(model, mpu, failures, held_alike(model, plan, mpu), comparison, look)
        owned = config.zero_reduce_scatter and mpu.dp_cp.size > 1
        self.norm = ReplicaNorm(model, plan, mpu, failures, scaled=config.precision == "fp16", owned=owned)
        self.replicas: ReplicaGradients
        self.step: ParallelStep | None = None
        self.fully_sharded: FullySharded | None = None

    def attach(self, optimizer: Any, blocks: Sequence[nn.Module], fill: Callable[[], None]) -> None:
        """Set up ZeRO, precision and clipping for final parameters and a checked optimizer (or None). Collective.

        Args:
            blocks: The blocks of the model.
            fill: A function that allocates and fills FSDP2's shards of parameters on the meta device.
        """
        model, inner, plan, mpu, config = self.model, self.inner, self.plan, self.mpu, self.config
        if optimizer is not None:
            keep_stage(optimizer, model)
            shard_state(optimizer, self.names, plan, mpu.shards.rank, stepped_whole(optimizer, config))
        if config.fully_sharded:
            blocks = [] if isinstance(inner, PreTrainedModel) else blocks
            self.fully_sharded = FullySharded(model, inner, mpu, config, self.failures, blocks, plan.experts)
            fill()
            if optimizer is not None:
                rebind(optimizer, self.names, model)
        if optimizer is not None:
            from autopar.data_parallel.optimizer import ParallelStep

            counted = counted_here(dict(model.named_parameters()), plan, mpu)
            self.step = ParallelStep(optimizer, model, inner, plan, mpu, config, counted, self.failures)
            self.replicas.owners = self.step.owners
            self.norm.owners = self.step.owners if self.step.reduces else None

    def undo(self) -> None:
        """Undo the setup, and write the fp32 weights into the model. With ZeRO-1 a collective of the dp axis."""
        forget(self.steps)
        self.wrappers.remove()
        self.norm.remove()
        if self.fully_sharded is not None:
            self.fully_sharded.remove()
        if self.step is not None and self.step.model is self.model:  # the optimizer does not step a copied model
            self.step.give_back_weights()
            self.step.remove()

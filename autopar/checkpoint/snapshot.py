"""What one rank contributes to a checkpoint, collected and checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.checkpoint import random_states
from autopar.checkpoint.fsdp_shards import gather
from autopar.checkpoint.optimizer_state import take
from autopar.checkpoint.optimizer_weights import LOSS_SCALE, differs_by_replica, loss_scale, masters, owns
from autopar.checkpoint.state import local_tensors, state_of
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.plan.plan import TensorPlan
from autopar.storage.json_values import encode

__all__ = ["Snapshot", "snapshot"]


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a checkpoint.

    Attributes:
        tensors: part -> name -> what this rank writes.
        dtypes: of all the model's tensors that this rank holds, also those that others write.
        parameters: the names among them that are parameters.
        plans: of the optimizer's tensors on this rank.
        facts: of the optimizer, or None.
        training: the scheduler and the user's data as JSON.
        random_state: of this process, or None.
        by_replica: the replicas hold different parts of the optimizer's state.
        in_shares: the replicas share the model's tensors out; the same on every rank.
    """

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    dtypes: Mapping[str, str]
    parameters: tuple[str, ...]
    plans: Mapping[str, TensorPlan]
    facts: Any
    training: Mapping[str, Any]
    random_state: Any
    by_replica: bool
    in_shares: bool

    def gathered(self, mpu: MPU) -> Snapshot:
        """The same with whole tensors on the first replica, in host memory, where all of them have shares; over dp."""
        return replace(self, tensors={part: gather(tensors, mpu) for part, tensors in self.tensors.items()})

    def copied(self) -> Snapshot:
        """The same with tensors of its own in host memory, so that training can go on while they are written."""
        copies = {
            part: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for part, tensors in self.tensors.items()
        }
        return replace(self, tensors=copies)


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Collect this rank's share; tensors are the live ones, not copies. No communication.

    What the replicas share out as DTensors is in the snapshot of each, for :meth:`Snapshot.gathered`.

    Raises:
        CheckpointError: the model is not the one that was parallelized, or something cannot be saved; names it.
    """
    state = state_of(model)
    plan, mpu = state.plan, state.mpu
    held = local_tensors(model, shares=True)
    chosen: dict[str, dict[str, torch.Tensor]] = {
        "model": {
            name: tensor
            for name, tensor in held.items()
            if (mpu.dp.rank == 0 or isinstance(tensor, DTensor))
            and (mpu.tp.rank == 0 or plan.tensors[name].layout is not None)
            and state.writes(name)
        }
    }
    plans: dict[str, TensorPlan] = {}
    facts = None
    by_replica = False
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise CheckpointError(f"optimizer={optimizer!r} must be a torch.optim.Optimizer")
        by_replica = differs_by_replica(optimizer)
        taken = take(optimizer, model, plan, mpu.tp.rank)
        facts = taken.facts
        parameters = {plan.canonical(name): parameter for name, parameter in model.named_parameters()}
        tensors = {name: (tensor, taken.plans[name]) for name, tensor in taken.tensors.items()}
        for name, weight in masters(optimizer, model, plan).items():
            if tensors.setdefault(name, weight) is not weight:
                raise CheckpointError(
                    f"{type(optimizer).__name__} has a state that would be called {name} as its fp32 weight is"
                )
        for name, (tensor, due) in tensors.items():
            parameter, _, key = name.partition("::")
            here = due.layout is not None or mpu.tp.rank == 0 or key.endswith(f"@tp{mpu.tp.rank}")
            replica = owns(optimizer, parameters[parameter]) if by_replica else mpu.dp.rank == 0
            if here and state.writes(parameter) and (replica or isinstance(tensor, DTensor)):
                chosen.setdefault("optimizer", {})[name] = tensor
                plans[name] = due
    training: dict[str, Any] = {}
    if optimizer is not None and (scale := loss_scale(optimizer)) is not None:
        training[LOSS_SCALE] = scale
    loose: dict[str, torch.Tensor] = {}
    if lr_scheduler is not None:
        if not hasattr(lr_scheduler, "state_dict"):
            raise CheckpointError(f"lr_scheduler={lr_scheduler!r} has no state_dict")
        kept = {"class": type(lr_scheduler).__name__, "state": lr_scheduler.state_dict()}
        training["lr_scheduler"], found = encode(kept, "lr_scheduler")
        loose |= found
    if extra is not None:
        if not isinstance(extra, Mapping):
            raise CheckpointError(f"extra={extra!r} must be a dict")
        training["extra"], found = encode(dict(extra), "extra")
        loose |= found
    if loose and mpu.rank == 0:
        chosen["extra"] = loose
    if optimizer is not None:
        chosen.setdefault("optimizer", {})
    resumable = optimizer is not None or lr_scheduler is not None
    return Snapshot(
        tensors=chosen,
        dtypes={name: str(tensor.dtype).removeprefix("torch.") for name, tensor in held.items()},
        parameters=tuple(name for name, tensor in held.items() if isinstance(tensor, nn.Parameter)),
        plans=plans,
        facts=facts,
        training=training,
        random_state=random_states.take(mpu.random_tracker) if resumable else None,
        by_replica=by_replica,
        in_shares=any(isinstance(tensor, DTensor) for tensor in held.values()),
    )

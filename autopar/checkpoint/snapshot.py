"""One rank's part of a checkpoint, collected and checked before anything is written.

One rank writes a weight that several ranks hold. So all of them are compared first: the same, or no save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.checkpoint import random_states
from autopar.checkpoint.extra import Extra, unlike
from autopar.checkpoint.optimizer_state import take
from autopar.checkpoint.optimizer_weights import (
    LOSS_SCALE,
    owns,
    parameters_by_name,
    saved_master_weights,
    step_of,
    writer_of,
)
from autopar.checkpoint.quantized_base import base_tensors, notes_of
from autopar.checkpoint.state import State, local_tensors, state_of
from autopar.distributed.axis import Axis
from autopar.distributed.digest import sum_of_bits
from autopar.errors import CheckpointError, listed
from autopar.foreign.tensors import local_part
from autopar.layout import replica_rows
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.json_values import encode
from autopar.storage.safetensors_io import dtype_name


@dataclass(frozen=True)
class Snapshot:
    """One rank's contribution to a checkpoint.

    Attributes:
        tensors: part -> name -> what this rank writes.
        report: what the manifest says of this rank, as JSON: of all the model's tensors that it holds, also those that
            others write, the dtypes, and which are parameters; plans of the other tensors; the optimizer's metadata,
            the scheduler, the user's data; the random state.
        extra: the user's data on this rank, to be compared.
        by_replica: the replicas hold different parts of the optimizer's state (ZeRO-1).
        fsdp: the model's tensors are sharded over the replicas; the same on every rank.
    """

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    report: Mapping[str, Any]
    extra: Extra | None
    by_replica: bool
    fsdp: bool

    def gathered(self, state: State) -> Snapshot:
        """Gather FSDP shards: the first rank that holds parts gets a whole one on the CPU, others none. Collective."""
        return replace(self, tensors={part: _gather_all(tensors, state) for part, tensors in self.tensors.items()})

    def copied(self) -> Snapshot:
        """Copy the tensors to host memory, so that training can go on while they are written."""
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
    """Collect what this rank writes; tensors are the live ones, not copies. No communication.

    FSDP shards are in the snapshot of each replica, for :meth:`Snapshot.gathered`.

    Raises:
        CheckpointError: the model is not the one that was parallelized, or something cannot be saved; names it.
    """
    state = state_of(model)
    plan, mpu = state.plan, state.mpu
    local = local_tensors(model, fsdp=True)
    tensors: dict[str, dict[str, torch.Tensor]] = {
        "model": {
            name: tensor
            for name, tensor in local.items()
            if (state.holders_of(name).rank == 0 or isinstance(tensor, DTensor))
            and (mpu.tp.rank == 0 or plan.tensors[name].layout is not None)
            and state.writes(name)
        }
    }
    tensors["base"], base_plans = base_tensors(model, state)
    plans: dict[str, TensorPlan] = {}
    metadata = None
    by_replica = False
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise CheckpointError(f"optimizer={optimizer!r} must be a torch.optim.Optimizer")
        by_replica = (step := step_of(optimizer)) is not None and step.sharded  # ZeRO-1
        tensors["optimizer"], plans, metadata = _optimizer_tensors(optimizer, model, state, by_replica)
    training, loose = _training_values(optimizer, lr_scheduler)
    own = None if extra is None else Extra.of(extra, plan, local)
    if own is not None:
        training["extra"], loose = own.value, {**loose, **own.loose}
    tensors["extra"], extra_plans = _extra_tensors(own, loose, state)
    resumable = optimizer is not None or lr_scheduler is not None
    place = {"tp": mpu.tp.rank, "pp": mpu.pp.rank, "dp": mpu.dp.rank} | ({"cp": mpu.cp.rank} if mpu.cp.size > 1 else {})
    report = {
        "dtypes": {name: dtype_name(tensor.dtype) for name, tensor in local.items()},
        "parameters": [name for name, tensor in local.items() if isinstance(tensor, nn.Parameter)],
        "plans": {name: due.to_json() for name, due in plans.items()},
        "base notes": notes_of(model, state),
        "base plans": {name: due.to_json() for name, due in base_plans.items()},
        "optimizer": metadata,
        "training": training if mpu.rank == 0 else {},
        "extra": {name: due.to_json() for name, due in extra_plans.items()},
        "sharded extra": own.names(plan) if own is not None else [],
        "random": {**place, "state": random_states.take(mpu.random_tracker)} if resumable else None,
    }
    fsdp = any(isinstance(tensor, DTensor) for tensor in local.values())
    return Snapshot(tensors, report, own, by_replica, fsdp)


def _optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, state: State, by_replica: bool
) -> tuple[dict[str, torch.Tensor], dict[str, TensorPlan], Any]:
    """Return the optimizer's tensors that this rank writes, how they are sharded, and its metadata."""
    plan, mpu = state.plan, state.mpu
    taken = take(optimizer, model, plan, mpu.shards.rank)
    parameters = parameters_by_name(model, plan)
    held = {name: (tensor, taken.plans[name]) for name, tensor in taken.tensors.items()}
    for name, weight in saved_master_weights(optimizer, plan).items():
        if held.setdefault(name, weight) is not weight:
            raise CheckpointError(
                f"{type(optimizer).__name__} has a state that would be called {name} as its fp32 weight is"
            )
    tensors, plans = {}, {}
    for name, (tensor, due) in held.items():
        parameter, _, key = name.partition("::")
        writer = writer_of(optimizer, parameters[parameter], plan.tensors[parameter])
        place = mpu.shards.rank if parameter in plan.experts else mpu.tp.rank
        here = due.layout is not None or place == writer or key.endswith(f"@tp{mpu.shards.rank}")
        replica = owns(optimizer, parameters[parameter]) if by_replica else state.holders_of(parameter).rank == 0
        if here and state.writes(parameter) and (replica or isinstance(tensor, DTensor)):
            tensors[name], plans[name] = tensor, due
    return tensors, plans, taken.metadata


def _training_values(
    optimizer: torch.optim.Optimizer | None, lr_scheduler: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return loss scale and scheduler as JSON, and the tensors in them."""
    training: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    step = None if optimizer is None else step_of(optimizer)
    if step is not None and step.scale is not None:
        training[LOSS_SCALE] = dict(step.scale.state_dict())
    if lr_scheduler is not None:
        if not hasattr(lr_scheduler, "state_dict"):
            raise CheckpointError(f"lr_scheduler={lr_scheduler!r} has no state_dict")
        value = {"class": type(lr_scheduler).__name__, "state": lr_scheduler.state_dict()}
        training["lr_scheduler"], tensors = encode(value, "lr_scheduler")
    return training, tensors


def _extra_tensors(
    extra: Extra | None, loose: Mapping[str, torch.Tensor], state: State
) -> tuple[dict[str, torch.Tensor], dict[str, TensorPlan]]:
    """Return the tensors beside model and optimizer that this rank writes: rank 0 what all have, each its shards."""
    mpu = state.mpu
    tensors = dict(loose) if mpu.rank == 0 else {}
    plans = {name: TensorPlan(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}
    for name, tensor, due in extra.tensors(state.plan) if extra is not None else ():
        here = (due.layout is not None or mpu.tp.rank == 0) and state.writes(name)
        if here and (state.holders_of(name).rank == 0 or isinstance(tensor, DTensor)):
            tensors[due.name], plans[due.name] = tensor, due
    return tensors, plans


# -- weights that FSDP2 shards over the replicas (ZeRO's stages 2 and 3) -----------------------------------------------


@torch.no_grad()
def _gather_all(tensors: Mapping[str, torch.Tensor], state: State) -> dict[str, torch.Tensor]:
    """Gather DTensors: full on the CPU of their first rank, none on their others; other tensors stay as they are.

    Collective: all ranks give the same DTensors in the same order.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            result[name] = tensor
            continue
        parameter = name.partition("::")[0]
        full = _gather(tensor, state.rows_of(parameter), state.mpu.device)
        if full is not None and state.holders_of(parameter).rank == 0:
            result[name] = full
    return result


def _gather(tensor: DTensor, axis: Axis, device: torch.device) -> torch.Tensor | None:
    local = tensor.to_local()
    rows = [replica_rows(tensor.shape[0], replica, axis.size) for replica in range(axis.size)]
    sent = torch.zeros((rows[0][1], *tensor.shape[1:]), dtype=tensor.dtype, device=device)  # all equally large
    sent[: local.shape[0]].copy_(local)
    parts = [torch.empty_like(sent) for _ in rows] if axis.rank == 0 else []
    if axis.size == 1 or sent.numel() == 0:
        parts = [sent for _ in parts]
    else:
        dist.gather(_raw(sent), [_raw(part) for part in parts] or None, dst=axis.ranks[0], group=axis.group)
    if axis.rank != 0:
        return None
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta" if tensor.is_meta else "cpu")
    for part, (start, stop) in zip(parts, rows, strict=True):
        full[start:stop].copy_(part[: stop - start])
    return full


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """View its memory as bytes: not every backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)


# -- weights that several ranks hold ----------------------------------------------------------------------------------


@torch.no_grad()
def digest_parameters(model: nn.Module, plan: Plan) -> dict[str, tuple[str, int]]:
    """Digest the parameters of this rank: canonical name -> dtype and number. No communication."""
    canonical = plan.names
    found: dict[str, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        if name in canonical and not parameter.is_meta:
            local = local_part(parameter)
            found[canonical[name]] = str(local.dtype), int(sum_of_bits(local))
    return found


def check_replicas(
    digests: Sequence[Mapping[str, tuple[str, int]]], plan: Plan, places: Sequence[tuple[int, int, int]], fsdp: bool
) -> None:
    """Check that ranks which hold the same weights have the same digests. Dtypes that differ are another error's.

    Args:
        digests: what :func:`digest_parameters` gave on each rank of the world, in order.
        places: of each of these ranks (:meth:`MPU.places`).
        fsdp: the replicas hold different rows.

    Raises:
        CheckpointError: names the tensors, and two ranks that disagree.
    """
    different = unlike(digests, plan, places, fsdp)
    if different:
        name, (one, other) = next(iter(different.items()))
        raise CheckpointError(
            f"{name} differs between rank {one} and rank {other}, which must hold the same: the ranks have drifted "
            f"apart ({len(different)} of {len(plan.tensors)} tensors: {listed(list(different), 3)})\n"
            "  One of them skipped an optimizer step, stepped with gradients or random numbers of its own, or wrote\n"
            "  into its weights. Nothing was written. Go on from the last checkpoint; with\n"
            "  consistency_check: {enable: false} the weights of rank "
            f"{one} would be saved."
        )

"""The state of an optimizer for ``torch.distributed.checkpoint``: under torch's own names, sharded as DTensors.

The names are those of ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict=True``, and so no rank needs the
parameters of another one's stage: ``state.{parameter}.{key}`` and ``param_groups.{parameter}.{option}``.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.checkpoint.dtensor import as_dtensor, to_dtensor_state_dict
from autopar.checkpoint.optimizer_metadata import COUNTERS
from autopar.checkpoint.optimizer_state import named_groups, new_option, take
from autopar.checkpoint.optimizer_weights import keeps_state, step_of
from autopar.checkpoint.state import State, state_of
from autopar.errors import CheckpointError, listed

_INSTEAD = "  Use model.save_parallelized(dir, optimizer=optimizer) and model.from_parallelized."
_START = {"step": 0.0, "mu_product": 1.0, "mu": 1.0}  # of counters, before the first step; eta starts at lr
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OptimizerDTensors(dict[str, Any]):
    """Flat names -> this rank's state. ``torch.distributed.checkpoint.load`` gives the options back by itself."""

    def __init__(self, entries: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(entries)
        self._of = model, optimizer

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain dict, without the model."""
        return dict, (), None, None, iter(self.items())

    def state_dict(self) -> dict[str, Any]:
        """Return the entries; torch asks for them."""
        return dict(self)

    def load_state_dict(self, entries: Mapping[str, Any]) -> None:
        """Take over what torch has read; torch calls it."""
        self.update(entries)
        _finish(*self._of, entries)


def to_dtensor_training_state(
    model: nn.Module, optimizer: Optimizer, aliases: bool = False
) -> dict[str, dict[str, Any]]:
    """Return ``{"model": ..., "optim": ...}`` for ``torch.distributed.checkpoint.save``, ``async_save`` and ``load``.

    Tensors share memory with the model and the optimizer, so that loading fills them in place, on any mesh::

        torch.distributed.checkpoint.load(to_dtensor_training_state(model, optimizer), checkpoint_id="folder")

    An optimizer gets the state that it does not have yet, as from a step with gradients of zero, with steps at 0. With
    ZeRO-1 a rank has the entries of the parameters that it owns. torch stores options (``lr``) as pickles: load from
    folders that you trust.

    Args:
        model: the parallelized model.
        optimizer: of its parameters, made after ``initialize`` or given to it.
        aliases: see :func:`~autopar.checkpoint.dtensor.to_dtensor_state_dict`.

    Raises:
        CheckpointError: half precision with fp32 weights beside it, statistics of a rank's shard (Adafactor), weights
            that are sharded over the replicas, or an optimizer of other parameters. Nothing is changed then.
    """
    state = state_of(model)
    weights = to_dtensor_state_dict(model, aliases=aliases)
    if not isinstance(optimizer, Optimizer):
        raise CheckpointError(f"optimizer={optimizer!r} must be a torch.optim.Optimizer")
    step = step_of(optimizer)
    if step is not None and (step.masters is not None or step.scale is not None):
        raise CheckpointError(
            "to_dtensor_state_dict: with precision.dtype bf16 or fp16 training goes on from fp32 weights and a loss "
            f"scale, for which torch's names have no place.\n{_INSTEAD}"
        )
    if step is not None and step.host is not None:
        raise CheckpointError(
            "to_dtensor_state_dict: with zero.optimizer_offload the state lies in the CPU's memory, of which torch "
            f"makes copies.\n{_INSTEAD}"
        )
    groups = named_groups(optimizer, model, state.plan)
    _add_state(optimizer, groups, state)
    entries = _state_entries(optimizer, model, state)
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        for name, _ in named:
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    entries[f"param_groups.{name}.{key}"] = value
    return {"model": dict(weights), "optim": OptimizerDTensors(entries, model, optimizer)}


def load_dtensor_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give the optimizer the options that were loaded into a dict of :func:`to_dtensor_training_state`.

    ``torch.distributed.checkpoint.load(state)`` does it by itself. It is for dicts that lie inside of others.

    Raises:
        CheckpointError: parameters of one group were saved with different options.
    """
    _finish(model, optimizer, state["optim"])


def _state_entries(optimizer: Optimizer, model: nn.Module, state: State) -> dict[str, Any]:
    """Return ``state.{parameter}.{key}`` -> this rank's state. Raises CheckpointError for statistics of shards."""
    taken = take(optimizer, model, state.plan, state.mpu.shards.rank)
    if taken.metadata["other"]:
        raise CheckpointError(f"{type(optimizer).__name__} keeps state that belongs to no parameter.\n{_INSTEAD}")
    mesh, rank = state.mpu.shards_mesh, state.mpu.shards.rank
    entries: dict[str, Any] = {}
    for name, tensor in taken.tensors.items():
        parameter, _, key = name.partition("::")
        due = taken.plans[name]
        if key.endswith(f"@tp{rank}"):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps statistics of this rank's shard of {parameter} "
                f"({key.partition('@')[0]}), which no other sharding has.\n{_INSTEAD}"
            )
        is_number = tensor.ndim == 0  # may lie on the host
        entries[f"state.{parameter}.{key}"] = (
            tensor if is_number else as_dtensor(tensor, due.shape, due.layout, mesh, rank)
        )
    for group in named_groups(optimizer, model, state.plan):
        for parameter, weight in group:
            for key, value in optimizer.state.get(weight, {}).items():
                if not isinstance(value, torch.Tensor):
                    entries[f"state.{parameter}.{key}"] = value
    return entries


def _add_state(optimizer: Optimizer, groups: list[list[tuple[str, nn.Parameter]]], state: State) -> None:
    """Give the optimizer the state that it does not have yet. Nothing is communicated, no hook runs."""
    made: dict[torch.Tensor, dict[str, Any]] = {}
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        for name, parameter in named:
            if isinstance(parameter, DTensor):
                raise CheckpointError(f"{name} is sharded over the replicas (fully_shard).\n{_INSTEAD}")
            if parameter.requires_grad and not optimizer.state.get(parameter) and keeps_state(optimizer, parameter):
                first = _first_state(optimizer, group, parameter)
                if first:
                    made[parameter] = first
    optimizer.state.update(made)


def _first_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return the state that an optimizer of the same class makes for a parameter of zeros with gradients of zero."""
    step = step_of(optimizer)
    shape = parameter.shape if step is None else step.whole.shape(parameter)
    zeros = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    zeros.grad = torch.zeros_like(zeros)
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for hooks in _HOOKS:
        setattr(twin, hooks, OrderedDict())
    twin.param_groups, twin.state = [{**group, "params": [zeros]}], defaultdict(dict)
    type(optimizer).step(twin)
    made: dict[str, Any] = twin.state.get(zeros, {})
    for key, value in made.items():
        if key in COUNTERS and isinstance(value, torch.Tensor) and value.ndim == 0:
            value.fill_(_START.get(key, group["lr"]))
    return made


@torch.no_grad()
def _finish(model: nn.Module, optimizer: Optimizer, entries: Mapping[str, Any]) -> None:
    """Set options and plain values of state; tensors have been filled in place. All checks come first."""
    plan = state_of(model).plan
    options: list[dict[str, Any]] = []
    values: list[tuple[nn.Parameter, str, Any]] = []
    for group, named in zip(optimizer.param_groups, named_groups(optimizer, model, plan), strict=True):
        found: dict[str, Any] = {}
        for name, parameter in named:
            for key in group:
                entry = f"param_groups.{name}.{key}"
                if entry in entries and not _same(found.setdefault(key, entries[entry]), entries[entry]):
                    raise CheckpointError(
                        f"{listed([other for other, _ in named])} are one group of this optimizer, and were saved with "
                        f"different options: {key} is {found[key]!r} and {entries[entry]!r}\n"
                        "  Make the groups of the run that saved."
                    )
            for key, now in optimizer.state.get(parameter, {}).items():
                entry = f"state.{name}.{key}"
                if not isinstance(now, torch.Tensor) and entry in entries:
                    values.append((parameter, key, entries[entry]))
        options.append(found)
    for group, found in zip(optimizer.param_groups, options, strict=True):
        for key, value in found.items():
            group[key] = new_option(group.get(key), value)
    for parameter, key, value in values:
        optimizer.state[parameter][key] = value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)

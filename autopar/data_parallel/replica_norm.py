"""The norm of a parallelized model's gradients, and which tensors are its parameters or their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.c10d import is_flat_parameter
from autopar.compat.patches import hold, release
from autopar.compat.tensors import local_part
from autopar.data_parallel.gradients import counted_here, tensor_norm
from autopar.data_parallel.precision import agree_on_found
from autopar.distributed.digest import extremes, of_text
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
from autopar.guards.model_changes import refuse_flat
from autopar.guards.step import forget, listen
from autopar.plan.plan import Plan

LAYER = "autopar_layer"  # of a parameter: the class of the layer that was constructed by hand


class ReplicaNorm:
    """The norm over all ranks of one model replica; alive as long as the model is parallelized.

    Args:
        scaled: gradients are those of a scaled loss until the optimizer steps.
    """

    def __init__(self, model: nn.Module, plan: Plan, mpu: MPU, failures: FailureLog, *, scaled: bool) -> None:
        self.plan, self.mpu, self.failures, self.scaled = plan, mpu, failures, scaled
        self._model = weakref.ref(model)
        self._counted: frozenset[str] | None = None
        if mpu.model.size > 1 or mpu.shards.size > 1:
            hold(self)  # torch's clippers, accelerate and DeepSpeed ask for it
            listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaNorm:
        model = memo.get(id(self.model))  # the copy, whose parameters are others
        if not isinstance(model, nn.Module):
            return self
        return ReplicaNorm(model, self.plan, self.mpu, self.failures, scaled=self.scaled)

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    @property
    def is_alive(self) -> bool:
        """Whether there are both the model and its process groups."""
        return self.model is not None and self.mpu.alive

    def remove(self) -> None:
        """Leave the model's parameters to torch from now on."""
        forget(self)
        release(self)

    def of(self, tensors: Mapping[str, torch.Tensor], norm_type: float, *, single: bool = False) -> torch.Tensor:
        """Return the norm of gradients (or weights), by the names of their parameters; a collective of the replica.

        Args:
            single: they are one parameter, of which other stages have nothing to say; a collective of the stage.

        Raises:
            ConfigError: they are scaled, flattened by ``FullyShardedDataParallel``, or of a parameter that was added
                after ``initialize``.
        """
        if self.scaled:
            raise ConfigError(
                "clip_grad_norm_ would clip scaled gradients: with precision.dtype fp16 the optimizer takes the loss "
                "scale off inside of step(). Write gradient_clipping into the config; optimizer.gradient_norm is the "
                "norm."
            )
        if not norm_type > 0:
            raise ConfigError(f"norm_type must be above 0, not {norm_type}")
        if any(is_flat_parameter(parameter) for _, parameter in self._named()):
            refuse_flat()
        with self.failures.wait("the norm of the gradients", self.mpu.shards_pp.ranks):
            held = dict(self._named())
            if single:
                counted = frozenset(map(self.plan.canonical, tensors))
                return tensor_norm(tensors, self.plan, self.mpu, counted, norm_type, held.values(), of_stage=True)
            if self._counted is None:
                self._counted = counted_here(held, self.plan, self.mpu)
            return tensor_norm(tensors, self.plan, self.mpu, self._counted, norm_type, held.values())

    def check_factor(self, factor: torch.Tensor) -> None:
        """Check that all ranks of the replica are about to scale alike; a collective of it.

        Raises:
            ConsistencyError: on all of them, if not.
        """
        value = factor.item()
        axis = self.mpu.shards_pp if self.plan.experts else self.mpu.model
        with self.failures.wait("torch.nn.utils.clip_grads_with_norm_", axis.ranks):
            largest, smallest = extremes([of_text(repr(value))], axis.group)
        if largest != smallest:
            raise ConsistencyError(
                f"clip_grads_with_norm_ was given another norm on each of the ranks {list(axis.ranks)}: this "
                f"one would scale by {value:g}.\n  They hold one model, and would drift apart. "
                "torch.nn.utils.get_total_norm of all gradients is the same on every rank;\n"
                "  autopar.clip_grad_norm_(model, max_norm) does both."
            )

    def agree(self, found: dict[torch.device, torch.Tensor], parameters: Iterable[torch.Tensor]) -> None:
        """Make an overflow that one rank of the replica found that of all; a collective of it."""
        sharded = any(isinstance(parameter, DTensor) for parameter in parameters)  # FSDP2 over dp x cp
        beside = [self.mpu.dp_cp] if sharded else [self.mpu.shards] if self.plan.experts else []
        with self.failures.wait("torch.amp.GradScaler", self.mpu.model.ranks):
            for axis in (self.mpu.model, *beside):
                agree_on_found(found, axis, self.mpu.device)

    def mine(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those that are parameters of the model or gradients of them, by name."""
        owners: dict[Any, str] = {}  # by identity, or by place
        for name, parameter in self._named():
            owners[id(parameter)] = name
            if parameter.grad is not None:
                owners[_place(parameter.grad)] = name
        found = ((owners.get(id(tensor)) or owners.get(_place(tensor)), tensor) for tensor in tensors)
        return {name: tensor for name, tensor in found if name is not None}

    def made(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those that are made of shards of the model, such as copies, by the names of their parameters."""
        named = ((getattr(parameter, "autopar_shard", self), name) for name, parameter in self._named())
        owners = {id(shard): name for shard, name in named}
        found = ((owners.get(id(getattr(tensor, "autopar_shard", None))), tensor) for tensor in tensors)
        return {name: tensor for name, tensor in found if name is not None}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        model = self.model
        return iter(()) if model is None else model.named_parameters()


def mark_layer(parameter: torch.Tensor, layer: nn.Module) -> None:
    """Note that ``parameter`` is the shard of a layer that was constructed by hand: torch's clippers refuse it."""
    hold(layer)
    setattr(parameter, LAYER, type(layer).__name__)


def _place(tensor: torch.Tensor) -> Any:
    """Return where a tensor lies: ``gradient.detach()`` is another object over the same memory."""
    local = local_part(tensor)
    return id(tensor) if local.is_sparse or local.numel() == 0 else (local.data_ptr(), local.shape, local.stride())

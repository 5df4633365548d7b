"""Making a model hold only its stages' tensors, and giving the rest back.

A parameter that another stage holds leaves the module. In its place stays a plain tensor without memory (all its
strides are 0), so that the model's own code in front of the blocks still runs and gives the right shapes; what it
computes there is replaced by what the stage receives (``stage`` proves it). It is not a number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar.distributed.mesh import MPU
from autopar.pipeline_parallel.stage_forward import Conductor, element_class, plain_element_class
from autopar.plan.stages import StagePlan

__all__ = ["Dropped", "cut", "drop", "mend", "restore"]


class Dropped:
    """What left a model: enough to put it back."""

    def __init__(self) -> None:
        self.parameters: dict[int, nn.Parameter] = {}
        self.placeholders: dict[str, torch.Tensor] = {}  # by name
        self.orders: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
        self.buffers: list[tuple[nn.Module, str, str, torch.Tensor]] = []
        self.emptied: list[nn.Module] = []


class _Emptied:
    """A Hugging Face model inside that has no parameter left here. Code that reads its dtype reads the first one's."""

    stand_in: torch.Tensor

    def parameters(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """A tensor of the dtype and device that its parameters had; nothing to train."""
        yield self.stand_in


@functools.cache
def _emptied_class(plain: Any) -> Any:
    # transformers finds what a model can record by the class as text.
    return type(plain.__name__, (_Emptied, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})


def cut(model: nn.Module, plan: StagePlan, conductor: Conductor) -> None:
    """Turn the elements into places where a forward may start and stop."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for place, path in enumerate(plan.elements):
        module = modules[path]
        kind: Any = type(module)
        module.__class__ = element_class(kind)
        module.conductor, module.place = conductor, place


def mend(model: nn.Module, plan: StagePlan) -> None:
    """Inverse of :func:`cut`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in plan.elements:
        module = modules[path]
        module.__class__ = plain_element_class(module)
        del module.conductor, module.place


@torch.no_grad()
def drop(model: nn.Module, plan: StagePlan, rank: int, device: torch.device) -> Dropped:
    """Free every parameter, and every buffer of a block, that place ``rank`` of the axis does not hold.

    Parameter objects live on, empty and without gradient, so an optimizer that knows them skips them.
    """
    dropped = Dropped()
    foreign = {name for name in plan.tensors if rank not in plan.holders(name)}
    blocks = [f"{path}." for place, path in enumerate(plan.elements) if place != plan.encoder]
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    dtypes = [next((p.dtype for p in module.parameters() if p.is_floating_point()), None) for module in models]
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        gone = [name for name in module._parameters if start + name in foreign]
        if gone:
            dropped.orders.append((module, dict(module._parameters)))
        for name in gone:
            parameter = module._parameters.pop(name)
            if parameter is None:
                continue
            shape, dtype = parameter.shape, parameter.dtype
            if id(parameter) not in dropped.parameters:
                dropped.parameters[id(parameter)] = parameter
            module.__dict__[name] = dropped.placeholders[start + name] = _placeholder(dtype, device).expand(shape)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and start + name in foreign and any(map(start.startswith, blocks)):
                dropped.buffers.append((module, name, start + name, buffer))
                module._buffers[name] = None
    for parameter in dropped.parameters.values():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = None
    for module, dtype in zip(models, dtypes, strict=True):
        if dtype is not None and not any(parameter.is_floating_point() for parameter in module.parameters()):
            kind: Any = type(module)
            module.__class__ = _emptied_class(kind)
            module.stand_in = _placeholder(dtype, device)
            dropped.emptied.append(module)
    return dropped


def _placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)


@torch.no_grad()
def restore(model: nn.Module, plan: StagePlan, dropped: Dropped, mpu: MPU) -> None:
    """Inverse of :func:`drop`: every stage gets all tensors back, gradients too. Every rank of the axis calls it."""
    for module in dropped.emptied:
        module.__class__ = type(module).__mro__[2]
        del module.stand_in
    missing: dict[str, nn.Parameter] = {}
    shapes: dict[str, torch.Size] = {}
    paths = {id(module): path for path, module in model.named_modules()}
    for module, order in dropped.orders:
        for name, parameter in order.items():
            full = f"{paths[id(module)]}.{name}".lstrip(".")
            if parameter is not None and id(parameter) in dropped.parameters:
                missing[full], shapes[full] = parameter, module.__dict__.pop(name).shape
        module._parameters.clear()
        module._parameters.update(order)
    own: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    lost = {name: (module, key, buffer) for module, key, name, buffer in dropped.buffers}
    buffers: dict[str, Any] = dict(model.named_buffers(remove_duplicate=False))
    here = {name: own.get(name, buffers.get(name)) for name in plan.tensors if name not in missing}
    dtypes = {name: (value.dtype, _dtype_of_gradient(value)) for name, value in here.items() if value is not None}
    everyone = [dtypes] * mpu.pp.size
    dist.all_gather_object(everyone, dtypes, group=mpu.pp.group)
    done: set[int] = set()
    for name in plan.tensors:
        holders = plan.holders(name)
        if name not in own or len(holders) == mpu.pp.size:
            continue
        parameter = own[name]
        if id(parameter) in done:
            continue
        done.add(id(parameter))
        source = mpu.pp.ranks[holders[0]]
        dtype, of_gradient = everyone[holders[0]][name]  # precision may have changed them where they are held
        if name in missing:
            parameter.data = torch.empty(shapes[name], dtype=dtype, device=mpu.device)
        _broadcast(parameter.data, source, mpu)
        if of_gradient is not None:
            if parameter.grad is None:
                if of_gradient != dtype:
                    parameter.grad_dtype = None
                parameter.grad = torch.zeros_like(parameter, dtype=of_gradient)
            _broadcast(parameter.grad, source, mpu)
    for name in plan.tensors:  # also those that ran on nothing here
        holders = plan.holders(name)
        if (name in lost or name in buffers) and len(holders) < mpu.pp.size:
            if name in lost:
                module, key, buffer = lost[name]
                module._buffers[key] = buffers[name] = buffer.to(everyone[holders[0]][name][0])
            _broadcast(buffers[name], mpu.pp.ranks[holders[0]], mpu)


def _dtype_of_gradient(value: torch.Tensor) -> torch.dtype | None:
    """None if there is no gradient."""
    return None if value.grad is None else value.grad.dtype


def _broadcast(tensor: torch.Tensor, source: int, mpu: MPU) -> None:
    staged = tensor.to(mpu.device, copy=True, memory_format=torch.contiguous_format)
    dist.broadcast(staged.view(-1).view(torch.uint8), src=source, group=mpu.pp.group)
    tensor.copy_(staged)

"""Applying a plan to a model in place, and taking it back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.distributed.digest import checksum
from autopar.distributed.mesh import MPU
from autopar.layout import Layout
from autopar.plan.plan import AttributePlan, ModulePlan, Plan
from autopar.tensor_parallel.config_view import own_config, set_own
from autopar.tensor_parallel.layers import parallel_class, plain_class
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.vocabulary_rows import TOLD

__all__ = ["apply", "cut_parameters", "full_tensor", "make_equal", "undo"]

_SIZES = {"column": ("out_features", "nf", "out_channels"), "row": ("in_features", "nx", "in_channels")}


def apply(model: nn.Module, plan: Plan, axis: Axis, region: Region) -> None:
    """Turn ``model`` into the share of ``axis.rank``, in place; no communication. At tp 1 nothing changes.

    Parameter objects keep their identity: ``param.data`` (and ``param.grad``) become the shard, ``id(param)`` stays,
    so an optimizer made before goes on working.
    """
    if plan.tp == 1:
        return
    modules = dict(model.named_modules())
    done: set[int] = set()
    for path, module_plan in plan.modules.items():
        module = modules[path]
        _swap(module, module_plan, axis, region)
        for name, layout in vars(module)["autopar_layouts"].items():
            parameter = module._parameters.get(name)
            if parameter is not None and id(parameter) not in done:  # tied weights are cut once
                done.add(id(parameter))
                _cut(parameter, layout, axis.rank)
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = layout.shard(buffer, axis.rank)
        _resize(module, module_plan, axis.rank)
    for path, module_plan in plan.modules.items():
        if module_plan.rule == "region":
            _keep_runnable(modules[path])
    for attribute in plan.attributes:
        _set(modules[attribute.path], attribute, attribute.values[axis.rank])


def _swap(module: nn.Module, plan: ModulePlan, axis: Axis, region: Region) -> None:
    if plan.rule != "cut" or any(layout.replicated for layout in plan.layouts.values()) or plan.summed or plan.inputs:
        module.__class__ = parallel_class(type(module), plan)
    module.tp, module.region, module.autopar = axis, region, plan  # type: ignore[assignment]
    module.autopar_layouts = dict(plan.layouts)  # type: ignore[assignment]


def _cut(parameter: nn.Parameter, layout: Layout, rank: int) -> None:
    gradient = parameter.grad
    parameter.grad = None
    parameter.data = layout.shard(parameter.data, rank)
    if gradient is not None:
        parameter.grad = layout.shard(gradient, rank)


def _resize(module: nn.Module, plan: ModulePlan, rank: int | None) -> None:
    """Make the sizes that a module tells about itself those of its weight (``rank`` None: the whole one)."""
    if plan.rule == "cut":
        _resize_cut(module, plan, rank)
    names: tuple[str, ...] = _SIZES.get(plan.rule, ())
    if plan.rule == "embedding":
        names = ("embedding_dim",) if plan.by_hidden else ("num_embeddings",)
    for name in names:
        if name in vars(module) and plan.layout is not None:
            setattr(module, name, plan.layout.size if rank is None else plan.layout.local_size(rank))


def _resize_cut(module: nn.Module, plan: ModulePlan, rank: int | None) -> None:
    weight = plan.layouts.get("weight")
    if weight is None:
        return
    size = weight.size if rank is None else weight.local_size(rank)
    if isinstance(module, nn.modules.conv._ConvNd | nn.GroupNorm):  # depthwise filters; groups of channels
        names = ("in_channels", "out_channels", "groups", "num_channels", "num_groups")
        whole = vars(module).setdefault("_autopar_sizes", {n: vars(module)[n] for n in names if n in vars(module)})
        of = whole["out_channels"] if "out_channels" in whole else whole["num_channels"]
        plain = "out_channels" if (weight.dim == 0) is not getattr(module, "transposed", False) else "in_channels"
        for name, value in whole.items():
            if whole.get("groups") != 1:
                setattr(module, name, value * size // of)
            elif name == plain:  # a plain convolution: all filters read all channels
                setattr(module, name, size)
        if rank is None:
            del module._autopar_sizes
    elif isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.num_features = size
    elif isinstance(module, nn.Embedding):
        setattr(module, "embedding_dim" if weight.dim else "num_embeddings", size)
    elif isinstance(module, nn.Linear):
        setattr(module, "in_features" if weight.dim else "out_features", size)


def _set(module: nn.Module, plan: AttributePlan, value: int) -> None:
    if plan.name.startswith("config."):
        set_own(_own_config(module), plan.name.removeprefix("config."), value)
    else:
        setattr(module, plan.name, value)


def _keep_runnable(experts: nn.Module) -> None:
    """The grouped matmul of experts wants rows of whole 16 bytes; a share whose rows are not goes expert by expert."""
    if getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm" and any(
        size * parameter.element_size() % 16 for parameter in experts.parameters() for size in parameter.shape[-2:]
    ):
        set_own(_own_config(experts), "_experts_implementation", "eager")


def _own_config(module: nn.Module) -> Any:
    """The module's own view of its config; the one it had is kept for :func:`undo`."""
    if "_autopar_config" not in vars(module):
        module._autopar_config = module.config
        module.config = own_config(module.config)
    return module.config


def undo(model: nn.Module, plan: Plan, axis: Axis) -> None:
    """Inverse of :func:`apply`: the plain model with full weights on every rank. Every tp rank calls it."""
    if plan.tp == 1:
        return
    modules = dict(model.named_modules())
    done: set[int] = set()
    for path, module_plan in plan.modules.items():
        module = modules[path]
        for parameter, layout in cut_parameters(module):
            if id(parameter) not in done:
                done.add(id(parameter))
                gradient = parameter.grad
                parameter.grad = None
                parameter.data = full_tensor(parameter.data, layout, axis)
                if _any_has(gradient, axis, parameter.device):
                    part = gradient
                    if part is None:
                        shape = layout.local_shape(parameter.shape, axis.rank)
                        part = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
                    parameter.grad = full_tensor(part, layout, axis)
        for name, layout in vars(module)["autopar_layouts"].items():
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = full_tensor(buffer, layout, axis)
        _resize(module, module_plan, None)
        module.__class__ = plain_class(module)
        for name in ("tp", "region", "autopar", "autopar_layouts", "keeps_local", TOLD):
            module.__dict__.pop(name, None)
    for attribute in plan.attributes:
        module = modules[attribute.path]
        if not attribute.name.startswith("config."):
            setattr(module, attribute.name, attribute.whole)
    for module in modules.values():
        if "_autopar_config" in vars(module):
            module.config = module.__dict__.pop("_autopar_config")


def _any_has(gradient: torch.Tensor | None, axis: Axis, device: torch.device) -> bool:
    flag = torch.tensor([gradient is not None], dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=axis.group)
    return bool(flag.item())


def full_tensor(shard: torch.Tensor, layout: Layout, axis: Axis) -> torch.Tensor:
    """The stored tensor from every rank's shard; a collective of the axis."""
    return all_gather(shard, axis, layout, layout.dim)


def cut_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, Layout]]:
    """Each parameter that is cut, with its layout; tied ones once per module that uses them."""
    for module in model.modules():
        for name, layout in getattr(module, "autopar_layouts", {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None:
                yield parameter, layout


def make_equal(model: nn.Module, mpu: MPU) -> list[str]:
    """Give every rank the whole weights of the first one, tensor by tensor where they differ; returns those names.

    A model initialized at random without a seed differs on every rank. Called while the model is still whole; ranks
    whose weights agree already exchange one checksum per tensor and nothing else.
    """
    tensors = {
        name: tensor.data
        for name, tensor in [
            *model.named_parameters(),
            *((name, buffer) for name, buffer in model.named_buffers() if buffer is not None),
        ]
        if not tensor.is_meta
    }
    if mpu.world_size == 1 or not tensors:
        return []
    sums = torch.stack([checksum(tensor) for tensor in tensors.values()])  # [tensors, 2]
    first = sums.clone().to(mpu.device)
    dist.broadcast(first, src=0)
    differs = (first.cpu() != sums).any(dim=1).to(torch.int32).to(mpu.device)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    different = [name for name, flag in zip(tensors, differs.tolist(), strict=True) if flag]
    for name in different:
        tensor = tensors[name][tuple(slice(0, 1) if step == 0 else slice(None) for step in tensors[name].stride())]
        staged = tensor.to(mpu.device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(staged.view(-1).view(torch.uint8), src=0)  # as bytes: gloo does not know every dtype
        tensor.copy_(staged)  # an expanded buffer has one element where its stride is 0
    return different

"""Apply a plan to a model in place, and undo it.

``print(model)`` shows the local and the full sizes of sharded layers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from autopar import registry
from autopar.compat.tensors import BatchNorm, Convolution, own_buffers, own_parameters
from autopar.compat.transformers import EXPERTS
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.distributed.digest import extremes
from autopar.distributed.rng import kept
from autopar.errors import PolicyError
from autopar.layout import Layout
from autopar.plan.matching import drop_plain_forward
from autopar.plan.plan import ModulePlan, Plan
from autopar.stored import StoredWeight, stored_weight
from autopar.swap import bind, mixed_class, set_value, unbind, view_of_config
from autopar.tensor_parallel.layers import (
    ColumnParallelConv,
    ColumnParallelConv1D,
    ColumnParallelLinear,
    HiddenParallelEmbedding,
    ParallelLayer,
    RowParallelConv,
    RowParallelConv1D,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from autopar.tensor_parallel.region_modules import RegionModule, ShardedNorm, region_class
from autopar.tensor_parallel.regions import Region

_OWNER = "printed sizes"


def _extra_repr(self: Any) -> str:
    axis: Axis = self.tp
    layouts: dict[str, Layout] = self.autopar_layouts
    tensors, sizes = {**own_buffers(self), **own_parameters(self)}, []
    for name, layout in layouts.items():
        if tensors.get(name) is not None:
            stored = stored_weight(self) if name == "weight" else None
            here = list(tensors[name].shape if stored is None else stored.shape)
            sizes.append(f"{name} {here} of {[*here[: layout.dim], layout.size, *here[layout.dim + 1 :]]}")
    place = f"{axis.name} {axis.rank}/{axis.size}: {', '.join(sizes)}" if sizes else ""
    return "; ".join(part for part in (type(self).extra_repr(self), place) if part)


_SIZES = {"column": ("out_features", "nf", "out_channels"), "row": ("in_features", "nx", "in_channels")}


def apply(model: nn.Module, plan: Plan, axis: Axis, region: Region, shards: Axis | None = None) -> None:
    """Shard ``model`` for ``axis.rank`` in place, without communication.

    ``param.data`` and ``param.grad`` become the shard. ``id(param)`` stays, so an existing optimizer continues to work.

    Args:
        shards: The axis over which experts are sharded, if larger than ``axis``; None in a dry run.
    """
    if plan.shards == 1:
        return
    if shards is None:
        shards = axis if plan.shards == axis.size else Axis("ep", None, range(plan.shards), axis.rank)
    modules = dict(model.named_modules())
    done: set[int] = set()
    for path, module_plan in plan.modules.items():
        module = modules[path]
        drop_plain_forward(module)
        swap(module, module_plan, axis, region)
        layouts = [*module_plan.layouts.values(), *([module_plan.layout] if module_plan.layout is not None else [])]
        if any(layout.axis_size > axis.size for layout in layouts):
            module.tp = shards
        rank = module.tp.rank
        for name, layout in vars(module)["autopar_layouts"].items():
            parameter = own_parameters(module).get(name)
            stored = stored_weight(module) if name == "weight" else None
            if stored is not None and (not stored.pending or stored.dtype is not None):
                stored.shard(layout, rank)
            elif parameter is not None and id(parameter) not in done:  # tied weights are sharded once
                done.add(id(parameter))
                gradient, parameter.grad = parameter.grad, None
                parameter.data = layout.shard(parameter.data, rank)
                parameter.grad = None if gradient is None else layout.shard(gradient, rank)
            buffer = own_buffers(module).get(name)
            if buffer is not None:
                own_buffers(module)[name] = layout.shard(buffer, rank)
        resize(module, module_plan, rank)
        bind(module, _OWNER, extra_repr=_extra_repr)
    for experts in (modules[path] for path, module_plan in plan.modules.items() if module_plan.rule == "region"):
        # The grouped matmul needs rows of a multiple of 16 bytes; other shards compute expert by expert.
        sizes = (size * p.element_size() for p in experts.parameters() for size in p.shape[-2:])
        if getattr(getattr(experts, "config", None), EXPERTS, None) == "grouped_mm" and any(n % 16 for n in sizes):
            set_value(view_of_config(experts), EXPERTS, "eager")
    for attribute in plan.attributes:
        holder, of_experts = modules[attribute.path], len(attribute.values) > axis.size
        value = attribute.values[(shards if of_experts else axis).rank]
        if attribute.name.startswith("config."):
            set_value(view_of_config(holder), attribute.name.removeprefix("config."), value)
        else:
            setattr(holder, attribute.name, value)


def swap(module: nn.Module, plan: ModulePlan, axis: Axis, region: Region) -> None:
    """Swap the class of a layer for the parallel class of its plan; its parameters stay unchanged."""
    special = plan.summed or plan.inputs or any(layout.replicated for layout in plan.layouts.values())
    if special or plan.rule not in ("sharded", "one_expert"):
        module.__class__ = parallel_class(type(module), plan, stored_weight(module))
    vars(module).update(tp=axis, region=region, autopar=plan, autopar_layouts=dict(plan.layouts))


def swap_back(module: nn.Module) -> None:
    """Undo :func:`swap`."""
    own: tuple[str, ...] = getattr(type(module), "autopar_state", ())
    module.__class__ = plain_class(module)
    for name in ("tp", "region", "autopar", "autopar_layouts", "chunk", *own):
        module.__dict__.pop(name, None)


def resize(module: nn.Module, plan: ModulePlan, rank: int | None) -> None:
    """Set size attributes of a module to the sizes of its local weight, or of its full weight if ``rank`` is None.

    Layers with a full output (the head, the embedding) keep the full sizes, which losses read.
    """
    if plan.rule in ("sharded", "one_expert"):
        _resize_plain(module, plan, rank)
    for name in _SIZES.get(plan.rule, ()):
        if name in vars(module) and plan.layout is not None and not plan.gather_output:
            setattr(module, name, plan.layout.size if rank is None else plan.layout.local_size(rank))


def _resize_plain(module: nn.Module, plan: ModulePlan, rank: int | None) -> None:
    weight = plan.layouts.get("weight")
    if weight is None:
        return
    size = weight.size if rank is None else weight.local_size(rank)
    if isinstance(module, Convolution | nn.GroupNorm):  # depthwise filters; groups of channels
        names = ("in_channels", "out_channels", "groups", "num_channels", "num_groups")
        full = vars(module).setdefault("_autopar_sizes", {n: vars(module)[n] for n in names if n in vars(module)})
        of = full["out_channels"] if "out_channels" in full else full["num_channels"]
        plain = "out_channels" if (weight.dim == 0) is not getattr(module, "transposed", False) else "in_channels"
        for name, value in full.items():
            if full.get("groups") != 1:
                setattr(module, name, value * size // of)
            elif name == plain:  # groups=1: all filters read all channels
                setattr(module, name, size)
        if rank is None:
            del module._autopar_sizes
    elif isinstance(module, BatchNorm):
        module.num_features = size
    elif isinstance(module, nn.Embedding):
        setattr(module, "embedding_dim" if weight.dim else "num_embeddings", size)
    elif isinstance(module, nn.Linear):
        setattr(module, "in_features" if weight.dim else "out_features", size)


def undo(model: nn.Module, plan: Plan) -> None:
    """Restore the plain model with full weights on every rank: the inverse of :func:`apply`. A collective of tp."""
    if plan.shards == 1:
        return
    unbind(model, _OWNER)
    modules = dict(model.named_modules())
    done: set[int] = set()
    for path, module_plan in plan.modules.items():
        module = modules[path]
        axis: Axis = module.tp
        for name, layout in vars(module)["autopar_layouts"].items():
            parameter, buffer = own_parameters(module).get(name), own_buffers(module).get(name)
            stored = stored_weight(module) if name == "weight" else None
            if stored is not None:
                stored.join(layout, axis)
            elif parameter is not None and id(parameter) not in done:
                done.add(id(parameter))
                gradient, parameter.grad = _gradient_of(parameter, axis), None
                parameter.data = all_gather(parameter.data, axis, layout)
                parameter.grad = None if gradient is None else all_gather(gradient, axis, layout)
            if buffer is not None:
                own_buffers(module)[name] = all_gather(buffer, axis, layout)
        resize(module, module_plan, None)
        swap_back(module)
    for attribute in plan.attributes:
        module = modules[attribute.path]
        if not attribute.name.startswith("config."):
            setattr(module, attribute.name, attribute.whole)
    for module in modules.values():
        if "_autopar_config" in vars(module):
            module.config = module.__dict__.pop("_autopar_config")


def _gradient_of(parameter: nn.Parameter, axis: Axis) -> torch.Tensor | None:
    """Return the gradient, or zeros if only other ranks have one. A collective of the axis."""
    (present,), _ = extremes([parameter.grad is not None], axis.group)
    return torch.zeros_like(parameter.data) if present and parameter.grad is None else parameter.grad


_LAYERS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {  # second: for Conv1D, or an embedding by columns
    "column": (ColumnParallelLinear, ColumnParallelConv1D),
    "row": (RowParallelLinear, RowParallelConv1D),
    "embedding": (VocabParallelEmbedding, HiddenParallelEmbedding),
}


def parallel_class(plain: type[nn.Module], plan: ModulePlan, stored: StoredWeight | None = None) -> type[nn.Module]:
    """Return the parallel class for modules of class ``plain``; subclasses keep their behavior (``embed_scale``).

    Raises:
        PolicyError: The class computes something else than the torch layer of the rule.
    """
    if plan.rule in ("column", "row") and (stored is not None or issubclass(plain, Convolution)):
        parallel: Any = ColumnParallelConv if plan.rule == "column" else RowParallelConv
        if stored is not None:
            parallel = stored.layer_class(plan.rule)
        elif plain.forward not in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
            raise PolicyError(f"{plain.__name__} has a custom forward and cannot become {parallel.__name__}")
        return mixed_class(parallel, plain, f"{parallel.__name__}Of{plain.__name__}")  # type: ignore[arg-type]
    if plan.rule in ("column", "row", "embedding"):
        layer = _LAYERS[plan.rule][plan.by_hidden if plan.rule == "embedding" else issubclass(plain, Conv1D)]
        return _layer_class(plain, layer)  # type: ignore[arg-type]
    replicas = {name for name, layout in plan.layouts.items() if layout.replicated}
    found: Any = ShardedNorm if plan.rule == "norm_over" else None
    found = found or registry.entry("rules", plan.rule, f"the rule '{plan.rule}' ({plan.where})") or RegionModule
    mixin = found if isinstance(found, type) else found(plain)
    return region_class(plain, mixin, tuple(sorted(plan.summed | replicas)))  # type: ignore[arg-type]


@functools.cache
def _layer_class(plain: Any, parallel: Any) -> Any:
    """Put ``parallel`` before ``plain``, or between it and torch's class if ``plain`` calls ``super().forward``."""
    torch_class = parallel.__mro__[parallel.__mro__.index(ParallelLayer) + 1]
    if plain is torch_class:
        return parallel
    if plain.__setattr__ is not nn.Module.__setattr__ or "__call__" in vars(plain):
        raise PolicyError(f"{plain.__name__} defines __setattr__ or __call__ and cannot become {parallel.__name__}")
    forward, name = inspect.getattr_static(plain, "forward"), f"{parallel.__name__}Of{plain.__name__}"
    if "super" in getattr(getattr(forward, "__code__", None), "co_names", ("super",)):
        return mixed_class(plain, parallel, name)
    _check_same(plain, torch_class)
    return mixed_class(parallel, plain, name)


def _check_same(plain: type[nn.Module], torch_class: type[nn.Module]) -> None:
    """Raise PolicyError unless a custom forward (Falcon's ``x @ W.T``) computes the same as torch's class."""
    with contextlib.suppress(Exception), torch.device("cpu"), kept(), torch.no_grad():
        module = plain(3, 5)
        x = torch.arange(3) if issubclass(plain, nn.Embedding) else torch.randn(2, 3)
        if torch.allclose(module(x), torch_class.forward(module, x), rtol=1e-4, atol=1e-5):
            return
    raise PolicyError(
        f"{plain.__name__} has a custom forward or constructor that differs from {torch_class.__name__}'s.\n"
        "  Write {replicated: UNIT} for it."
    )


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the plain class of a parallel module: the inverse of :func:`parallel_class`."""
    for candidate in type(module).__mro__:
        if issubclass(candidate, nn.Module) and not issubclass(candidate, ParallelLayer | RegionModule):
            return candidate
    raise TypeError(f"expected a parallel layer, got {type(module).__name__}")

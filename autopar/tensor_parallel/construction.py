"""Constructing parallel layers for a model of one's own, as in Megatron-LM.

The whole weight is drawn on every rank from the same random state and cut, so that a model has the same whole weights
for any tensor-parallel size, and without ``init_method`` those that ``nn.Linear`` and ``nn.Embedding`` draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.distributed.axis import Axis, Group, axis_of, device_of
from autopar.distributed.collectives import copy
from autopar.errors import ConfigError, ConsistencyError
from autopar.layout import Block, Layout, share_out
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.megatron.parameter_marks import mark_shard
from autopar.tensor_parallel.regions import Region

__all__ = ["InitMethod", "layout_of", "make_layer", "shared_axis", "whole_embedding", "whole_linear"]

InitMethod = Callable[[torch.Tensor], Any]


class _Alone(Region):
    """What a layer has that belongs to no parallelized model: its input is copied for itself, and nothing is kept.

    Random numbers are the model's own affair (:func:`autopar.tensor_parallel.get_cuda_rng_tracker`).
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Alone:
        return _Alone(self.axis)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return copy(x, self.axis) if x.requires_grad and torch.is_grad_enabled() else x


def shared_axis(group: Group | None, layer: str) -> Axis:
    """The axis that ``group`` means, whose ranks are about to draw the same weights; a collective.

    Raises:
        ConfigError: there is no group.
        ConsistencyError: on all ranks, if their random states differ.
    """
    if group is None:
        raise ConfigError(f"{layer} needs group=, a torch ProcessGroup or an MPU: there is no global one")
    axis = axis_of(group)
    if axis.size == 1:
        return axis
    device, states = device_of(axis), torch.get_rng_state().numpy().tobytes()
    if device.type == "cuda":
        states += torch.cuda.get_rng_state().numpy().tobytes()
    number = int.from_bytes(hashlib.blake2b(states, digest_size=6).digest(), "big")
    low_high = torch.tensor([-number, number], device=device)
    dist.all_reduce(low_high, op=dist.ReduceOp.MAX, group=axis.group)
    if -int(low_high[0]) != int(low_high[1]):
        raise ConsistencyError(
            f"{layer}: the random states of the ranks {list(axis.ranks)} differ: they would draw different weights.\n"
            "  Seed all of them alike before the model is built: torch.manual_seed(1234)."
        )
    return axis


def layout_of(layer: str, what: str, size: int, dim: int, axis: Axis, stride: int = 1, unit: int = 1) -> Layout:
    """How ``size`` features lie over the ranks: ``stride`` parts side by side, units of ``unit`` features each.

    Raises:
        ConfigError: they do not divide into such units, or a rank would hold none (rows of an embedding may be few).
    """
    if stride < 1 or unit < 1 or size % (stride * unit):
        raise ConfigError(
            f"{layer}: {what}={size} does not divide into {stride} x units of {unit} features (stride={stride}, "
            f"unit={unit})"
        )
    count = size // (stride * unit)
    if count < axis.size and what != "num_embeddings":
        raise ConfigError(
            f"{layer}: {what}={size} has {count} unit{'s' if count != 1 else ''} of {stride} x {unit} features, which "
            f"cannot be sharded over {axis.size} ranks"
        )
    return Layout.of(dim, [Block("feature", count, unit, share_out(count, axis.size))] * stride)


def whole_linear(
    input_size: int, output_size: int, bias: bool, init_method: InitMethod | None, device: Any, dtype: Any
) -> dict[str, torch.Tensor]:
    """``weight`` [out, in] and ``bias`` [out] of the whole layer."""
    if init_method is None:
        made = nn.Linear(input_size, output_size, bias, device=device, dtype=dtype)
        return {name: parameter.data for name, parameter in made.named_parameters()}
    weight = _filled((output_size, input_size), init_method, device, dtype)
    return {"weight": weight, **({"bias": torch.zeros(output_size, device=device, dtype=dtype)} if bias else {})}


def whole_embedding(
    count: int, width: int, padding_idx: int | None, init_method: InitMethod | None, device: Any, dtype: Any
) -> torch.Tensor:
    """The whole table, [count, width]."""
    if padding_idx is not None and not -count <= padding_idx < count:
        raise ConfigError(f"padding_idx={padding_idx} lies outside of num_embeddings={count}")
    if init_method is None:
        return nn.Embedding(count, width, padding_idx, device=device, dtype=dtype).weight.data
    return _filled((count, width), init_method, device, dtype)


def _filled(shape: tuple[int, int], init_method: InitMethod, device: Any, dtype: Any) -> torch.Tensor:
    weight = torch.empty(shape, device=device, dtype=dtype)
    with torch.no_grad():
        init_method(weight)
    return weight


def make_layer(layer: Any, axis: Axis, plan: ModulePlan, whole: Mapping[str, torch.Tensor], stride: int = 1) -> None:
    """Give a layer its parameters, cut out of the whole ones, and what every parallel layer carries."""
    layer.tp, layer.region, layer.autopar, layer.autopar_layouts = axis, _Alone(axis), plan, dict(plan.layouts)
    if isinstance(layer, nn.Linear):
        layer.register_parameter("bias", None)  # unless there is one
    for name, tensor in whole.items():
        layout = plan.layouts.get(name)
        parameter = nn.Parameter(tensor if layout is None else layout.shard(tensor, axis.rank))
        if layout is not None:
            mark_shard(parameter, layout.dim, stride)
        setattr(layer, name, parameter)

"""The base of the parallel layers, and how they are constructed for a model of one's own, as in Megatron-LM.

A constructor draws the full weight on every rank from the same random state and keeps this rank's shard. So a model has
the same full weights for any tensor-parallel size, and without ``init_method`` those that ``nn.Linear`` and
``nn.Embedding`` draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from autopar.data_parallel.replica_norm import mark_layer
from autopar.distributed.axis import Axis, Group, axis_of, device_of
from autopar.distributed.collectives import copy, sum_replicas
from autopar.distributed.digest import extremes, of_text
from autopar.distributed.rng import TorchGenerators
from autopar.errors import ConfigError, ConsistencyError
from autopar.foreign.modules import own_parameters
from autopar.layout import Block, Layout, even_shards
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.parameter_marks import mark_shard
from autopar.tensor_parallel.regions import Region

InitMethod = Callable[[torch.Tensor], Any]


class ParallelLayer:
    """Base of the parallel layers: a mixin before the plain torch class."""

    tp: Axis
    region: Region
    autopar: ModulePlan
    autopar_layouts: dict[str, Layout]
    chunk: int | None = None  # a language model's head: tokens whose logits are made at a time, 0 for all
    skip_bias_add = False  # a layer that returns its bias beside its output
    weight: Any
    bias: Any
    training: bool
    _parameters: Any  # those of nn.Module, read without its search for a name
    _multiply: Any  # (x, weight, bias) -> y

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # type: ignore[arg-type]  # some plain layers have one of their own

    def _parameter(self, name: str) -> torch.Tensor:
        """A parameter for use in forward: where ranks replicate its units, their gradients are summed."""
        parameter: torch.Tensor = getattr(self, name)
        layout = self.autopar_layouts.get(name)
        return sum_replicas(parameter, self.tp, layout) if layout is not None and layout.replicated else parameter

    def _plain(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight and bias where, without gradients, the layer only multiplies and sums: a token costs many such calls.

        None where a dry run follows tensors, where dropout draws, where the bias is returned beside the output, and
        where the parameters are not the module's own (parametrizations).
        """
        own = self._parameters
        if self.skip_bias_add or "bias" not in own or not self.region.only_computes(self.training):
            return None
        weight = own.get("weight")
        return None if weight is None else (weight, own["bias"])


class _LayerRegion(Region):
    """The region of a layer without a parallelized model around it: nothing is kept from one layer to the next.

    Its random draws are the user's affair (:func:`autopar.tensor_parallel.get_cuda_rng_tracker`).
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayerRegion:
        return _LayerRegion(self.axis)

    def enter(self, x: torch.Tensor, *, shared: bool = True) -> torch.Tensor:
        return copy(x, self.axis)


def seeded_axis(group: Group | None, layer: str) -> Axis:
    """Return the axis of ``group``, whose ranks are about to draw the same weights. A collective of the axis.

    Raises:
        ConfigError: there is no group.
        ConsistencyError: on all ranks, if their random states differ.
    """
    if group is None:
        raise ConfigError(f"{layer} needs group=, a torch ProcessGroup or an MPU: there is no global one")
    axis = axis_of(group)
    if axis.size == 1:
        return axis
    device = device_of(axis)
    states = TorchGenerators.now(cuda=device.type != "cpu")
    state = b"".join(each.numpy().tobytes() for each in states if each is not None)
    largest, smallest = extremes([of_text(state)], axis.group)
    if largest != smallest:
        raise ConsistencyError(
            f"{layer}: the random states of the ranks {list(axis.ranks)} differ: they would draw different weights.\n"
            "  Seed all of them alike before the model is built: torch.manual_seed(1234)."
        )
    return axis


def layout_of(layer: str, what: str, size: int, dim: int, axis: Axis, stride: int = 1, unit: int = 1) -> Layout:
    """Return the layout of ``size`` features: ``stride`` parts side by side, units of ``unit`` features each.

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
    return Layout.of(dim, [Block("feature", count, unit, even_shards(count, axis.size))] * stride)


class FullWeight(NamedTuple):
    """How the full weight of a constructed layer is made.

    Attributes:
        init_method: fills it, and a bias is 0 then; None: as torch does.
        stride: parts side by side, each sharded by itself.
        unit: features that stay together on one rank.
    """

    init_method: InitMethod | None
    stride: int = 1
    unit: int = 1
    device: Any = None
    dtype: torch.dtype | None = None


def make_layer(
    layer: Any, axis: Axis, plan: ModulePlan, plain: Callable[..., nn.Module], how: FullWeight
) -> torch.Tensor:
    """Give a layer under construction what every parallel layer has, and its shards of the full parameters.

    Args:
        plain: makes the layer with full parameters.

    Returns:
        The full weight.
    """
    if how.init_method is None:
        full = plain(device=how.device, dtype=how.dtype)
    else:  # without torch's own draws
        full = plain(device="meta", dtype=how.dtype).to_empty(device=how.device or torch.get_default_device())
        with torch.no_grad():
            for name, parameter in full.named_parameters():
                how.init_method(parameter.data) if name == "weight" else parameter.zero_()
    layer.tp, layer.region, layer.autopar, layer.autopar_layouts = axis, _LayerRegion(axis), plan, dict(plan.layouts)
    for name, tensor in own_parameters(full).items():
        layout = plan.layouts.get(name)
        if tensor is None:
            layer.register_parameter(name, None)
        elif layout is None:
            setattr(layer, name, nn.Parameter(tensor.data))
        else:
            setattr(layer, name, nn.Parameter(layout.shard(tensor.data, axis.rank)))
            mark_shard(own_parameters(layer)[name], layout.dim, how.stride)
            if axis.size > 1:
                mark_layer(own_parameters(layer)[name], layer)
    return full.get_parameter("weight").data


def make_linear(
    layer: Any,
    rule: Literal["column", "row"],
    shape: tuple[int, int],
    bias: bool,
    how: FullWeight,
    group: Group | None,
    **options: Any,
) -> torch.Tensor:
    """Construct a linear layer, column- or row-parallel.

    Args:
        shape: of the full weight, ``[out, in]``.
        options: of its :class:`~autopar.plan.plan.ModulePlan`.

    Returns:
        The full weight.
    """
    name, dim = type(layer).__name__, 0 if rule == "column" else 1
    axis = seeded_axis(group, name)
    layout = layout_of(name, ("output_size", "input_size")[dim], shape[dim], dim, axis, how.stride, how.unit)
    layouts = {"weight": layout, **({"bias": layout} if bias and rule == "column" else {})}
    nn.Module.__init__(layer)
    layer.output_size, layer.input_size = shape
    layer.out_features, layer.in_features = (
        shape if options.get("gather_output") else layout.local_shape(shape, axis.rank)
    )
    plan = ModulePlan("", rule, "", layout, layouts, **options)
    return make_layer(layer, axis, plan, functools.partial(nn.Linear, shape[1], shape[0], bias), how)

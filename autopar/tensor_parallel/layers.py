"""The parallel layers. A plain module becomes one by a class swap: name, hooks, parameters and identity stay.

Column-parallel (Shoeybi et al., "Megatron-LM", 2019, section 3): the output features are sharded, ``y_r = x W_r``.
Row-parallel: the input features are, ``y = sum_r x_r W_r + b``. Vocab-parallel: the rows of an embedding are.
Weights are plain local ``nn.Parameter`` objects, the same ones as before.

Every layer has, in addition to the plain module:

* ``tp``: the axis, ``region``: the :class:`~autopar.tensor_parallel.regions.Region` of the model,
* ``autopar``: its :class:`~autopar.plan.plan.ModulePlan`,
* ``autopar_layouts``: parameter name -> :class:`~autopar.layout.Layout` of the sharded ones (on the module, since
  attributes of parameters do not survive ``deepcopy``, ``to_empty`` or ``load_state_dict(assign=True)``).

A constructor, for a user-defined model as with Megatron-LM, draws the full weight on every rank from the same random
state and keeps this rank's shard. So a model has the same full weights for any tensor-parallel size, and without
``init_method`` those that ``nn.Linear`` and ``nn.Embedding`` draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from autopar.compat.tensors import assert_soon, convolve, own_parameters
from autopar.data_parallel.replica_norm import mark_layer
from autopar.distributed.axis import Axis, Group, axis_of, device_of
from autopar.distributed.collectives import copy, gather, reduce_, scatter, sum_replicas
from autopar.distributed.digest import extremes, of_text
from autopar.distributed.rng import TorchGenerators
from autopar.errors import ConfigError, ConsistencyError
from autopar.layout import Block, Layout, even_shards
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.logits_shards import Head, HeadState, Shards
from autopar.tensor_parallel.overlap import CONV1D, LINEAR, WeightGradient, attach
from autopar.tensor_parallel.parameter_marks import mark_shard
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sharded_logits import sharded_logits

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


class VocabParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding with its rows sharded: mask, look up, sum. ``[...] -> [..., hidden]``, weight Shard(0).

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: of the full table, as for ``nn.Embedding``.
        init_method: what fills the full table, ``init_method(weight)``; None: as ``nn.Embedding`` does.
        group: a process group or an MPU.

    Raises:
        IndexError: an id outside the full table, on every rank (on CUDA a device-side assertion, as in torch).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod | None = None,
        group: Group | None = None,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ConfigError(f"padding_idx={padding_idx} lies outside of num_embeddings={num_embeddings}")
        axis = seeded_axis(group, type(self).__name__)
        layout = layout_of(type(self).__name__, "num_embeddings", num_embeddings, 0, axis)
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        plan = ModulePlan("", "embedding", "", layout, {"weight": layout})
        plain = functools.partial(nn.Embedding, num_embeddings, embedding_dim, padding_idx)
        make_layer(self, axis, plan, plain, FullWeight(init_method, device=device, dtype=dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = look_up(input, self.weight, self.autopar_layouts["weight"], self.tp, self.padding_idx)
        return self.region.mark_replicated(y)


def look_up(
    ids: torch.Tensor, weight: torch.Tensor, layout: Layout, axis: Axis, padding: int | None = None
) -> torch.Tensor:
    """Look up ``ids`` in a table of which ``weight`` is this rank's rows: mask, look up, sum. ``[..., features]``.

    Raises:
        IndexError: an id outside the full table, on every rank (on CUDA a device-side assertion, as in torch).
    """
    (start, stop) = next(iter(layout.ranges(axis.rank)), (0, 0))
    _check_ids(ids, layout.size)
    elsewhere = weight.stride() == (0, 0)  # one number stands for a table that another stage has: nobody needs the sum
    if start == stop:  # no rows here: zeros that are part of the graph
        y: torch.Tensor = weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()
        return y if elsewhere else reduce_(y, axis)
    local = ids - start
    outside = (local < 0) | (local >= stop - start)
    if padding is not None:
        padding = padding - start if start <= padding < stop else None
    y = F.embedding(local.masked_fill(outside, 0), weight, padding)
    return y if elsewhere else reduce_(y.masked_fill(outside.unsqueeze(-1), 0), axis)


class HiddenParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding with its columns sharded: look up, gather. ``[...] -> [..., hidden]``, weight Shard(1)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = F.embedding(input, self.weight, self.padding_idx)
        return self.region.mark_replicated(gather(y, self.tp, self.autopar_layouts["weight"]))  # [..., hidden]


def _check_ids(ids: torch.Tensor, size: int) -> None:
    if ids.is_meta:
        return
    if not ids.is_cpu or torch.compiler.is_compiling():  # looking at them would make the host wait
        assert_soon(((ids >= 0) & (ids < size)).all(), f"index out of range in an embedding of {size} rows")
    elif ids.numel():
        low, high = map(int, torch.aminmax(ids))
        if low < 0 or high >= size:
            raise IndexError(f"index out of range in an embedding of {size} rows: ids run from {low} to {high}")


class Column(ParallelLayer):
    """``[..., in] -> [..., out/tp]``, or ``[..., out]`` with ``gather_output``. Weight Shard(out), bias Shard(0)."""

    _weight_gradient: WeightGradient | None = None

    def forward(self, x: torch.Tensor) -> Any:
        plan = self.autopar
        if not torch.is_grad_enabled() and not plan.gather_output and (plain := self._plain()) is not None:
            return self._multiply(x, *plain)  # nothing else is left of what follows
        bias = None if self.bias is None else self._parameter("bias")
        if self.chunk is not None:
            nbytes = x.shape[:-1].numel() * self.autopar_layouts["weight"].size * x.itemsize
            if self.region.keeps_logits_sharded(self.training, nbytes):
                return self._logits(x)
        y = self._product(x, self._parameter("weight"), None if self.skip_bias_add else bias)  # [..., out/tp]
        if plan.gather_output:
            full = self.region.mark_replicated(gather(y, self.tp, self.autopar_layouts["weight"]))  # [..., out]
            if self.skip_bias_add:
                return full, bias if bias is None else gather(bias, self.tp, self.autopar_layouts["bias"])
            return full
        self.region.draw_per_rank(self.training)
        return (y, bias) if self.skip_bias_add else y

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Enter the region and multiply, ``[..., in] -> [..., out/tp]``."""
        if self.autopar.inside:
            return self._multiply(x, weight, bias)
        if self._weight_gradient is None or self.autopar.aside:
            return self._multiply(self.region.enter(x, shared=not self.autopar.aside), weight, bias)
        x, late = self.region.enter_first(x, weight, self._weight_gradient)
        if late is None:
            return self._multiply(x, weight, bias)
        y = attach(self._multiply(x.flatten(0, -2), weight.detach(), bias), late)  # [tokens, out/tp]
        return y.view(*x.shape[:-1], y.shape[-1])

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """The whole logits, which are gathered when somebody reads them."""
        weight, bias = self.weight, self.bias
        layout, name = self.autopar_layouts["weight"], self.region.name_logits()
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if self.chunk and x.dtype == weight.dtype and not autocast:
            x = x if self.autopar.inside else self.region.enter(x)
            head = Head(weight, bias, HeadState([p for p in (weight, bias) if p is not None]))
            return sharded_logits(Shards(x, self.tp, layout, x.dtype, name, self.chunk, head))
        y = self._product(x, weight, bias)  # [..., vocab/tp]
        return sharded_logits(Shards(y, self.tp, layout, y.dtype, name))


class Row(ParallelLayer):
    """``[..., in/tp] -> [..., out]``, or ``[..., in]`` in with ``split_input``. Weight Shard(in), bias Replicate."""

    def forward(self, x: torch.Tensor) -> Any:
        plan = self.autopar
        if not torch.is_grad_enabled() and not plan.split_input and not plan.enter_output and self.region.rows is None:
            plain = self._plain()
            if plain is not None:
                weight, bias = plain
                y = reduce_(self._multiply(x, weight, None), self.tp)
                return y if bias is None else self._add_bias(y)
        if plan.split_input:
            x = self.region.mark_sharded(scatter(x, self.tp, self.autopar_layouts["weight"]))  # [..., in/tp]
        self.region.leave()
        y = self._multiply(x, self.weight, None)  # [..., out], Partial
        rows = self.region.rows
        if rows is None:
            y = self.region.mark_replicated(reduce_(y, self.tp))
        else:
            y = self.region.mark_rows(rows.sum(y))  # [batch, seq/tp, out]
        if self.skip_bias_add:
            return y, self.bias
        y = y if self.bias is None else self._add_bias(y)
        return copy(y, self.tp) if plan.enter_output else y

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.bias
        return y + bias.to(y.dtype)


def _conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return x.matmul(weight)  # weight [in, out]
    y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[1])


class ColumnParallelLinear(Column, nn.Linear):
    """``nn.Linear`` with its output features sharded: ``[..., in] -> [..., out/tp]``.

    ``initialize`` makes it of a plain one. It can also be constructed, as Megatron-LM's, for a model of one's own: then
    ``weight`` is ``[out/tp, in]``, this rank's shard of the full one that every rank draws.

    Args:
        input_size, output_size: features of the full layer; ``output_size`` need not divide.
        bias: ``[out/tp]``, or none.
        gather_output: return the full ``[..., out]``.
        init_method: what fills the full weight, ``init_method(weight)``; the bias is 0 then. None: as ``nn.Linear``.
        stride: parts side by side that are sharded each by itself (``q | k | v``: 3, ``gate | up``: 2).
        unit: features that stay together on one rank (the width of a head).
        keep_master_weight_for_test: keep the full weight as ``master_weight``.
        skip_bias_add: return ``(output, bias)`` without adding the bias, for a fused kernel to add. Otherwise the
            output alone, as every ``nn.Module`` of a ``Sequential`` does.
        group: a process group or an MPU.
        device, dtype: as for ``nn.Linear``.

    Raises:
        ConfigError: no group, or more ranks than units.
        ConsistencyError: the ranks would draw different weights.
    """

    _multiply = staticmethod(F.linear)
    _weight_gradient = LINEAR

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        init_method: InitMethod | None = None,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        unit: int = 1,
        group: Group | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        how = FullWeight(init_method, stride, unit, device, dtype)
        weight = make_linear(self, "column", (output_size, input_size), bias, how, group, gather_output=gather_output)
        self.master_weight = weight if keep_master_weight_for_test else None
        self.skip_bias_add = skip_bias_add
        self.output_size_per_partition, self.gather_output = len(self.weight), gather_output


class RowParallelLinear(Row, nn.Linear):
    """``nn.Linear`` with its input features sharded: ``[..., in/tp] -> [..., out]``, the sum over the ranks.

    ``initialize`` makes it of a plain one. It can also be constructed, as Megatron-LM's, for a model of one's own: then
    ``weight`` is ``[out, in/tp]``, this rank's shard of the full one. The bias is replicated and added once.

    Args:
        input_is_parallel: the input is ``[..., in/tp]`` already, as a ``ColumnParallelLinear`` made it; else it is
            ``[..., in]`` and is scattered here.

    The other arguments are those of :class:`ColumnParallelLinear`; ``stride`` and ``unit`` are those of the column
    layer that makes the input.

    Raises:
        ConfigError: no group, or more ranks than units.
        ConsistencyError: the ranks would draw different weights.
    """

    _multiply = staticmethod(F.linear)

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod | None = None,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        unit: int = 1,
        group: Group | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        how = FullWeight(init_method, stride, unit, device, dtype)
        weight = make_linear(
            self, "row", (output_size, input_size), bias, how, group, split_input=not input_is_parallel
        )
        self.master_weight = weight if keep_master_weight_for_test else None
        self.skip_bias_add = skip_bias_add
        self.input_size_per_partition, self.input_is_parallel = self.in_features, input_is_parallel


class ColumnParallelConv1D(Column, Conv1D):
    """transformers' ``Conv1D`` with its output features sharded."""

    _multiply = staticmethod(_conv1d)
    _weight_gradient = CONV1D


class RowParallelConv1D(Row, Conv1D):
    """transformers' ``Conv1D`` with its input features sharded."""

    _multiply = staticmethod(_conv1d)


class _Conv:
    """A convolution of a plain class, as the product of a parallel layer."""

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = convolve(self, x, weight, bias)
        return y


class ColumnParallelConv(_Conv, Column):
    """A convolution with its output channels sharded: ``[batch, in, ...] -> [batch, out/tp, ...]``."""


class RowParallelConv(_Conv, Row):
    """A convolution with its input channels sharded: ``[batch, in/tp, ...] -> [batch, out, ...]``."""

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.bias
        return y + bias.to(y.dtype).view(-1, *[1] * (y.ndim - 2 if y.ndim == self.weight.ndim else y.ndim - 1))

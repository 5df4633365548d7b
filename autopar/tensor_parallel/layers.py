"""The parallel layers. A plain module becomes one by a class swap: name, hooks, parameters and identity stay.

Column-parallel (Shoeybi et al., "Megatron-LM", 2019, section 3): the output features are sharded, ``y_r = x W_r``.
Row-parallel: the input features are, ``y = sum_r x_r W_r + b``. Vocab-parallel: the rows of an embedding are.
Weights are plain local ``nn.Parameter`` objects, the same ones as before.

Every layer has, in addition to the plain module:

* ``tp``: the axis, ``region``: the :class:`~autopar.tensor_parallel.regions.Region` of the model,
* ``autopar``: its :class:`~autopar.plan.plan.ModulePlan`,
* ``autopar_layouts``: parameter name -> :class:`~autopar.layout.Layout` of the sharded ones (on the module, since
  attributes of parameters do not survive ``deepcopy``, ``to_empty`` or ``load_state_dict(assign=True)``).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from autopar.distributed.axis import Group
from autopar.distributed.collectives import copy, gather, reduce_, scatter
from autopar.distributed.rng import kept
from autopar.errors import PolicyError
from autopar.foreign.modules import Convolution, convolve
from autopar.plan.plan import ModulePlan
from autopar.swap import mixed_class
from autopar.tensor_parallel.adapters import (
    AdapterOfRows,
    DropoutAlike,
    DropoutApart,
    Magnitude,
    MagnitudeOfParts,
)
from autopar.tensor_parallel.embeddings import HiddenParallelEmbedding, VocabParallelEmbedding
from autopar.tensor_parallel.expert_modules import ExpertCaller, ModuleExperts
from autopar.tensor_parallel.experts import ExpertParallel
from autopar.tensor_parallel.logits_shards import Head, HeadState, Shards
from autopar.tensor_parallel.norms import ShardedNorm
from autopar.tensor_parallel.overlap import CONV1D, LINEAR, WeightGradient, attach
from autopar.tensor_parallel.parallel_layer import FullWeight, InitMethod, ParallelLayer, make_linear
from autopar.tensor_parallel.quantized_product import StoredProduct
from autopar.tensor_parallel.region_modules import RegionModule, argument_names, region_class
from autopar.tensor_parallel.sequence_rows import sum_to_rows
from autopar.tensor_parallel.sharded_logits import sharded_logits
from autopar.tensor_parallel.sorted_experts import SortedExperts

__all__ = [
    "ColumnParallelConv1D",
    "ColumnParallelLinear",
    "HiddenParallelEmbedding",
    "RowParallelConv1D",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "parallel_class",
    "plain_class",
]


class _Column(ParallelLayer):
    """``[..., in] -> [..., out/tp]``, or ``[..., out]`` with ``gather_output``. Weight Shard(out), bias Shard(0)."""

    _weight_gradient: WeightGradient | None = None

    def forward(self, x: torch.Tensor) -> Any:
        plan = self.autopar
        if not torch.is_grad_enabled() and not plan.gather_output and (plain := self._plain()) is not None:
            return self._multiply(x, *plain)  # nothing else is left of what follows
        bias = None if self.bias is None else self._parameter("bias")
        if self.chunk is not None and self.region.keeps_logits_sharded(self.training, self._whole_bytes(x)):
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

    def _whole_bytes(self, x: torch.Tensor) -> int:
        return x.shape[:-1].numel() * self.autopar_layouts["weight"].size * x.itemsize

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


class _Row(ParallelLayer):
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
            y = self.region.mark_rows(sum_to_rows(y, self.tp, rows))  # [batch, seq/tp, out]
        if self.skip_bias_add:
            return y, self.bias
        y = y if self.bias is None else self._add_bias(y)
        return copy(y, self.tp) if plan.enter_output else y

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.bias
        return y + bias.to(y.dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)  # weight [out, in]


def _conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return x.matmul(weight)  # weight [in, out]
    y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[1])


class ColumnParallelLinear(_Column, nn.Linear):
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

    _multiply = staticmethod(_linear)
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


class RowParallelLinear(_Row, nn.Linear):
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

    _multiply = staticmethod(_linear)

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


class ColumnParallelConv1D(_Column, Conv1D):
    """transformers' ``Conv1D`` with its output features sharded."""

    _multiply = staticmethod(_conv1d)
    _weight_gradient = CONV1D


class RowParallelConv1D(_Row, Conv1D):
    """transformers' ``Conv1D`` with its input features sharded."""

    _multiply = staticmethod(_conv1d)


class _Conv:
    """A convolution of a plain class, as the product of a parallel layer."""

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = convolve(self, x, weight, bias)
        return y


class ColumnParallelConv(_Conv, _Column):
    """A convolution with its output channels sharded: ``[batch, in, ...] -> [batch, out/tp, ...]``."""


class RowParallelConv(_Conv, _Row):
    """A convolution with its input channels sharded: ``[batch, in/tp, ...] -> [batch, out, ...]``."""

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.bias
        return y + bias.to(y.dtype).view(-1, *[1] * (y.ndim - 2 if y.ndim == self.weight.ndim else y.ndim - 1))


class ColumnParallelStored(StoredProduct, _Column):
    """A linear layer with a quantized weight and its output features sharded."""


class RowParallelStored(StoredProduct, _Row):
    """A linear layer with a quantized weight and its input features sharded."""


_LAYERS: dict[tuple[str, bool], type[nn.Module]] = {
    ("column", False): ColumnParallelLinear,
    ("row", False): RowParallelLinear,
    ("column", True): ColumnParallelConv1D,
    ("row", True): RowParallelConv1D,
    ("embedding", False): VocabParallelEmbedding,
    ("embedding", True): HiddenParallelEmbedding,
}
_REGION_MODULES: dict[str, type[RegionModule]] = {
    "norm_over": ShardedNorm,
    "experts": ExpertParallel,
    "expert_modules": ModuleExperts,
    "calls_experts": ExpertCaller,
    "dropout_alike": DropoutAlike,
    "dropout_apart": DropoutApart,
    "adapter_of_rows": AdapterOfRows,
    "magnitude": Magnitude,
    "magnitude_of_parts": MagnitudeOfParts,
}


def parallel_class(plain: type[nn.Module], plan: ModulePlan, *, stored: bool = False) -> type[nn.Module]:
    """Return the class that a module of class ``plain`` becomes; subclasses keep their own behaviour (``embed_scale``).

    Args:
        stored: its weight is quantized.

    Raises:
        PolicyError: the class computes something else than the layer that the rule is for.
    """
    if plan.rule in ("column", "row") and stored:
        return _stored_class(plain, ColumnParallelStored if plan.rule == "column" else RowParallelStored)
    if plan.rule in ("column", "row") and issubclass(plain, Convolution):
        return _conv_class(plain, ColumnParallelConv if plan.rule == "column" else RowParallelConv)
    if plan.rule in ("column", "row", "embedding"):
        layer = _LAYERS[plan.rule, plan.by_hidden if plan.rule == "embedding" else issubclass(plain, Conv1D)]
        return _layer_class(plain, layer)  # type: ignore[arg-type]
    replicas = {name for name, layout in plan.layouts.items() if layout.replicated}
    mixin = _REGION_MODULES.get(plan.rule, RegionModule)
    takes_routes = mixin is ExpertParallel and len(argument_names(plain)) >= 3  # type: ignore[arg-type]
    if mixin is ExpertParallel and not takes_routes:  # no indices of experts and no weights
        mixin = SortedExperts
    return region_class(plain, mixin, tuple(sorted(plan.summed | replicas)))  # type: ignore[arg-type]


def _stored_class(plain: Any, parallel: Any) -> Any:
    return mixed_class(parallel, plain, f"{parallel.__name__}Of{plain.__name__}")


def _conv_class(plain: Any, parallel: Any) -> Any:
    if plain.forward not in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
        raise PolicyError(f"{plain.__name__} has a forward of its own; it cannot become {parallel.__name__}")
    return mixed_class(parallel, plain, f"{parallel.__name__}Of{plain.__name__}")


@functools.cache
def _layer_class(plain: Any, parallel: Any) -> Any:
    """Put ``parallel`` before ``plain``, or, where that one calls ``super().forward``, between it and torch's class."""
    torch_class = parallel.__mro__[parallel.__mro__.index(ParallelLayer) + 1]
    if plain is torch_class:
        return parallel
    if plain.__setattr__ is not nn.Module.__setattr__ or "__call__" in vars(plain):
        raise PolicyError(f"{plain.__name__} changes how modules work; it cannot become {parallel.__name__}")
    forward = inspect.getattr_static(plain, "forward")
    if "super" in getattr(getattr(forward, "__code__", None), "co_names", ("super",)):
        return mixed_class(plain, parallel, f"{parallel.__name__}Of{plain.__name__}")
    _check_same(plain, torch_class)
    return mixed_class(parallel, plain, f"{parallel.__name__}Of{plain.__name__}")


def _check_same(plain: type[nn.Module], torch_class: type[nn.Module]) -> None:
    """Raise unless a subclass with a forward of its own (Falcon's ``x @ W.T``) computes what torch's class does."""
    same = False
    try:
        with torch.device("cpu"), kept(), torch.no_grad():
            module = plain(3, 5)
            x = torch.arange(3) if issubclass(plain, nn.Embedding) else torch.randn(2, 3)
            same = torch.allclose(module(x), torch_class.forward(module, x), rtol=1e-4, atol=1e-5)
    except Exception:
        same = False
    if not same:
        raise PolicyError(
            f"{plain.__name__} has a forward of its own that does something else than {torch_class.__name__}'s, "
            f"or needs more to be made: only {{replicated: UNIT}} fits it"
        )


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that :func:`parallel_class` was given for a module."""
    for candidate in type(module).__mro__:
        if issubclass(candidate, nn.Module) and not issubclass(candidate, ParallelLayer | RegionModule):
            return candidate
    raise TypeError(f"{type(module).__name__} is no parallel layer")

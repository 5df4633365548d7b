"""The parallel layers. A module becomes one by a change of class: it keeps its name, hooks, parameters and what it is.

Column-parallel (Shoeybi et al., "Megatron-LM", 2019, section 3): the output features are shared out, ``y_r = x W_r``.
Row-parallel: the input features are, ``y = sum_r x_r W_r + b``. Vocab-parallel: the rows of an embedding are.
Weights are plain local ``nn.Parameter`` objects, the same ones as before.

Every layer has, beside what it had as a plain module:

* ``tp``: the axis, ``region``: what the layers of the model share during a forward,
* ``autopar``: its :class:`~autopar.plan.plan.ModulePlan`,
* ``autopar_layouts``: parameter name -> :class:`~autopar.layout.Layout` of those that are cut (on the module, since
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
from autopar.errors import PolicyError
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.construction import InitMethod, layout_of, make_layer, shared_axis, whole_linear
from autopar.tensor_parallel.embeddings import HiddenParallelEmbedding, VocabParallelEmbedding
from autopar.tensor_parallel.experts import ExpertParallel
from autopar.tensor_parallel.layer import ParallelLayer
from autopar.tensor_parallel.norms import SharedNorm
from autopar.tensor_parallel.region_modules import Boundary, bounded_class
from autopar.tensor_parallel.vocabulary_rows import own_rows

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

    def forward(self, x: torch.Tensor) -> Any:
        plan = self.autopar
        bias = None if self.bias is None else self._used("bias")
        x = x if plan.inside else self.region.enter(x)
        y = self._multiply(x, self._used("weight"), None if self.skip_bias_add else bias)  # [..., out/tp]
        if plan.gather_output:
            whole = gather(y, self.tp, self.autopar_layouts["weight"])  # [..., out]
            if self.keeps_local:
                self.region.keep_local(whole, y)
            if self.skip_bias_add:
                return whole, bias if bias is None else gather(bias, self.tp, self.autopar_layouts["bias"])
            return whole
        self.region.draw_apart(self.training)  # type: ignore[attr-defined]
        return (y, bias) if self.skip_bias_add else y

    @staticmethod
    def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class _Row(ParallelLayer):
    """``[..., in/tp] -> [..., out]``, or ``[..., in]`` in with ``split_input``. Weight Shard(in), bias Replicate."""

    def forward(self, x: torch.Tensor) -> Any:
        if self.autopar.split_input:
            x = self.region.open(scatter(x, self.tp, self.autopar_layouts["weight"]))  # [..., in/tp]
        self.region.leave()
        y = self.region.close(
            reduce_(self._multiply(x, self.weight, None), self.tp)
        )  # [..., out], Partial -> Replicate
        if self.skip_bias_add:
            return y, self.bias
        y = y if self.bias is None else self._add_bias(y)
        return copy(y, self.tp) if self.autopar.enter_output else y

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.bias
        return y + bias.to(y.dtype)

    @staticmethod
    def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)  # weight [out, in]


def _conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return x.matmul(weight)  # weight [in, out]
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


class ColumnParallelLinear(_Column, nn.Linear):
    """``nn.Linear`` with its output features sharded: ``[..., in] -> [..., out/tp]``.

    ``initialize`` makes it of a plain one. It can also be constructed, as Megatron-LM's, for a model of one's own: then
    ``weight`` is ``[out/tp, in]``, cut out of the whole that every rank draws.

    Args:
        input_size, output_size: features of the whole layer; ``output_size`` need not divide.
        bias: ``[out/tp]``, or none.
        gather_output: return the whole ``[..., out]``.
        init_method: what fills the whole weight, ``init_method(weight)``; the bias is 0 then. None: as ``nn.Linear``.
        stride: parts side by side that are sharded each by itself (``q | k | v``: 3, ``gate | up``: 2).
        unit: features that stay together on one rank (the width of a head).
        keep_master_weight_for_test: keep the whole weight as ``master_weight``.
        skip_bias_add: return ``(output, bias)`` with the bias not added, for who fuses it with what follows. Otherwise
            the output alone, as every ``nn.Module`` of a ``Sequential`` does.
        group: a process group or an MPU.
        device, dtype: as for ``nn.Linear``.

    Raises:
        ConfigError: no group, or more ranks than units.
        ConsistencyError: the ranks would draw different weights.
    """

    weight = own_rows
    _multiply = staticmethod(_linear)

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
        name = type(self).__name__
        axis = shared_axis(group, name)
        layout = layout_of(name, "output_size", output_size, 0, axis, stride, unit)
        layouts = {"weight": layout, **({"bias": layout} if bias else {})}
        whole = whole_linear(input_size, output_size, bias, init_method, device, dtype)
        nn.Module.__init__(self)
        self.input_size, self.output_size, self.skip_bias_add = input_size, output_size, skip_bias_add
        self.in_features, self.out_features = input_size, layout.local_size(axis.rank)
        self.output_size_per_partition, self.gather_output = self.out_features, gather_output
        make_layer(
            self, axis, ModulePlan("", "column", "", layout, layouts, gather_output=gather_output), whole, stride
        )
        self.master_weight = whole["weight"] if keep_master_weight_for_test else None


class RowParallelLinear(_Row, nn.Linear):
    """``nn.Linear`` with its input features sharded: ``[..., in/tp] -> [..., out]``, the sum over the ranks.

    ``initialize`` makes it of a plain one. It can also be constructed, as Megatron-LM's, for a model of one's own: then
    ``weight`` is ``[out, in/tp]``, cut out of the whole that every rank draws. The bias is whole and added once.

    Args:
        input_is_parallel: the input is ``[..., in/tp]`` already, as a ``ColumnParallelLinear`` made it; else it is
            ``[..., in]`` and is cut here.

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
        name = type(self).__name__
        axis = shared_axis(group, name)
        layout = layout_of(name, "input_size", input_size, 1, axis, stride, unit)
        whole = whole_linear(input_size, output_size, bias, init_method, device, dtype)
        nn.Module.__init__(self)
        self.input_size, self.output_size, self.skip_bias_add = input_size, output_size, skip_bias_add
        self.in_features, self.out_features = layout.local_size(axis.rank), output_size
        self.input_size_per_partition, self.input_is_parallel = self.in_features, input_is_parallel
        plan = ModulePlan("", "row", "", layout, {"weight": layout}, split_input=not input_is_parallel)
        make_layer(self, axis, plan, whole, stride)
        self.master_weight = whole["weight"] if keep_master_weight_for_test else None


class ColumnParallelConv1D(_Column, Conv1D):
    """transformers' ``Conv1D`` with its output features shared out."""

    _multiply = staticmethod(_conv1d)


class RowParallelConv1D(_Row, Conv1D):
    """transformers' ``Conv1D`` with its input features shared out."""

    _multiply = staticmethod(_conv1d)


class ColumnParallelConv(_Column):
    """A convolution with its output channels shared out: ``[batch, in, ...] -> [batch, out/tp, ...]``."""

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        y: torch.Tensor = self._conv_forward(x, weight, bias)  # type: ignore[attr-defined]
        return y


class RowParallelConv(_Row):
    """A convolution with its input channels shared out: ``[batch, in/tp, ...] -> [batch, out, ...]``."""

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        y: torch.Tensor = self._conv_forward(x, weight, bias)  # type: ignore[attr-defined]
        return y

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.bias
        return y + bias.to(y.dtype).view(-1, *[1] * (y.ndim - 2 if y.ndim == self.weight.ndim else y.ndim - 1))


_LAYERS: dict[tuple[str, bool], type[nn.Module]] = {
    ("column", False): ColumnParallelLinear,
    ("row", False): RowParallelLinear,
    ("column", True): ColumnParallelConv1D,
    ("row", True): RowParallelConv1D,
    ("embedding", False): VocabParallelEmbedding,
    ("embedding", True): HiddenParallelEmbedding,
}
_BOUNDARIES: dict[str, type[Boundary]] = {"norm_over": SharedNorm, "experts": ExpertParallel}


def parallel_class(plain: type[nn.Module], plan: ModulePlan) -> type[nn.Module]:
    """The class that a module of class ``plain`` becomes. Subclasses keep their own behaviour (``embed_scale``)."""
    if plan.rule in ("column", "row") and issubclass(plain, nn.modules.conv._ConvNd):
        return _conv_class(plain, ColumnParallelConv if plan.rule == "column" else RowParallelConv)  # type: ignore[arg-type]
    if plan.rule in ("column", "row", "embedding"):
        layer = _LAYERS[plan.rule, plan.by_hidden if plan.rule == "embedding" else issubclass(plain, Conv1D)]
        return _layer_class(plain, layer)  # type: ignore[arg-type]
    replicas = {name for name, layout in plan.layouts.items() if layout.replicated}
    first = _BOUNDARIES.get(plan.rule, Boundary)
    return bounded_class(plain, first, tuple(sorted(plan.summed | replicas)))  # type: ignore[arg-type]


@functools.cache
def _conv_class(plain: type[nn.Module], parallel: type[Any]) -> type[nn.Module]:
    if plain.forward not in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
        raise PolicyError(f"{plain.__name__} has a forward of its own; it cannot become {parallel.__name__}")
    return type(f"{parallel.__name__}Of{plain.__name__}", (parallel, plain), {})


@functools.cache
def _layer_class(plain: type[nn.Module], parallel: type[nn.Module]) -> type[nn.Module]:
    """A subclass calls ``super().forward``, which finds the parallel forward: it stands between the subclass and
    torch's class in the method resolution order."""
    torch_class = parallel.__mro__[parallel.__mro__.index(ParallelLayer) + 1]
    if plain is torch_class:
        return parallel
    if plain.__setattr__ is not nn.Module.__setattr__ or "__call__" in vars(plain):
        raise PolicyError(f"{plain.__name__} changes how modules work; it cannot become {parallel.__name__}")
    forward = inspect.getattr_static(plain, "forward")
    if "super" in getattr(getattr(forward, "__code__", None), "co_names", ("super",)):
        return type(f"{parallel.__name__}Of{plain.__name__}", (plain, parallel), {})
    _check_same(plain, torch_class)
    return type(f"{parallel.__name__}Of{plain.__name__}", (parallel, plain), {})


def _check_same(plain: type[nn.Module], torch_class: type[nn.Module]) -> None:
    """A subclass with a forward of its own (Falcon's ``x @ W.T``) may be replaced if it computes what torch's does."""
    same = False
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
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
    """Inverse of :func:`parallel_class` for a module that is a parallel layer."""
    for candidate in type(module).__mro__:
        if issubclass(candidate, nn.Module) and not issubclass(candidate, ParallelLayer | Boundary):
            return candidate
    raise TypeError(f"{type(module).__name__} is no parallel layer")

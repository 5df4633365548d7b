"""The parallel layers. A module becomes one by a change of class: it keeps its name, hooks, parameters and what it is.

Column-parallel (Shoeybi et al., "Megatron-LM", 2019, section 3): the output features are shared out, ``y_r = x W_r``.
Row-parallel: the input features are, ``y = sum_r x_r W_r + b``. Vocab-parallel: the rows of an embedding are.
Weights are plain local ``nn.Parameter`` objects, the same ones as before.

Every layer has, beside what it had as a plain module:

* ``tp``: the axis, ``region``: what the layers of the model share during a forward,
* ``autopar``: its :class:`~autopar.policy.plan.ModulePlan`,
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

from autopar.collectives import Axis, copy, gather, reduce_, scatter, sum_replicas
from autopar.errors import PolicyError
from autopar.layout import Layout
from autopar.policy.plan import ModulePlan
from autopar.tensor_parallel.boundaries import Boundary, bounded_class
from autopar.tensor_parallel.experts import ExpertParallel
from autopar.tensor_parallel.norms import SharedNorm
from autopar.tensor_parallel.regions import Region
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


class _Parallel:
    """What all parallel layers carry."""

    tp: Axis
    region: Region
    autopar: ModulePlan
    autopar_layouts: dict[str, Layout]
    keeps_local = False  # a language model's head, whose loss is taken from the local logits
    weight: Any
    bias: Any

    def _used(self, name: str) -> torch.Tensor:
        """A parameter for use in forward: where several ranks hold the same units, their gradients are summed."""
        parameter: torch.Tensor = getattr(self, name)
        layout = self.autopar_layouts.get(name)
        return sum_replicas(parameter, self.tp, layout) if layout is not None and layout.replicated else parameter


class _Column(_Parallel):
    """``[..., in] -> [..., out/tp]``, or ``[..., out]`` with ``gather_output``. Weight Shard(out), bias Shard(0)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plan = self.autopar
        bias = None if self.bias is None else self._used("bias")
        x = x if plan.inside else self.region.enter(x)
        y = self._multiply(x, self._used("weight"), bias)  # [..., out/tp]
        if plan.gather_output:
            whole = gather(y, self.tp, self.autopar_layouts["weight"])  # [..., out]
            if self.keeps_local:
                self.region.keep_local(whole, y)
            return whole
        self.region.draw_apart(self.training)  # type: ignore[attr-defined]
        return y

    @staticmethod
    def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class _Row(_Parallel):
    """``[..., in/tp] -> [..., out]``, or ``[..., in]`` in with ``split_input``. Weight Shard(in), bias Replicate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.autopar.split_input:
            x = self.region.open(scatter(x, self.tp, self.autopar_layouts["weight"]))  # [..., in/tp]
        self.region.leave()
        y = self.region.close(
            reduce_(self._multiply(x, self.weight, None), self.tp)
        )  # [..., out], Partial -> Replicate
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
    """``nn.Linear`` with its output features shared out."""

    weight = own_rows
    _multiply = staticmethod(_linear)


class RowParallelLinear(_Row, nn.Linear):
    """``nn.Linear`` with its input features shared out."""

    _multiply = staticmethod(_linear)


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


class VocabParallelEmbedding(_Parallel, nn.Embedding):
    """An embedding with its rows shared out: mask, look up, sum. ``[...] -> [..., hidden]``, weight Shard(0).

    Raises:
        IndexError: an id outside the whole table, on every rank (on CUDA a device-side assertion, as in torch).
    """

    weight = own_rows

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layout = self.autopar_layouts["weight"]
        (start, stop) = next(iter(layout.ranges(self.tp.rank)), (0, 0))
        _check_ids(input, layout.size)
        if start == stop:  # no rows here: zeros that still belong to the graph
            y: torch.Tensor = self.weight.new_zeros(*input.shape, self.weight.shape[1]) + self.weight.sum()
            return self.region.close(reduce_(y, self.tp))
        local = input - start
        outside = (local < 0) | (local >= stop - start)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < stop else None
        y = F.embedding(local.masked_fill(outside, 0), self.weight, padding)
        return self.region.close(reduce_(y.masked_fill(outside.unsqueeze(-1), 0), self.tp))


class HiddenParallelEmbedding(_Parallel, nn.Embedding):
    """An embedding with its columns shared out: look up, gather. ``[...] -> [..., hidden]``, weight Shard(1)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = F.embedding(input, self.weight, self.padding_idx)
        return self.region.close(gather(y, self.tp, self.autopar_layouts["weight"]))  # [..., hidden]


def _check_ids(ids: torch.Tensor, size: int) -> None:
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < size)).all())
    elif ids.numel() and not ids.is_meta:
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= size:
            raise IndexError(f"index out of range in an embedding of {size} rows: ids run from {low} to {high}")


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
    torch_class = parallel.__mro__[parallel.__mro__.index(_Parallel) + 1]
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
        if issubclass(candidate, nn.Module) and not issubclass(candidate, _Parallel | Boundary):
            return candidate
    raise TypeError(f"{type(module).__name__} is no parallel layer")

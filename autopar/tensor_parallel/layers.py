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

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from autopar.compat.tensors import assert_soon, convolve
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import copy, gather, reduce_, scatter, sum_replicas
from autopar.layout import Layout
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.regions import CONV1D, LINEAR, Region, WeightGradient, attach
from autopar.tensor_parallel.sharded_logits import Head, HeadState, VocabShard, sharded_logits


class ParallelLayer:
    """Base of the parallel layers: a mixin before the plain torch class."""

    tp: Axis
    region: Region
    autopar: ModulePlan
    autopar_layouts: dict[str, Layout]
    chunk: int | None = None  # a language model's head: tokens whose logits are made at a time, 0 for all
    skip_bias_add = False  # a layer that returns output and bias
    weight: Any
    bias: Any
    training: bool
    _parameters: Any  # nn.Module's, read without its search for a name
    _multiply: Any  # (x, weight, bias) -> y

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # type: ignore[arg-type]  # some plain layers define one

    def _parameter(self, name: str) -> torch.Tensor:
        """A parameter for use in forward: where ranks replicate its units, their gradients are summed."""
        parameter: torch.Tensor = getattr(self, name)
        layout = self.autopar_layouts.get(name)
        return sum_replicas(parameter, self.tp, layout) if layout is not None and layout.replicated else parameter

    def _plain(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return weight and bias if, without gradients, the layer only multiplies and sums: a token costs many calls.

        None where a dry run follows tensors, dropout draws, the bias is returned, or parameters are parametrized.
        """
        own = self._parameters
        if self.skip_bias_add or "bias" not in own or not self.region.only_computes(self.training):
            return None
        weight = own.get("weight")
        return None if weight is None else (weight, own["bias"])


class VocabParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding with its rows sharded: mask, look up, sum. ``[...] -> [..., hidden]``, weight Shard(0)."""

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
    elsewhere = weight.stride() == (0, 0)  # one number stands for a table of another stage: the sum is not needed
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
        """Return the full logits, gathered lazily."""
        weight, bias = self.weight, self.bias
        layout, name = self.autopar_layouts["weight"], self.region.name_logits()
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if self.chunk and x.dtype == weight.dtype and not autocast:
            x = x if self.autopar.inside else self.region.enter(x)
            head = Head(weight, bias, HeadState([p for p in (weight, bias) if p is not None]))
            return sharded_logits(VocabShard(x, self.tp, layout, x.dtype, name, self.chunk, head))
        y = self._product(x, weight, bias)  # [..., vocab/tp]
        return sharded_logits(VocabShard(y, self.tp, layout, y.dtype, name))


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
    """``nn.Linear`` with its output features sharded."""

    _multiply = staticmethod(F.linear)
    _weight_gradient = LINEAR


class RowParallelLinear(Row, nn.Linear):
    """``nn.Linear`` with its input features sharded."""

    _multiply = staticmethod(F.linear)


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
        return convolve(self, x, weight, bias)


class ColumnParallelConv(_Conv, Column):
    """A convolution with its output channels sharded: ``[batch, in, ...] -> [batch, out/tp, ...]``."""


class RowParallelConv(_Conv, Row):
    """A convolution with its input channels sharded: ``[batch, in/tp, ...] -> [batch, out, ...]``."""

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.bias
        return y + bias.to(y.dtype).view(-1, *[1] * (y.ndim - 2 if y.ndim == self.weight.ndim else y.ndim - 1))

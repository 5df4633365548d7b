"""The parallel layers. A class swap turns a plain module into one; its name, hooks, parameters and identity stay.

Column-parallel layers (Shoeybi et al., "Megatron-LM", 2019, section 3) shard the output features: ``y_r = x W_r``.
Row-parallel layers shard the input features: ``y = sum_r x_r W_r + b``. Vocab-parallel embeddings shard the rows.
Weights stay the same ``nn.Parameter`` objects and hold the local shard.

Every layer has, in addition to the plain module:

* ``tp``: the axis; ``region``: the :class:`~autopar.tensor_parallel.regions.Region` of the model,
* ``autopar``: its :class:`~autopar.plan.plan.ModulePlan`,
* ``autopar_layouts``: name of a sharded parameter -> :class:`~autopar.layout.Layout`. It is on the module, since
  attributes of parameters do not survive ``deepcopy``, ``to_empty`` or ``load_state_dict(assign=True)``.
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
    chunk: int | None = None  # of a language model's head: tokens per chunk of logits, 0 for all
    skip_bias_add = False  # True: the layer returns output and bias
    weight: Any
    bias: Any
    training: bool
    _parameters: Any  # nn.Module's dict; reading it skips the slow attribute lookup
    _multiply: Any  # (x, weight, bias) -> y

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # type: ignore[arg-type]  # some plain layers define one

    def _parameter(self, name: str) -> torch.Tensor:
        """Return a parameter for use in forward; gradients of units that several ranks hold are summed."""
        parameter: torch.Tensor = getattr(self, name)
        layout = self.autopar_layouts.get(name)
        return sum_replicas(parameter, self.tp, layout) if layout is not None and layout.replicated else parameter

    def _plain(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return weight and bias if a call without gradients only multiplies and sums: a fast path for decoding.

        None during a dry run, with dropout, with ``skip_bias_add``, or if parameters are parametrized.
        """
        own = self._parameters
        if self.skip_bias_add or "bias" not in own or not self.region.only_computes(self.training):
            return None
        weight = own.get("weight")
        return None if weight is None else (weight, own["bias"])


class VocabParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding with sharded rows: mask, look up, sum. ``[...] -> [..., hidden]``, weight Shard(0)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = look_up(input, self.weight, self.autopar_layouts["weight"], self.tp, self.padding_idx)
        return self.region.mark_replicated(y)


def look_up(
    ids: torch.Tensor, weight: torch.Tensor, layout: Layout, axis: Axis, padding: int | None = None
) -> torch.Tensor:
    """Look up ``ids`` in a table of which ``weight`` holds the local rows; return ``[..., features]``.

    Raises:
        IndexError: An id is outside the full table; on every rank. On CUDA a device-side assertion, as in torch.
    """
    (start, stop) = next(iter(layout.ranges(axis.rank)), (0, 0))
    _check_ids(ids, layout.size)
    elsewhere = weight.stride() == (0, 0)  # a placeholder for a table of another stage: no sum is needed
    if start == stop:  # no local rows: zeros that are part of the graph
        y: torch.Tensor = weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()
        return y if elsewhere else reduce_(y, axis)
    local = ids - start
    outside = (local < 0) | (local >= stop - start)
    if padding is not None:
        padding = padding - start if start <= padding < stop else None
    y = F.embedding(local.masked_fill(outside, 0), weight, padding)
    return y if elsewhere else reduce_(y.masked_fill(outside.unsqueeze(-1), 0), axis)


class HiddenParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding with sharded columns: look up, gather. ``[...] -> [..., hidden]``, weight Shard(1)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = F.embedding(input, self.weight, self.padding_idx)
        return self.region.mark_replicated(gather(y, self.tp, self.autopar_layouts["weight"]))  # [..., hidden]


def _check_ids(ids: torch.Tensor, size: int) -> None:
    if ids.is_meta:
        return
    if not ids.is_cpu or torch.compiler.is_compiling():  # reading the ids would make the host wait
        assert_soon(((ids >= 0) & (ids < size)).all(), f"index out of range in an embedding of {size} rows")
    elif ids.numel():
        low, high = map(int, torch.aminmax(ids))
        if low < 0 or high >= size:
            raise IndexError(f"index out of range in an embedding of {size} rows: got ids from {low} to {high}")


class Column(ParallelLayer):
    """Map ``[..., in] -> [..., out/tp]``, ``[..., out]`` with ``gather_output``; weight Shard(out), bias Shard(0)."""

    _weight_gradient: WeightGradient | None = None

    def forward(self, x: torch.Tensor) -> Any:
        plan = self.autopar
        if not torch.is_grad_enabled() and not plan.gather_output and (plain := self._plain()) is not None:
            return self._multiply(x, *plain)  # the rest of forward would do nothing
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
        """Return the full logits as a tensor that is gathered lazily."""
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
    """Map ``[..., in/tp] -> [..., out]``, or ``[..., in]`` with ``split_input``; weight Shard(in), bias Replicate."""

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
    """``nn.Linear`` with sharded output features."""

    _multiply = staticmethod(F.linear)
    _weight_gradient = LINEAR


class RowParallelLinear(Row, nn.Linear):
    """``nn.Linear`` with sharded input features."""

    _multiply = staticmethod(F.linear)


class ColumnParallelConv1D(Column, Conv1D):
    """``Conv1D`` of transformers with sharded output features."""

    _multiply = staticmethod(_conv1d)
    _weight_gradient = CONV1D


class RowParallelConv1D(Row, Conv1D):
    """``Conv1D`` of transformers with sharded input features."""

    _multiply = staticmethod(_conv1d)


class _Conv:
    """Use the convolution of the plain class as the product of a parallel layer."""

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return convolve(self, x, weight, bias)


class ColumnParallelConv(_Conv, Column):
    """A convolution with sharded output channels: ``[batch, in, ...] -> [batch, out/tp, ...]``."""


class RowParallelConv(_Conv, Row):
    """A convolution with sharded input channels: ``[batch, in/tp, ...] -> [batch, out, ...]``."""

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.bias
        return y + bias.to(y.dtype).view(-1, *[1] * (y.ndim - 2 if y.ndim == self.weight.ndim else y.ndim - 1))

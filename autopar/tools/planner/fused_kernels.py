"""Attention and dropout on the meta device, keeping for backward what the fused kernels of a GPU keep.

On the meta device torch would decompose both: attention into a softmax of ``[batch, heads, seq, seq]``, dropout into a
product with a mask of the input's dtype. Flash attention keeps q, k, v, its output and a logarithm per row (Dao et al.,
"FlashAttention", 2022); dropout keeps a mask of one byte an element.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.tools.planner.storages import Storages

__all__ = ["FusedKernels"]

_WIDEST_HEAD = 256  # of flash attention


class FusedKernels(TorchFunctionMode):
    """A function mode that puts the fused kernels' shapes in the place of attention and dropout.

    Args:
        storages: gets their operations.
    """

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.ndim != 4 or not query.is_meta or max(query.shape[-1], value.shape[-1]) > _WIDEST_HEAD:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)  # what is added to the scores
        batch, heads, rows, width = query.shape
        flops = 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])
        moved = sum(x.numel() * x.element_size() for x in (query, query, key, value, attn_mask) if x is not None)
        self._storages.add_operation(flops // 2 if is_causal else flops, moved, attention=True)
        out: torch.Tensor = _Attention.apply(query, key, value, attn_mask)
        return out

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        return torch.ops.aten.native_dropout(input, p, True)[0]


class _Attention(torch.autograd.Function):
    """``[batch, heads, seq, width] -> [batch, heads, seq, width of values]``, as flash attention lays it out."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, rows, _ = query.shape
        out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        logarithms = query.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, logarithms)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, *_ = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (query, key, value)]
        of_mask = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        return (*gradients, of_mask)

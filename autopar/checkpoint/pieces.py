"""A part that ``save_pretrained`` writes of a stored tensor (one of stacked experts), read by itself. Pure."""

from __future__ import annotations

import math

from autopar.checkpoint.lazy import LazyTensor, Narrowed, Permuted, Squeezed
from autopar.policy.plan import Piece

__all__ = ["lazy_piece"]


def lazy_piece(whole: LazyTensor, piece: Piece) -> LazyTensor | None:
    """The piece as ranges along the dims of the whole tensor; None if it is no such box (elements skipped, folded)."""
    strides = [math.prod(whole.shape[dim + 1 :]) for dim in range(len(whole.shape))]
    starts = []
    left = piece.offset
    for stride in strides:
        starts.append(left // stride if stride else 0)
        left -= starts[-1] * stride
    chosen: list[int] = []  # dim of the whole tensor for each dim of the piece
    for size, step in zip(piece.shape, piece.stride, strict=True):
        fitting = [
            dim
            for dim, stride in enumerate(strides)
            if dim not in chosen and stride == step and starts[dim] + size <= whole.shape[dim]
        ]
        if not fitting:
            return None
        chosen.append(max(fitting, key=lambda dim: whole.shape[dim]))
    result = whole
    for dim, start in enumerate(starts):
        size = piece.shape[chosen.index(dim)] if dim in chosen else 1
        if start + size > whole.shape[dim]:
            return None
        if size != whole.shape[dim]:
            result = Narrowed(result, dim, start, start + size)
    for dim in reversed(range(len(strides))):
        if dim not in chosen:
            result = Squeezed(result, dim)
    kept = sorted(chosen)
    order = [kept.index(dim) for dim in chosen]
    return result if order == list(range(len(order))) else Permuted(result, order)

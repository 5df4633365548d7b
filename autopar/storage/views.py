"""What ``save_pretrained`` writes in place of stored tensors (one of stacked experts, a fused projection). Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from autopar.errors import CheckpointError
from autopar.plan.plan import Piece
from autopar.storage.lazy_conversion import Converted
from autopar.storage.lazy_tensor import InMemory, Joined, LazyTensor, Narrowed, Permuted, Squeezed

__all__ = ["lazy_piece", "open_piece"]


def open_piece(piece: Piece, of: str, stored: Callable[[str], LazyTensor]) -> LazyTensor:
    """Return the piece, to be read in ranges; what is no box of its tensors is read at once.

    Args:
        of: the stored tensor that it is a view of, unless it is joined.
        stored: opens a stored tensor.

    Raises:
        CheckpointError: the piece does not lie inside what it is a view of.
    """
    if piece.joined is None:
        whole = stored(of)
    else:
        parts = [open_piece(part, part.name, stored) for part in piece.joined.parts]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        whole = Joined([part if part.dtype == dtype else Converted(part, dtype) for part in parts], piece.joined.dim)
    part = lazy_piece(whole, piece)
    if part is not None:
        return part
    try:
        return InMemory(piece.of(whole.read()).clone())
    except RuntimeError as error:
        raise CheckpointError(f"the manifest describes {piece.name} wrongly: {error}") from error


def lazy_piece(whole: LazyTensor, piece: Piece) -> LazyTensor | None:
    """Return the piece as ranges along the dims of the full tensor; None if it is no box (elements skipped, folded)."""
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

"""Views of lazy tensors: slices, dims in another order, dims of size 1, other dtypes; and pieces that are such views.

A piece is what ``save_pretrained`` writes in place of a stored tensor (one of stacked experts, a fused projection).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from autopar.errors import CheckpointError
from autopar.plan.plan import Piece
from autopar.storage.files import RangeFile
from autopar.storage.lazy_tensor import Box, InMemory, Joined, LazyTensor, Stored, whole_box


class View(LazyTensor):
    """Ranges of the dims of ``base``, in any order, with dims of size 1 left out or added.

    Args:
        dims: for each dim the one of ``base`` that it is a range of; None: one of size 1 that is added.
        starts: where the range begins in each dim of ``base``. Those that are left out have one element.
    """

    def __init__(
        self, base: LazyTensor, shape: Sequence[int], dims: Sequence[int | None], starts: Sequence[int]
    ) -> None:
        super().__init__(shape, base.dtype)
        self.base, self.dims, self.starts = base, tuple(dims), tuple(starts)
        self._kept = [dim for dim in self.dims if dim is not None]

    def files(self) -> Iterator[RangeFile]:
        return self.base.files()

    def slabs(self, limit: int) -> Iterator[Box]:
        """Yield one box if dims are in another order: a part of its rows lies in every row of ``base``."""
        return super().slabs(limit) if self._kept == sorted(self._kept) else iter((whole_box(self.shape),))

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        if out.numel() == 0:
            return
        part = out[tuple(0 if dim is None else slice(None) for dim in self.dims)]
        part = part.permute(sorted(range(part.ndim), key=self._kept.__getitem__))
        for dim in range(len(self.starts)):
            if dim not in self._kept:
                part = part.unsqueeze(dim)
        self.base.read_into(part, self._in_base(box))

    def mapped(self, box: Box) -> torch.Tensor | None:
        return self.base.mapped(self._in_base(box)) if self.dims == tuple(range(len(self.starts))) else None

    def _in_base(self, box: Box) -> Box:
        ranges = {dim: wanted for dim, wanted in zip(self.dims, box, strict=True) if dim is not None}
        pairs = (ranges.get(dim, (0, 1)) for dim in range(len(self.starts)))
        return tuple((start + low, start + high) for start, (low, high) in zip(self.starts, pairs, strict=True))


def narrowed(base: LazyTensor, dim: int, start: int, stop: int) -> View:
    """Return the range ``[start, stop)`` along ``dim``."""
    starts = [start if at == dim else 0 for at in range(len(base.shape))]
    return View(base, (*base.shape[:dim], stop - start, *base.shape[dim + 1 :]), range(len(starts)), starts)


def permuted(base: LazyTensor, dims: Sequence[int]) -> View:
    """Return ``base`` with its dims in this order, as ``Tensor.permute`` has them."""
    return View(base, [base.shape[dim] for dim in dims], dims, [0] * len(dims))


def unsqueezed(base: LazyTensor, dim: int) -> View:
    """Return ``base`` with a dim of size 1 at ``dim``."""
    before, after = range(dim), range(dim, len(base.shape))
    return View(base, (*base.shape[:dim], 1, *base.shape[dim:]), [*before, None, *after], [0] * len(base.shape))


class Converted(LazyTensor):
    """``base`` in another dtype."""

    def __init__(self, base: LazyTensor, dtype: torch.dtype) -> None:
        super().__init__(base.shape, dtype)
        self.base = base

    def files(self) -> Iterator[RangeFile]:
        return self.base.files()

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        if out.dtype == self.dtype:
            self.base.read_into(out, box)
            return
        between = torch.empty(out.shape, dtype=self.dtype, device="cpu")
        self.base.read_into(between, box)
        out.copy_(between)


def lazy_view(full: LazyTensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> LazyTensor | None:
    """Return a view of a contiguous tensor as ranges of its dims; None if it is none (elements skipped, dims folded).

    Args:
        shape, stride, offset: of the view, in elements.
    """
    steps = [math.prod(full.shape[dim + 1 :]) for dim in range(len(full.shape))]
    starts = []
    for step in steps:
        start, offset = divmod(offset, step) if step else (0, offset)
        starts.append(start)
    dim_of = {step: dim for dim, step in enumerate(steps) if full.shape[dim] != 1}
    dims = [None if size == 1 else dim_of.get(step, -1) for size, step in zip(shape, stride, strict=True)]
    sizes = {dim: size for dim, size in zip(dims, shape, strict=True) if dim is not None}
    if -1 in sizes or len(sizes) != sum(dim is not None for dim in dims):
        return None
    if any(start + sizes.get(dim, 1) > full.shape[dim] for dim, start in enumerate(starts)):
        return None
    is_full = tuple(shape) == full.shape and list(sizes) == sorted(sizes)
    return full if is_full else View(full, shape, dims, starts)


def reshaped(lazy: LazyTensor, shape: Sequence[int]) -> LazyTensor | None:
    """Return the tensor with dims split or folded; None unless it is contiguous in a file."""
    if isinstance(lazy, Converted):
        base = reshaped(lazy.base, shape)
        return None if base is None else Converted(base, lazy.dtype)
    return Stored(lazy.file, lazy.offset, lazy.dtype, shape) if isinstance(lazy, Stored) else None


def open_piece(piece: Piece, of: str, stored: Callable[[str], LazyTensor]) -> LazyTensor:
    """Return the piece, to be read in ranges; a view that is not a box of its tensors is read at once.

    Args:
        of: the stored tensor that it is a view of, unless it is joined.
        stored: opens a stored tensor.

    Raises:
        CheckpointError: the piece does not lie inside what it is a view of.
    """
    if piece.joined is None and not of:
        return InMemory(torch.zeros(piece.shape, dtype=torch.bool))  # the least of dtypes
    if piece.joined is None:
        whole = stored(of)
    else:
        parts = [open_piece(part, part.name, stored) for part in piece.joined.parts]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        whole = Joined([part if part.dtype == dtype else Converted(part, dtype) for part in parts], piece.joined.dim)
    part = lazy_view(whole, piece.shape, piece.stride, piece.offset)
    if part is not None:
        return part
    try:
        return InMemory(piece.of(whole.read()).clone())
    except RuntimeError as error:
        raise CheckpointError(f"the manifest describes {piece.name} wrongly: {error}") from error

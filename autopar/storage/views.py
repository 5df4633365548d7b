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
from autopar.storage.lazy_tensor import Box, InMemory, Joined, LazyTensor, Stored, whole_box, with_range

__all__ = [
    "Converted",
    "Narrowed",
    "Permuted",
    "Squeezed",
    "Unsqueezed",
    "lazy_view",
    "open_piece",
    "reshaped",
]


class View(LazyTensor):
    """A view: the elements of ``base``, or some of them."""

    base: LazyTensor

    def files(self) -> Iterator[RangeFile]:
        return self.base.files()


class Narrowed(View):
    """The range ``[start, stop)`` of ``base`` along ``dim``."""

    def __init__(self, base: LazyTensor, dim: int, start: int, stop: int) -> None:
        super().__init__((*base.shape[:dim], stop - start, *base.shape[dim + 1 :]), base.dtype)
        self.base, self.dim, self.start = base, dim, start

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        low, high = box[self.dim]
        self.base.read_into(out, with_range(box, self.dim, (low + self.start, high + self.start)))

    def mapped(self, box: Box) -> torch.Tensor | None:
        low, high = box[self.dim]
        return self.base.mapped(with_range(box, self.dim, (low + self.start, high + self.start)))


class Permuted(View):
    """``base`` with its dims in the order ``dims``, as ``Tensor.permute`` has them."""

    def __init__(self, base: LazyTensor, dims: Sequence[int]) -> None:
        super().__init__([base.shape[dim] for dim in dims], base.dtype)
        self.base, self.dims = base, tuple(dims)

    def slabs(self, limit: int) -> Iterator[Box]:
        """Yield one box: a part of its rows lies in every row of ``base``."""
        yield whole_box(self.shape)

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        back = [self.dims.index(dim) for dim in range(len(self.dims))]
        self.base.read_into(out.permute(back), tuple(box[dim] for dim in back))


class Unsqueezed(View):
    """``base`` with a dim of size 1 at ``dim``."""

    def __init__(self, base: LazyTensor, dim: int) -> None:
        super().__init__((*base.shape[:dim], 1, *base.shape[dim:]), base.dtype)
        self.base, self.dim = base, dim

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        if box[self.dim] == (0, 1):
            self.base.read_into(out.squeeze(self.dim), (*box[: self.dim], *box[self.dim + 1 :]))


class Squeezed(View):
    """``base`` without ``dim``, whose size is 1."""

    def __init__(self, base: LazyTensor, dim: int) -> None:
        super().__init__((*base.shape[:dim], *base.shape[dim + 1 :]), base.dtype)
        self.base, self.dim = base, dim

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        self.base.read_into(out.unsqueeze(self.dim), (*box[: self.dim], (0, 1), *box[self.dim :]))


class Converted(View):
    """``base`` in another dtype."""

    def __init__(self, base: LazyTensor, dtype: torch.dtype) -> None:
        super().__init__(base.shape, dtype)
        self.base = base

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
    sizes = {dim_of.get(step, -1): size for size, step in zip(shape, stride, strict=True) if size != 1}
    if -1 in sizes or len(sizes) != sum(size != 1 for size in shape):
        return None
    result = full
    for dim, start in enumerate(starts):
        size = sizes.get(dim, 1)
        if start + size > full.shape[dim]:
            return None
        if size != full.shape[dim]:
            result = Narrowed(result, dim, start, start + size)
    for dim in reversed(range(len(starts))):
        if dim not in sizes:
            result = Squeezed(result, dim)
    kept = sorted(sizes)
    order = [kept.index(dim) for dim in sizes]
    if order != sorted(order):
        result = Permuted(result, order)
    for dim, size in enumerate(shape):
        if size == 1:
            result = Unsqueezed(result, dim)
    return result


def reshaped(lazy: LazyTensor, shape: Sequence[int]) -> LazyTensor | None:
    """Return the tensor with dims split or folded; None unless it is contiguous in a file."""
    if isinstance(lazy, Converted):
        base = reshaped(lazy.base, shape)
        return None if base is None else Converted(base, lazy.dtype)
    return Stored(lazy.file, lazy.offset, lazy.dtype, shape) if isinstance(lazy, Stored) else None


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
    part = lazy_view(whole, piece.shape, piece.stride, piece.offset)
    if part is not None:
        return part
    try:
        return InMemory(piece.of(whole.read()).clone())
    except RuntimeError as error:
        raise CheckpointError(f"the manifest describes {piece.name} wrongly: {error}") from error

"""Lazy tensors: tensors in files, read in ranges.

A rank that loads a model requests ``[start, stop)`` ranges along each dim. Exactly these bytes are read, directly into
their destination if it has the dtype of the file and is on the CPU.

    LazyTensor
    ├── Stored       bytes of a contiguous tensor in a file
    ├── Joined       several tensors concatenated along a dim (the shards of a checkpoint, stacked experts)
    ├── Mapped       a tensor in a mapped file; InMemory: in memory
    ├── View         slices, dims in another order, dims of size 1
    ├── Reshaped     dims split or folded
    └── Converted    another dtype

A piece is a tensor that ``save_pretrained`` writes in place of a stored tensor (one of stacked experts, a fused
projection).
"""

from __future__ import annotations

import ctypes
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from autopar.layout import Layout, Range
from autopar.plan.plan import Piece
from autopar.storage.files import RangeFile

Box = tuple[Range, ...]
"""A range ``[start, stop)`` for each dim."""

_BOUNCE = 1 << 24  # bytes that are converted or moved to a GPU at a time


class LazyTensor(ABC):
    """A tensor that is read in boxes. ``bases``: the lazy tensors that it is made of."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, bases: Iterable[LazyTensor] = ()) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.bases = tuple(bases)

    @abstractmethod
    def read_into(self, out: torch.Tensor, box: Box) -> None:
        """Write the elements of ``box`` into ``out``, a tensor of the box's shape and any dtype, device and strides."""

    def files(self) -> Iterator[RangeFile]:
        """Yield the files that hold its bytes, possibly repeated."""
        for base in self.bases:
            yield from base.files()

    def slabs(self, limit: int) -> Iterator[Box]:
        """Split the tensor into boxes of about ``limit`` bytes, in the order of its elements."""
        return _slabs(self.shape, self.dtype.itemsize, limit)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Read the elements of ``box`` (all of them by default) into a new contiguous tensor on the CPU."""
        box = full_box(self.shape) if box is None else box
        out = torch.empty([stop - start for start, stop in box], dtype=self.dtype, device="cpu")
        self.read_into(out, box)
        return out

    def check_shape(self, out: torch.Tensor) -> None:
        """Raise ``ValueError`` if ``out`` does not have this tensor's shape."""
        if tuple(out.shape) != self.shape:
            raise ValueError(f"expected a tensor of the shard's shape {list(self.shape)}, got {list(out.shape)}")


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return tuple((0, size) for size in shape)


def _slabs(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Box]:
    row = math.prod(shape[1:]) * itemsize
    if row <= limit or len(shape) < 2:
        rows = max(1, limit // max(1, row))
        size = shape[0] if shape else 1
        for low in range(0, size, rows):
            yield ((low, min(size, low + rows)), *full_box(shape[1:])) if shape else ()
        return
    for at in range(shape[0]):
        for rest in _slabs(shape[1:], itemsize, limit):
            yield ((at, at + 1), *rest)


def parts_of(box: Box, itemsize: int) -> Iterator[tuple[tuple[slice, ...], Box]]:
    """Split ``box`` into boxes of bounded size; yield the slices of each in a tensor of that box, and the box."""
    for slab in _slabs(tuple(stop - start for start, stop in box), itemsize, _BOUNCE):
        part = tuple((start + low, start + high) for (start, _), (low, high) in zip(box, slab, strict=True))
        yield tuple(slice(low, high) for low, high in slab), part


class Stored(LazyTensor):
    """A contiguous tensor in ``file``, from byte ``offset`` on."""

    def __init__(self, file: RangeFile, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> None:
        super().__init__(shape, dtype)
        self.file = file
        self.offset = offset

    def files(self) -> Iterator[RangeFile]:
        yield self.file

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        if out.numel() == 0:
            return
        inner = self._run_dim(box)  # a run is contiguous in the file and covers the dims from here on
        direct = out.device.type == "cpu" and out.dtype == self.dtype and not out.is_conj() and not out.is_neg()
        if direct and out.detach()[(0,) * inner].is_contiguous():
            self._read_runs(out, box, inner)
            return
        for place, part in parts_of(box, self.dtype.itemsize):  # another dtype, a GPU, or other strides
            buffer = torch.empty([high - low for low, high in part], dtype=self.dtype, device="cpu")
            self._read_runs(buffer, part, self._run_dim(part))
            out[place].copy_(buffer)

    def _run_dim(self, box: Box) -> int:
        return max((dim for dim, wanted in enumerate(box) if wanted != (0, self.shape[dim])), default=0)

    def _read_runs(self, out: torch.Tensor, box: Box, inner: int) -> None:
        size = self.dtype.itemsize
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        start, stop = box[inner] if box else (0, 1)
        length = (stop - start) * (strides[inner] if box else 1) * size
        first = self.offset + sum(low * stride for (low, _), stride in zip(box, strides, strict=True)) * size
        places = [(0, first)]  # offsets of the runs in out and in the file
        for (low, high), there, here in zip(box[:inner], strides, out.stride(), strict=False):
            steps = [(i * here * size, i * there * size) for i in range(high - low)]
            places = [(at + step, offset + further) for at, offset in places for step, further in steps]
        self.file.read_runs(memory(out), places, length)


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory from the first to the last element of a tensor on the CPU, writable.

    ``Tensor.numpy`` would fix the size of the storage, which sharded data parallelism resizes later.
    """
    if tensor.numel() == 0:
        return memoryview(bytearray())
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    raw = (ctypes.c_char * (span * tensor.element_size())).from_address(tensor.data_ptr())
    return memoryview(raw).cast("B")


class Joined(LazyTensor):
    """The concatenation of ``parts`` along ``dim``; the other sizes and the dtypes must be equal."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        super().__init__(shape, parts[0].dtype, parts)
        self.dim = dim

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        start, stop = box[self.dim]
        begin = 0
        for part in self.bases:
            end = begin + part.shape[self.dim]
            low, high = max(start, begin), min(stop, end)
            if low < high:
                wanted = (*box[: self.dim], (low - begin, high - begin), *box[self.dim + 1 :])
                part.read_into(out.narrow(self.dim, low - start, high - low), wanted)
            begin = end


class Mapped(LazyTensor):
    """A tensor in a file that is mapped into memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor = tensor.detach()

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        if out.numel():  # a shard of FSDP2 without columns has no rows either
            out.copy_(self.tensor[tuple(slice(start, stop) for start, stop in box)])


class InMemory(Mapped):
    """A tensor in memory."""


@torch.no_grad()
def read_shard(lazy: LazyTensor, layout: Layout | None, rank: int, out: torch.Tensor) -> None:
    """Read the shard of ``rank`` by ``layout`` (None: all) into ``out``. Raises ``ValueError`` for a wrong shape."""
    shard = lazy_shard(lazy, layout, rank)
    shard.check_shape(out)
    shard.read_into(out, full_box(shard.shape))


def lazy_shard(lazy: LazyTensor, layout: Layout | None, rank: int) -> LazyTensor:
    """Return the shard of ``rank``; all of ``lazy`` if the layout is None."""
    if layout is None:
        return lazy
    ranges = layout.ranges(rank) or ((0, 0),)
    return Joined([narrowed(lazy, layout.dim, start, stop) for start, stop in ranges], layout.dim)


# -- views and pieces --------------------------------------------------------------------------------------------------


class View(LazyTensor):
    """Ranges of the dims of ``base``, in any order, with dims of size 1 left out or added.

    Args:
        dims: The dim of ``base`` for each dim; None for an added dim of size 1.
        starts: The beginning of the range in each dim of ``base``; dims that are left out have one element.
    """

    def __init__(
        self, base: LazyTensor, shape: Sequence[int], dims: Sequence[int | None], starts: Sequence[int]
    ) -> None:
        super().__init__(shape, base.dtype, [base])
        self.dims, self.starts = tuple(dims), tuple(starts)
        self._kept = [dim for dim in self.dims if dim is not None]

    def slabs(self, limit: int) -> Iterator[Box]:
        """Split the tensor; with permuted dims into one box only, because each row of ``base`` has a part of it."""
        return super().slabs(limit) if self._kept == sorted(self._kept) else iter((full_box(self.shape),))

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        if out.numel() == 0:
            return
        part = out[tuple(0 if dim is None else slice(None) for dim in self.dims)]
        part = part.permute(sorted(range(part.ndim), key=self._kept.__getitem__))
        for dim in range(len(self.starts)):
            if dim not in self._kept:
                part = part.unsqueeze(dim)
        ranges = {dim: wanted for dim, wanted in zip(self.dims, box, strict=True) if dim is not None}
        pairs = (ranges.get(dim, (0, 1)) for dim in range(len(self.starts)))
        moved = ((start + low, start + high) for start, (low, high) in zip(self.starts, pairs, strict=True))
        self.bases[0].read_into(part, tuple(moved))


def narrowed(base: LazyTensor, dim: int, start: int, stop: int) -> LazyTensor:
    """Return the range ``[start, stop)`` along ``dim``."""
    if (start, stop) == (0, base.shape[dim]):
        return base
    starts = [start if at == dim else 0 for at in range(len(base.shape))]
    return View(base, (*base.shape[:dim], stop - start, *base.shape[dim + 1 :]), range(len(starts)), starts)


def unsqueezed(base: LazyTensor, dim: int) -> View:
    """Return ``base`` with a dim of size 1 at ``dim``."""
    before, after = range(dim), range(dim, len(base.shape))
    return View(base, (*base.shape[:dim], 1, *base.shape[dim:]), [*before, None, *after], [0] * len(base.shape))


class Converted(LazyTensor):
    """``base`` in another dtype."""

    def __init__(self, base: LazyTensor, dtype: torch.dtype) -> None:
        super().__init__(base.shape, dtype, [base])

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        if out.dtype == self.dtype:
            self.bases[0].read_into(out, box)
            return
        between = torch.empty(out.shape, dtype=self.dtype, device="cpu")
        self.bases[0].read_into(between, box)
        out.copy_(between)


def lazy_view(full: LazyTensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> LazyTensor | None:
    """Return a view of a contiguous tensor, by shape, stride and offset in elements, as ranges of its dims.

    Return None if there are no such ranges, because the view skips elements or folds dims.
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


def reshaped(lazy: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    """Return the tensor with dims split or folded."""
    if isinstance(lazy, Converted):
        return Converted(reshaped(lazy.bases[0], shape), lazy.dtype)
    return Stored(lazy.file, lazy.offset, lazy.dtype, shape) if isinstance(lazy, Stored) else Reshaped(lazy, shape)


class Reshaped(LazyTensor):
    """The elements of ``base`` in their order, in another shape.

    In each group of dims that are split or folded together, a read covers the elements from the first to the last one
    that is needed: for example rows and columns of blocks of a weight with a scale per block.
    """

    def __init__(self, base: LazyTensor, shape: Sequence[int]) -> None:
        super().__init__(shape, base.dtype, [base])

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        if out.numel() == 0:
            return
        cover: list[Range] = []  # per dim of the base: the range to read
        spans: list[Range] = []  # per group: the needed range of the elements read
        lengths: list[int] = []  # per group: the number of elements read
        sizes: list[int] = []  # per dim of this tensor: the size of the needed elements
        inner: list[Range] = []  # per dim of this tensor: the needed range
        for old, new in _groups(self.bases[0].shape, self.shape):
            wanted = box[len(sizes) : len(sizes) + len(new)]
            first = next((dim for dim, size in enumerate(new) if size > 1), len(new))
            (low, high), step = wanted[first] if first < len(new) else (0, 1), math.prod(new[first + 1 :])
            sizes += [high - low if dim == first else size for dim, size in enumerate(new)]
            inner += [(0, high - low) if dim == first else one for dim, one in enumerate(wanted)]
            start, stop, begins, rest, single = low * step, high * step, 0, math.prod(old), True
            for size in old:
                rest //= size
                edges = (start // rest % size, (stop - 1) // rest % size + 1) if single else (0, size)
                cover.append(edges)
                single, begins = single and edges[1] - edges[0] == 1, begins + edges[0] * rest
            spans.append((start - begins, stop - begins))
            lengths.append(math.prod(high - low for low, high in cover[len(cover) - len(old) :]))
        read = self.bases[0].read(tuple(cover)).reshape(lengths)
        read = read[tuple(slice(start, stop) for start, stop in spans)].reshape(sizes)
        out.copy_(read[tuple(slice(start, stop) for start, stop in inner)])


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Split the dims of two shapes into the shortest runs with equal numbers of elements."""
    i = j = 0
    while i < len(old) or j < len(new):
        here, there = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (left := math.prod(old[here:i])) != (right := math.prod(new[there:j])):
            i, j = i + (left < right), j + (left > right)
        yield old[here:i], new[there:j]


def open_piece(piece: Piece, of: str, stored: Callable[[str], LazyTensor]) -> LazyTensor:
    """Return a piece as a lazy tensor; a view that is not a box is read at once.

    Args:
        of: The name of the stored tensor of which the piece is a view, unless it is joined.
        stored: A function that opens a stored tensor by name.
    """
    if piece.joined is None and not of:
        return InMemory(torch.zeros(piece.shape, dtype=torch.bool))  # promotes to any other dtype
    if piece.joined is None:
        whole = stored(of)
    else:
        parts = [open_piece(part, part.name, stored) for part in piece.joined.parts]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        whole = Joined([part if part.dtype == dtype else Converted(part, dtype) for part in parts], piece.joined.dim)
    part = lazy_view(whole, piece.shape, piece.stride, piece.offset)
    return InMemory(piece.of(whole.read()).clone()) if part is None else part

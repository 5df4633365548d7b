"""Quantized weights that lie in files as several tensors: a rank reads its part of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from autopar.errors import CheckpointError
from autopar.layout import Layout
from autopar.quantized.stored import StoredWeight
from autopar.storage.files import RangeFile
from autopar.storage.lazy_tensor import Box, LazyTensor, read_shard
from autopar.storage.views import reshaped

_LARGE = ("absmax", "SCB", "qdata", "scale", "zero_point", "weight")  # ends of names


class Packed(LazyTensor):
    """A weight that lies in files as several tensors.

    Attributes:
        parts: by their names after the path of the layer.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Mapping[str, LazyTensor]) -> None:
        super().__init__(shape, dtype)
        self.parts = parts

    def files(self) -> Iterator[RangeFile]:
        for part in self.parts.values():
            yield from part.files()

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        raise CheckpointError("quantized numbers alone are no weight")


def open_packed(
    stored: StoredWeight,
    parts: Mapping[str, LazyTensor],
    shape: tuple[int, int],
    layout: Layout | None,
    device: torch.device,
) -> dict[str, tuple[LazyTensor, tuple[int, int]]]:
    """Return the pieces of a weight as they lie in files, and what one entry of them stands for along each dim.

    Args:
        parts: all tensors of the weight, by their names after the path of the layer.
        shape: of the whole weight.

    Raises:
        ValueError, KeyError: they do not stand for a weight of this shape.
    """
    small = {name: part.read().to(device) for name, part in parts.items() if not name.endswith(_LARGE)}
    found = {}
    for piece, (name, form, block) in stored.open(small, shape, layout).items():
        lazy = parts[name]
        sizes = lazy.shape if form == (-1,) else form
        if math.prod(sizes) != math.prod(lazy.shape):
            raise ValueError(f"{name} has shape {list(lazy.shape)}, a weight of {list(shape)} needs {list(sizes)}")
        viewed = lazy if lazy.shape == tuple(sizes) or not any(block) else reshaped(lazy, sizes)
        if viewed is None:
            raise ValueError(f"{name} is computed of other tensors")
        found[piece] = (viewed, block)
    return found


def read_packed(
    stored: StoredWeight,
    parts: Mapping[str, LazyTensor],
    shape: tuple[int, int],
    layout: Layout | None,
    rank: int,
    device: torch.device,
) -> None:
    """Read the shard of ``rank`` of a quantized weight, all of it if the layout is None or for one rank.

    Args: see :func:`open_packed`.
    """
    layout = None if layout is None or layout.axis_size == 1 else layout
    tensors = {}
    for name, (lazy, block) in open_packed(stored, parts, shape, layout, device).items():
        step = 0 if layout is None else block[layout.dim]
        cut = layout.in_steps(step) if layout is not None and step else None
        due = lazy.shape if cut is None else cut.local_shape(lazy.shape, rank)
        tensors[name] = torch.empty(due, dtype=lazy.dtype, device=device)
        read_shard(lazy, cut, rank, tensors[name])
    stored.take(tensors, layout, rank)

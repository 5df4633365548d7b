"""A weight that is stored in several tensors, none of which has its shape: shard and gather it.

A form lists the tensors that represent the weight, and the layout of their entries along outputs and inputs. Sharding,
gathering, reading and multiplying are the same for all forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.distributed.gloo_collectives import all_reduce
from autopar.errors import CheckpointError
from autopar.layout import Layout
from autopar.storage.lazy_tensor import Box, LazyTensor, read_shard, reshaped
from autopar.stored import StoredWeight
from autopar.swap import replaced
from autopar.tensor_parallel.layers import Column, ParallelLayer, Row
from autopar.tensor_parallel.regions import WeightGradient


class Piece(NamedTuple):
    """One tensor of a stored weight, viewed as ``[out, in, ...]``.

    Attributes:
        block: Number of weight elements per entry, along outputs and inputs; 0 means all elements.
        flat: Number of dims in a file: 1 for ``[n]``, 2 for ``[n, 1]``, 0 for the shape of the tensor.
    """

    tensor: torch.Tensor
    block: tuple[int, int] = (0, 0)
    flat: int = 0


class InFile(NamedTuple):
    """A tensor of a stored weight in the format of ``save_pretrained``.

    Attributes:
        name: Name in the file, after the path of the layer.
        shape: Shape of the view, ``[out, in, ...]``.
        block: Number of elements per entry, as in :attr:`Piece.block`.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]


def largest(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the maximum over the ranks, in place."""
    all_reduce(x, op=dist.ReduceOp.MAX, group=axis.group)
    return x


class QuantizedWeight(StoredWeight):
    """The weight of one linear layer in the form of one library; ``block``: the same as in ``kind``."""

    block: tuple[int, int] = (1, 1)
    _module: Any

    def pieces(self, layout: Layout | None = None) -> dict[str, Piece]:
        """Return the tensors that represent the weight, by name, in a form that ``layout`` can shard."""
        raise NotImplementedError

    def open(
        self, small: Mapping[str, torch.Tensor], shape: tuple[int, int], layout: Layout | None
    ) -> dict[str, InFile]:
        """Return the places of the tensors of a weight in a file, in a form that ``layout`` can shard.

        Args:
            small: Tensors in the file that are identical for all shards, by name.
        """
        raise NotImplementedError

    def files(self, shape: tuple[int, int]) -> dict[str, Piece]:
        """Return the tensors to write for a shard of a weight of this shape, by their names in files."""
        raise NotImplementedError

    def note(self, shape: tuple[int, int]) -> str:
        """Return the note on a weight of this shape for the file header; empty if the tensors suffice."""
        return ""

    def take(self, tensors: dict[str, torch.Tensor], layout: Layout | None, rank: int) -> None:
        """Set the tensors of the shard of ``rank``."""
        rows, columns = self.shape if layout is None else layout.local_shape(self.shape, rank)
        self.put((rows, columns), tensors)

    def put(self, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> None:
        """Replace the tensors of the weight; the parameter stays the same object."""
        raise NotImplementedError

    def fill(self, values: torch.Tensor, layout: Layout | None, axis: Any) -> None:
        """Quantize the local shard of a pending weight to the bytes of the full weight's shard; no layout: in full."""
        raise NotImplementedError

    def layer_class(self, rule: str) -> Any:
        """Return the class of a layer with sharded outputs or inputs."""
        return ColumnParallelStored if rule == "column" else RowParallelStored

    def shard(self, layout: Layout, rank: int) -> None:
        """Keep the shard of ``rank``; raise ValueError if a rank would hold a partial block."""
        tensors = {
            name: layout.in_steps(step).shard(tensor, rank) if (step := block[layout.dim]) else tensor
            for name, (tensor, block, _) in self.pieces(layout).items()
        }
        self.take(tensors, layout, rank)

    def join(self, layout: Layout, axis: Axis) -> None:
        """Gather the full weight: undo :meth:`shard`. A collective of the axis."""
        tensors = {
            name: all_gather(tensor, axis, layout.in_steps(step)) if (step := block[layout.dim]) else tensor
            for name, (tensor, block, _) in self.pieces().items()
        }
        full = list(self.shape)
        full[layout.dim] = layout.size
        self.put((full[0], full[1]), tensors)

    def materialize(self, source: Any, layout: Layout | None, mpu: Any, read: Callable[[], torch.Tensor]) -> None:
        """Read quantized numbers from files, or quantize the local shard of the plain weight."""
        if isinstance(source, Packed):
            rows, columns = source.shape
            self.read(source.parts, (rows, columns), layout, mpu)
        elif layout is None or layout.axis_size == 1:
            self.fill(read(), None, None)
        else:
            self.fill(read(), layout, self._module.tp)

    def located(
        self, parts: Mapping[str, LazyTensor], shape: tuple[int, int], layout: Layout | None, device: torch.device
    ) -> dict[str, tuple[LazyTensor, tuple[int, int]]]:
        """Return the pieces of a weight in files, each with its number of elements per entry.

        Args:
            parts: All tensors of the weight, by name relative to the layer.
            shape: Shape of the full weight.

        Raises:
            ValueError, KeyError: The tensors do not represent a weight of this shape.
        """
        small = {name: part.read().to(device) for name, part in parts.items() if not name.endswith(_LARGE)}
        found = {}
        for piece, (name, form, block) in self.open(small, shape, layout).items():
            lazy = parts[name]
            sizes = lazy.shape if form == (-1,) else form
            if math.prod(sizes) != math.prod(lazy.shape):
                raise ValueError(
                    f"{name} must have shape {list(sizes)} for a weight of {list(shape)}, got {list(lazy.shape)}"
                )
            viewed = lazy if lazy.shape == tuple(sizes) or not any(block) else reshaped(lazy, sizes)
            found[piece] = (viewed, block)
        return found

    def read(self, parts: Mapping[str, LazyTensor], shape: tuple[int, int], layout: Layout | None, mpu: Any) -> None:
        """Read the local shard; with a layout of None or of one rank the full weight. See :meth:`located`."""
        layout = None if layout is None or layout.axis_size == 1 else layout
        tensors = {}
        for name, (lazy, block) in self.located(parts, shape, layout, mpu.device).items():
            step = 0 if layout is None else block[layout.dim]
            cut = layout.in_steps(step) if layout is not None and step else None
            due = lazy.shape if cut is None else cut.local_shape(lazy.shape, mpu.shards.rank)
            tensors[name] = torch.empty(due, dtype=lazy.dtype, device=mpu.device)
            read_shard(lazy, cut, mpu.shards.rank, tensors[name])
        self.take(tensors, layout, mpu.shards.rank)


_LARGE = ("absmax", "SCB", "qdata", "scale", "zero_point", "weight")  # name endings of sharded tensors


class Packed(LazyTensor):
    """A weight that is stored in files as several tensors; ``parts``: the tensors by name relative to the layer."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Mapping[str, LazyTensor]) -> None:
        super().__init__(shape, dtype, parts.values())
        self.parts = parts

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        raise CheckpointError("a quantized weight cannot be read as a plain tensor")


class StoredProduct(ParallelLayer):
    """Mixin for a parallel layer that multiplies by the forward of the weight's library."""

    _weight_gradient: WeightGradient | None = None  # the weight is frozen

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with replaced(self._parameters, {"bias": bias}):
            y: torch.Tensor = super(ParallelLayer, self).forward(x)  # type: ignore[misc]
        return y


class ColumnParallelStored(StoredProduct, Column):
    """A linear layer with a quantized weight and sharded output features."""


class RowParallelStored(StoredProduct, Row):
    """A linear layer with a quantized weight and sharded input features."""

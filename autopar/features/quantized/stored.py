"""A weight that is stored in several tensors, none of which has its shape: shards of it, and the full weight again.

A form says which tensors stand for the weight, and how their entries lie along its outputs and inputs. Sharding,
joining, reading and multiplying are the same for all forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.distributed.gloo_collectives import all_reduce
from autopar.errors import CheckpointError, ConfigError
from autopar.layout import Layout
from autopar.plan.matching import RuleMatch
from autopar.storage.lazy_tensor import Box, InMemory, LazyTensor, read_shard, reshaped
from autopar.stored import Kind, StoredWeight
from autopar.tensor_parallel.layers import Column, ParallelLayer, Row
from autopar.tensor_parallel.regions import WeightGradient


class Piece(NamedTuple):
    """One tensor of a stored weight, viewed with a dim for the outputs and one for the inputs, ``[out, in, ...]``.

    Attributes:
        block: Elements of the weight per entry, along each of the two dims; 0 stands for all elements.
        flat: Number of dims in a file: 1 for ``[n]``, 2 for ``[n, 1]``; 0 for the tensor's own shape.
    """

    tensor: torch.Tensor
    block: tuple[int, int] = (0, 0)
    flat: int = 0


class InFile(NamedTuple):
    """A tensor of a stored weight as ``save_pretrained`` writes it.

    Attributes:
        name: Name in the file, after the path of the layer.
        shape: Shape of the view, ``[out, in, ...]``.
        block: Elements per entry, as :attr:`Piece.block`.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]


@dataclass(frozen=True)
class QuantizedKind(Kind):
    """A form of quantized weights, before there are any.

    Attributes:
        parts: Function that returns the bytes of a rank's shard of a weight of this shape, with its scales; the layout
            of a replicated weight is None.
        config: Function that makes transformers' ``quantization_config``, where the name alone determines it.
    """

    parts: Callable[[tuple[int, int], Layout | None, int], int]
    config: Callable[[], Any] | None = None

    def nbytes(self, shape: tuple[int, int], layout: Layout | None, rank: int) -> int:
        """Return the bytes of a rank's shard of a weight of this shape, with its scales."""
        return self.parts(shape, layout if layout is not None and layout.axis_size > 1 else None, rank)

    def check(self, shown: str, shape: torch.Size, layout: Layout, match: RuleMatch) -> None:
        """Raise ConfigError if a rank would hold part of a block, or too few inputs of a layer that quantizes them."""
        if layout.axis_size == 1:
            return
        step, dim, table = self.block[layout.dim], layout.dim, match.scope.table
        what = f"tensor_parallel_size={table.size} does not fit {shown}: its weight ({self.form}) has"
        if shape[1] % self.block[1]:
            raise ConfigError(f"{what} {shape[1]} inputs, no whole number of blocks of {self.block[1]}.")

        def fits(size: int) -> bool:
            try:
                other = table.of_experts(size).layout(
                    match.rule.parts, dim, layout.size, shown, match.rule.where, match.scope.block
                )
                return other.in_steps(step) is not None
            except (ConfigError, ValueError):
                return False

        sizes = [layout.local_size(rank) for rank in range(layout.axis_size)]
        try:
            layout.in_steps(step)
        except ValueError:
            others = [size for size in range(2, 2 * table.size) if size != table.size and fits(size)]
            raise ConfigError(
                f"{what} blocks of {step} inputs, and ranks would hold {sizes} of {layout.size}.\n"
                f"  Sizes that fit this layer: {', '.join(map(str, [1, *others]))}."
            ) from None
        if self.takes_rows and dim == 1 and match.rule.kind in ("sharded", "norm_over"):
            raise ConfigError(
                f"tensor_parallel_size={layout.axis_size} does not fit {shown}: its weight ({self.form}) is "
                f"'sharded' inside a region, where ranks\n  would hold {sizes} of {layout.size} inputs, and its layer "
                f"quantizes them with one scale for all ({match.rule.where}).\n  Make it a 'row', quantize it in 4 "
                "bits, or leave it out of the quantization."
            )


def largest(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the maximum over the ranks, in place."""
    all_reduce(x, op=dist.ReduceOp.MAX, group=axis.group)
    return x


class QuantizedWeight(StoredWeight):
    """The weight of one linear layer in the form of one library; ``block`` as in its :class:`Kind`."""

    block: tuple[int, int] = (1, 1)
    _module: Any

    def pieces(self, layout: Layout | None = None) -> dict[str, Piece]:
        """Return the tensors that stand for the weight, by name, in a form that ``layout`` can shard."""
        raise NotImplementedError

    def open(
        self, small: Mapping[str, torch.Tensor], shape: tuple[int, int], layout: Layout | None
    ) -> dict[str, InFile]:
        """Return the places of the tensors of a weight in a file, in a form that ``layout`` can shard.

        Args:
            small: Tensors of the file that are identical for all shards, by their names there.
        """
        raise NotImplementedError

    def files(self, shape: tuple[int, int]) -> dict[str, Piece]:
        """Return the tensors for files of a shard of a weight of this shape, by their names there."""
        raise NotImplementedError

    def note(self, shape: tuple[int, int]) -> str:
        """Return the note on a weight of this shape in the head of a file; empty if its tensors suffice."""
        return ""

    def take(self, tensors: dict[str, torch.Tensor], layout: Layout | None, rank: int) -> None:
        """Take the shard of ``rank`` of a full weight's pieces."""
        rows, columns = self.shape if layout is None else layout.local_shape(self.shape, rank)
        self.put((rows, columns), tensors)

    def put(self, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> None:
        """Replace the tensors of the weight; the parameter stays the same object."""
        raise NotImplementedError

    def fill(self, values: torch.Tensor, layout: Layout | None, axis: Any) -> None:
        """Quantize this rank's shard, or without a layout the full weight, of a pending one, to the same bytes."""
        raise NotImplementedError

    def layer_class(self, rule: str) -> Any:
        """Return the class of a layer with sharded outputs or inputs."""
        return ColumnParallelStored if rule == "column" else RowParallelStored

    def shard(self, layout: Layout, rank: int) -> None:
        """Keep the shard of ``rank``; raise ValueError if a rank would hold part of a block."""
        tensors = {
            name: layout.in_steps(step).shard(tensor, rank) if (step := block[layout.dim]) else tensor
            for name, (tensor, block, _) in self.pieces(layout).items()
        }
        self.take(tensors, layout, rank)

    def join(self, layout: Layout, axis: Axis) -> None:
        """Undo :meth:`shard`."""
        tensors = {
            name: all_gather(tensor, axis, layout.in_steps(step)) if (step := block[layout.dim]) else tensor
            for name, (tensor, block, _) in self.pieces().items()
        }
        whole = list(self.shape)
        whole[layout.dim] = layout.size
        self.put((whole[0], whole[1]), tensors)

    def materialize(self, source: Any, layout: Layout | None, mpu: Any, read: Callable[[], torch.Tensor]) -> None:
        """Read the numbers from files that hold them, or quantize this rank's shard of the plain weight."""
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
        """Return the pieces of a weight in files, each with the elements per entry.

        Args:
            parts: All tensors of the weight, by their names after the path of the layer.
            shape: Shape of the full weight.

        Raises:
            ValueError, KeyError: The tensors do not stand for a weight of this shape.
        """
        small = {name: part.read().to(device) for name, part in parts.items() if not name.endswith(_LARGE)}
        found = {}
        for piece, (name, form, block) in self.open(small, shape, layout).items():
            lazy = parts[name]
            sizes = lazy.shape if form == (-1,) else form
            if math.prod(sizes) != math.prod(lazy.shape):
                raise ValueError(f"{name} has shape {list(lazy.shape)}, a weight of {list(shape)} needs {list(sizes)}")
            viewed = lazy if lazy.shape == tuple(sizes) or not any(block) else reshaped(lazy, sizes)
            if viewed is None and name in small:
                viewed = InMemory(small[name].cpu().view(sizes))
            if viewed is None:
                raise ValueError(f"{name} is computed of other tensors")
            found[piece] = (viewed, block)
        return found

    def read(self, parts: Mapping[str, LazyTensor], shape: tuple[int, int], layout: Layout | None, mpu: Any) -> None:
        """Read this rank's shard, or the full weight if the layout is None or for one rank. See :meth:`located`."""
        layout = None if layout is None or layout.axis_size == 1 else layout
        tensors = {}
        for name, (lazy, block) in self.located(parts, shape, layout, mpu.device).items():
            step = 0 if layout is None else block[layout.dim]
            cut = layout.in_steps(step) if layout is not None and step else None
            due = lazy.shape if cut is None else cut.local_shape(lazy.shape, mpu.shards.rank)
            tensors[name] = torch.empty(due, dtype=lazy.dtype, device=mpu.device)
            read_shard(lazy, cut, mpu.shards.rank, tensors[name])
        self.take(tensors, layout, mpu.shards.rank)


_LARGE = ("absmax", "SCB", "qdata", "scale", "zero_point", "weight")  # ends of names of tensors that are sharded


class Packed(LazyTensor):
    """A weight that lies in files as several tensors, ``parts``, by their names after the path of the layer."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Mapping[str, LazyTensor]) -> None:
        super().__init__(shape, dtype, parts.values())
        self.parts = parts

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        raise CheckpointError("quantized numbers alone are no weight")


class StoredProduct(ParallelLayer):
    """A mixin before the column- or row-parallel layer, which is before the class of the weight's library."""

    _weight_gradient: WeightGradient | None = None  # the weight is frozen

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        own, kept = self._parameters, self._parameters["bias"]
        own["bias"] = bias
        try:
            y: torch.Tensor = super(ParallelLayer, self).forward(x)  # type: ignore[misc]
        finally:
            own["bias"] = kept
        return y


class ColumnParallelStored(StoredProduct, Column):
    """A linear layer with a quantized weight and its output features sharded."""


class RowParallelStored(StoredProduct, Row):
    """A linear layer with a quantized weight and its input features sharded."""

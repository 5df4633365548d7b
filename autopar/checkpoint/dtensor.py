"""The state of a parallelized model as DTensors, for ``torch.distributed.checkpoint``.

A DTensor describes a shard by one range, as ``torch.chunk`` splits: rank 0 first, all but the last ones equally long.
Where a layout says the same it becomes that ``Shard(dim)``. Elsewhere (a fused ``q | k | v``, heads that do not divide,
replicated KV heads) the DTensor's local tensor is a :class:`_RangesShard`, which implements the protocol that
``torch.distributed.checkpoint`` asks of a tensor: what to write, what to read, and into which memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.checkpoint.state import local_tensors, state_of
from autopar.errors import CheckpointError
from autopar.foreign.tensors import TO_COPY, disabled_torch_function, wrapper_subclass
from autopar.layout import Layout, Range

_aten = torch.ops.aten


def to_dtensor_state_dict(model: nn.Module, *, aliases: bool = False) -> dict[str, DTensor]:
    """Return the tensors of a parallelized model as DTensors, under the names of the plain model's state dict.

    ``torch.distributed.checkpoint.save`` and ``async_save`` write whole logical tensors: the result loads on any number
    of ranks, and ``dcp_to_torch_save`` turns it into the plain model's state dict. The values share memory with the
    model, so ``torch.distributed.checkpoint.load`` into the dict fills the model in place (with an optimizer:
    :func:`~autopar.checkpoint.dtensor_optimizer.to_dtensor_training_state`)::

        state = to_dtensor_state_dict(model)
        torch.distributed.checkpoint.load(state, checkpoint_id="folder")

    Every layout can be expressed. Tensors that are sharded as DTensor itself does it are ordinary ``Shard(dim)``; for
    the others (fused projections, heads that do not divide, replicated KV heads) only saving and loading work, and
    computing with them, ``full_tensor()`` included, is an error. torch's ``HuggingFaceStorageWriter`` silently writes
    wrong values for tensors of which a rank holds several ranges: for files in Hugging Face's form use
    ``save_parallelized(..., merge_checkpoints=True)``.

    Args:
        model: the parallelized model.
        aliases: list tied tensors under each of their names, as ``model.state_dict()`` does; otherwise under the one
            that ``save_pretrained`` keeps.

    Raises:
        CheckpointError: if the model is not parallelized, or no longer the one that was.
    """
    state = state_of(model)
    mesh, rank = state.mpu.shards_mesh, state.mpu.shards.rank
    result: dict[str, DTensor] = {}
    for name, tensor in local_tensors(model).items():
        plan = state.plan.tensors[name]
        result[name] = as_dtensor(tensor.detach(), plan.shape, plan.layout, mesh, rank)
        if aliases:
            result |= dict.fromkeys(plan.aliases, result[name])
    return result


def as_dtensor(
    local: torch.Tensor, shape: Sequence[int], layout: Layout | None, mesh: DeviceMesh, rank: int
) -> DTensor:
    if layout is None:
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    if not is_even_shard(layout):
        local = _RangesShard(local, layout, rank)
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(layout.dim)], run_check=False, shape=torch.Size(shape), stride=stride)


def is_even_shard(layout: Layout) -> bool:
    """Tell whether every rank holds the range that DTensor's ``Shard(dim)`` gives it."""
    size, each = layout.size, -(-layout.size // layout.axis_size)
    bounds = [min(rank * each, size) for rank in range(layout.axis_size + 1)]
    due = [((start, stop),) if start < stop else () for start, stop in itertools.pairwise(bounds)]
    return due == [layout.ranges(rank) for rank in range(layout.axis_size)]


def disjoint_ranges(layout: Layout, rank: int) -> tuple[Range, ...]:
    """Split :meth:`Layout.ranges` so that any two ranges of any two ranks are equal or disjoint.

    ``torch.distributed.checkpoint`` writes equal ranges once and refuses those that overlap otherwise.
    """
    if not layout.replicated:
        return layout.ranges(rank)
    bounds = sorted({bound for r in range(layout.axis_size) for held in layout.ranges(r) for bound in held})
    return tuple(
        part
        for start, stop in layout.ranges(rank)
        for part in itertools.pairwise([start, *(bound for bound in bounds if start < bound < stop), stop])
    )


class _RangesShard(torch.Tensor):
    """A shard made of several ranges of the stored tensor, as far as ``torch.distributed.checkpoint`` needs it.

    It has the shape of the shard, shares its memory, and implements torch's ``_Checkpointable`` protocol.

    Args:
        local: the shard.
        layout: of the stored tensor.
        rank: on the layout's axis.
    """

    _local: torch.Tensor
    _layout: Layout
    _rank: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: Layout, rank: int) -> _RangesShard:
        """Wrap ``local``; nothing is copied."""
        shard = wrapper_subclass(cls, local.shape, strides=local.stride(), dtype=local.dtype, device=local.device)
        shard._local, shard._layout, shard._rank = local, layout, rank
        return shard

    def __init__(self, local: torch.Tensor, layout: Layout, rank: int) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        ranges = disjoint_ranges(self._layout, self._rank)
        return f"{type(self).__name__}(dim {self._layout.dim}: {ranges}, {self._local!r})"

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _RangesShard:
        """Support what making the DTensor and copying it to another memory (``async_save``) need, and nothing else."""
        operation, options = func.overloadpacket, dict(kwargs or {})
        if isinstance(args[0], _RangesShard):
            self = args[0]
            if operation in (_aten.detach, _aten.alias, _aten.clone, TO_COPY):
                return cls(func(self._local, *args[1:], **options), self._layout, self._rank)
            if operation is _aten.view and tuple(args[1]) == tuple(self.shape):
                return cls(self._local.view_as(self._local), self._layout, self._rank)
            if operation is _aten.new_empty:  # DTensor asks for the size of its own shard
                return cls(torch.empty_like(self._local, **options), self._layout, self._rank)
        raise CheckpointError(
            f"{operation} on a DTensor that is not sharded as DTensor shards (a fused, uneven or replicated layout): "
            "it can only be saved and loaded with torch.distributed.checkpoint\n"
            "  For whole tensors use save_parallelized(..., merge_checkpoints=True), or dcp_to_torch_save afterwards."
        )

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """Return the ranges: their place in the stored tensor, and a view of the memory."""
        dim, result, offset = self._layout.dim, [], 0
        for start, stop in disjoint_ranges(self._layout, self._rank):
            view = self._local.narrow(dim, offset, stop - start)
            place = [0] * view.ndim
            place[dim] = start
            result.append((ChunkStorageMetadata(offsets=torch.Size(place), sizes=view.shape), view))
            offset += stop - start
        return result

    def __create_write_items__(self, fqn: str, object: torch.Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=object.size()),
            )
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for chunk, view in self._chunks():
            if chunk.offsets == index.offset:
                return view
        raise ValueError(f"{index.fqn} has no range at {index.offset} on rank {self._rank}")

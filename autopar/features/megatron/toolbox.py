"""Megatron-LM's mappings between replicated, sharded and partial activations, its splits, and ``broadcast_data``.

| function                                        | forward               | backward                          |
|-------------------------------------------------|-----------------------|-----------------------------------|
| ``copy_to_tensor_model_parallel_region``        | identity              | all-reduce                        |
| ``reduce_from_tensor_model_parallel_region``    | all-reduce            | identity                          |
| ``scatter_to_tensor_model_parallel_region``     | keep own of last dim  | all-gather last dim               |
| ``gather_from_tensor_model_parallel_region``    | all-gather last dim   | keep own of last dim              |
| ``scatter_to_sequence_parallel_region``         | keep own of sequence  | all-gather sequence               |
| ``gather_from_sequence_parallel_region``        | all-gather sequence   | reduce-scatter, or keep own       |
| ``reduce_scatter_to_sequence_parallel_region``  | reduce-scatter        | all-gather sequence               |
| ``all_to_all``                                  | all-to-all of rows    | all-to-all, splits swapped        |

They follow ``megatron/core/tensor_parallel/mappings.py`` and ``utils.py``, and use
:mod:`autopar.distributed.collectives`. ``group`` is a process group or an MPU. The sequence is dim 0, as in Megatron;
``dim=1`` is for models with the batch first. No function changes its input. Sizes that are not divisible raise
ConfigError on every rank before anything is sent (Megatron truncates silently).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.distributed import collectives
from autopar.distributed.axis import Axis, Group, axis_of, device_of
from autopar.distributed.collectives import even_layout
from autopar.errors import ConfigError, nearest, type_and_text
from autopar.layout import Range, even_shards

Dtypes = torch.dtype | Mapping[Any, torch.dtype]


Spec = tuple[int | str, torch.dtype, tuple[int, ...]]
"""Key, dtype and shape of a tensor to receive."""


def copy_to_tensor_model_parallel_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Copy into a sharded region (Megatron's f): ``[...]`` Replicate -> the same, whose Partial gradient is summed."""
    return collectives.copy(x, axis_of(group))


def reduce_from_tensor_model_parallel_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All-reduce (Megatron's g): ``[...]`` Partial -> Replicate; the gradient is unchanged."""
    return collectives.reduce(x, axis_of(group))


def scatter_to_tensor_model_parallel_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Keep the local shard: ``[..., n]`` Replicate -> ``[..., n/tp]`` Shard(-1)."""
    return _scatter(x, group, -1, "last dim")


def gather_from_tensor_model_parallel_region(x: torch.Tensor, group: Group, *, size: int | None = None) -> torch.Tensor:
    """All-gather ``[..., n/tp]`` Shard(-1) -> ``[..., n]`` Replicate.

    Args:
        size: Full width ``n`` for uneven shards (logits of a vocabulary of 50257); None if all ranks have the same
            width.
    """
    return _gather(x, group, -1, size)


def scatter_to_sequence_parallel_region(x: torch.Tensor, group: Group, *, dim: int = 0) -> torch.Tensor:
    """Keep the local shard: ``[seq, ...]`` Replicate -> ``[seq/tp, ...]`` Shard(dim)."""
    return _scatter(x, group, dim, "sequence dim")


def gather_from_sequence_parallel_region(
    x: torch.Tensor, tensor_parallel_output_grad: bool = True, group: Group | None = None, *, dim: int = 0
) -> torch.Tensor:
    """All-gather ``[seq/tp, ...]`` Shard(dim) -> ``[seq, ...]`` Replicate.

    Args:
        tensor_parallel_output_grad: True if the result enters a sharded region: its gradient is Partial, and backward
            is a reduce-scatter. False: the gradient is Replicate, and backward keeps the local shard.
    """
    axis = axis_of(group)
    return collectives.gather_sum(x, axis, dim) if tensor_parallel_output_grad else _gather(x, axis, dim)


def reduce_scatter_to_sequence_parallel_region(x: torch.Tensor, group: Group, *, dim: int = 0) -> torch.Tensor:
    """Reduce-scatter ``[seq, ...]`` Partial -> ``[seq/tp, ...]`` Shard(dim)."""
    axis = axis_of(group)
    check_divides(x.shape[dim], axis, "sequence dim")
    return collectives.reduce_scatter(x, axis, dim)


def all_to_all(
    group: Group,
    x: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
) -> torch.Tensor:
    """Exchange rows, such as tokens for experts: ``[rows, ...] -> [sum(output_split_sizes), ...]``.

    Args:
        output_split_sizes: Numbers of rows from each rank; None for even splits.
        input_split_sizes: Numbers of rows of ``x`` for each rank; None for even splits.
    """
    axis = axis_of(group)
    for name, splits in (("output_split_sizes", output_split_sizes), ("input_split_sizes", input_split_sizes)):
        if splits is None:
            check_divides(x.shape[0], axis, f"dim 0 (without {name})")
        elif len(splits) != axis.size:
            raise ConfigError(f"{name} must have {axis.size} entries, one per rank, got {splits}")
    if input_split_sizes is not None and sum(input_split_sizes) != x.shape[0]:
        raise ConfigError(
            f"input_split_sizes must add up to the {x.shape[0]} rows of dim 0, got {input_split_sizes} with sum "
            f"{sum(input_split_sizes)}"
        )
    return collectives.all_to_all(x, axis, output_split_sizes, input_split_sizes)


def _scatter(x: torch.Tensor, group: Group, dim: int, what: str) -> torch.Tensor:
    axis = axis_of(group)
    check_divides(x.shape[dim], axis, what)
    return collectives.scatter(x, axis, even_layout(x.shape[dim], axis.size), dim)


def _gather(x: torch.Tensor, group: Group, dim: int, size: int | None = None) -> torch.Tensor:
    axis = axis_of(group)
    layout = even_layout(x.shape[dim] * axis.size if size is None else size, axis.size)
    if layout.local_size(axis.rank) != x.shape[dim]:
        raise ConfigError(
            f"expected {layout.local_size(axis.rank)} of {size} elements in dim {dim} on rank {axis.rank} of "
            f"{axis.size}, got {x.shape[dim]}"
        )
    return collectives.gather(x, axis, layout, dim)


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Split ``[..., n] -> num_partitions x [..., n/num_partitions]``, as views or as contiguous copies."""
    if num_partitions < 1 or tensor.shape[-1] % num_partitions:
        raise ConfigError(f"last dim of size {tensor.shape[-1]} must be divisible into {num_partitions} partitions")
    chunks = tensor.tensor_split(num_partitions, dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else tuple(chunks)


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Keep the local elements, ``[...]`` Replicate -> ``[numel/tp]`` Shard(0); a view if possible."""
    axis = axis_of(group)
    each = check_divides(tensor.numel(), axis, "flat tensor")
    return tensor.reshape(-1).narrow(0, axis.rank * each, each)


def gather_split_1d_tensor(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """All-gather the result of :func:`split_tensor_into_1d_equal_chunks`: elements in rank order, ``[numel * tp]``."""
    with torch.no_grad():
        return _gather(tensor.reshape(-1), group, 0)


def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> Range:
    """Return the vocabulary rows ``[first, last)`` of ``rank``; uneven if needed (50257 over 2: 25129, 25128)."""
    return even_shards(global_vocab_size, world_size)[rank]


def vocab_range_from_per_partition_vocab_size(per_partition_vocab_size: int, rank: int, world_size: int) -> Range:
    """Return the vocabulary rows ``[first, last)`` of ``rank`` if all ``world_size`` ranks have equally many rows."""
    return vocab_range_from_global_vocab_size(per_partition_vocab_size * world_size, rank, world_size)


class VocabUtility:
    """Megatron's class with the two functions above."""

    vocab_range_from_global_vocab_size = staticmethod(vocab_range_from_global_vocab_size)
    vocab_range_from_per_partition_vocab_size = staticmethod(vocab_range_from_per_partition_vocab_size)


def check_divides(size: int, axis: Axis, what: str) -> int:
    """Return ``size / axis.size``; raise ConfigError on every rank if it is not an integer."""
    if size % axis.size:
        raise ConfigError(f"{what} of size {size} must be divisible by {axis.size} ranks ({axis.name} axis)")
    return size // axis.size


def broadcast_data(
    keys: Iterable[int | str], data: Mapping[Any, Any] | None, dtype: Dtypes, group: Group
) -> dict[int | str, torch.Tensor]:
    """Broadcast the tensors of the first rank of ``group`` to all its ranks.

    It follows ``megatron/core/tensor_parallel/data.py``, with three differences. The data of the first rank is checked
    before the first collective, so bad data raises on all ranks instead of hanging. Tensors may have any number of
    dims. Each key may have a different dtype. Tensors are sent as bytes, because gloo does not support float8.

    Args:
        keys: Keys of ``data`` to send, int or str; the keys of the first rank count.
        data: Batch on the first rank, on any device; ignored on the other ranks.
        dtype: Dtype of every tensor, or a mapping from keys to dtypes.
        group: A process group or an MPU (its tensor-parallel group).

    Returns:
        ``{key: tensor}`` in the order of the keys, Replicate over the group, on its device (NCCL: this rank's GPU);
        copies with the shapes of the first rank, detached from autograd.

    Raises:
        ConfigError: On the first rank a key is missing, or a value is not a dense tensor of the dtype; on every rank
            of the group.
    """
    axis = axis_of(group)
    device = device_of(axis)
    shared: list[Any] = [None]  # the tensors to receive, or the text of an error
    if axis.rank == 0:
        try:
            shared[0] = [_spec(key, data, dtype) for key in dict.fromkeys(keys)]
        except Exception as error:  # any error must reach the other ranks, which would wait forever
            shared[0] = str(error) if isinstance(error, ConfigError) else type_and_text(error)
    if axis.size > 1:
        dist.broadcast_object_list(shared, group_src=0, group=axis.group)
    if isinstance(shared[0], str):
        raise ConfigError(
            f"broadcast_data: {shared[0]}\n"
            f"(the data of global rank {axis.ranks[0]}, the first of global ranks {list(axis.ranks)})"
        )
    received = {}
    for key, kind, shape in shared[0]:
        x = torch.empty(shape, dtype=kind, device=device)
        if axis.rank == 0:
            assert data is not None
            x.copy_(data[key].detach())
        if x.numel():
            collectives.broadcast(x.view(-1).view(torch.uint8), axis)
        received[key] = x
    return received


def _spec(key: int | str, data: Any, dtype: Any) -> Spec:
    """Return the metadata of a tensor to send; raise ConfigError if ``data`` lacks it or it is another one."""
    if key not in data:
        held = ", ".join(map(repr, data)) or "no key at all"
        raise ConfigError(f"key {key!r} is missing; the data has {held}.{nearest(str(key), map(str, data))}")
    value, wanted = data[key], dtype.get(key) if isinstance(dtype, Mapping) else dtype
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta
    if not dense or value.is_quantized or value.dtype != wanted:
        found = f"{value.dtype}, {value.layout}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(f"data[{key!r}] must be a dense tensor of {wanted} with storage, not {found}")
    return key, value.dtype, tuple(value.shape)

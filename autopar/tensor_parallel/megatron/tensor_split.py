"""Splitting tensors and vocabularies, under Megatron's names (``megatron/core/tensor_parallel/utils.py``). No autograd
across ranks: for that see :mod:`autopar.tensor_parallel.megatron.mappings`."""

from __future__ import annotations

import torch

from autopar.distributed import collectives
from autopar.distributed.axis import Group, axis_of, check_divides
from autopar.distributed.collectives import even_layout
from autopar.errors import ConfigError
from autopar.layout import Range, even_shards

__all__ = [
    "VocabUtility",
    "gather_split_1d_tensor",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
    "vocab_range_from_global_vocab_size",
    "vocab_range_from_per_partition_vocab_size",
]


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """``[..., n] -> num_partitions x [..., n/num_partitions]``: views, or contiguous copies if asked for.

    Raises:
        ConfigError: if ``n`` does not divide.
    """
    if num_partitions < 1 or tensor.shape[-1] % num_partitions:
        raise ConfigError(f"last dim of size {tensor.shape[-1]} does not divide into {num_partitions} partitions")
    chunks = tensor.split(tensor.shape[-1] // num_partitions or 1, dim=-1)
    if tensor.shape[-1] == 0:
        chunks = (tensor,) * num_partitions
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else tuple(chunks)


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """``[...]`` Replicate -> ``[numel/tp]`` Shard(0): this rank's run of the elements; a view where that is possible.

    Raises:
        ConfigError: if the number of elements does not divide.
    """
    axis = axis_of(group)
    each = check_divides(tensor.numel(), axis, "flat tensor")
    return tensor.reshape(-1).narrow(0, axis.rank * each, each)


def gather_split_1d_tensor(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Inverse of :func:`split_tensor_into_1d_equal_chunks`: flat elements of all ranks in rank order, ``[numel * tp]``.

    Every rank brings the same number of elements.
    """
    axis = axis_of(group)
    with torch.no_grad():
        flat = tensor.reshape(-1)
        return collectives.gather(flat, axis, even_layout(flat.numel() * axis.size, axis.size), 0)


def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> Range:
    """``[first, last)`` vocabulary rows of ``rank``. Uneven where it must be: 50257 over 2 is 25129 and 25128."""
    return even_shards(global_vocab_size, world_size)[rank]


def vocab_range_from_per_partition_vocab_size(per_partition_vocab_size: int, rank: int, world_size: int) -> Range:
    """``[first, last)`` vocabulary rows of ``rank`` if all ``world_size`` ranks hold equally many."""
    return vocab_range_from_global_vocab_size(per_partition_vocab_size * world_size, rank, world_size)


class VocabUtility:
    """The two functions above under the name of Megatron's class."""

    vocab_range_from_global_vocab_size = staticmethod(vocab_range_from_global_vocab_size)
    vocab_range_from_per_partition_vocab_size = staticmethod(vocab_range_from_per_partition_vocab_size)

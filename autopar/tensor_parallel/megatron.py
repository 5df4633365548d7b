"""Megatron-LM's mappings between replicated, sharded and partial activations, and its splits, under Megatron's names.

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

After ``megatron/core/tensor_parallel/mappings.py`` and ``utils.py``; the work is done in
:mod:`autopar.distributed.collectives`. ``group`` is a process group or an MPU. The sequence is dim 0, as in Megatron;
models that put the batch first pass ``dim=1``. Functions that split tensors and vocabularies have no autograd across
ranks.

No function mutates its input. Sizes that do not divide raise ConfigError with both numbers, before anything is sent,
on every rank (Megatron truncates silently).

[Note: marks of parameters] Megatron-LM's and DeepSpeed's norms count each parameter once by attributes.
``tensor_model_parallel`` (counts on every rank; otherwise on the first one only), ``partition_dim``, and
``partition_stride``, the number of blocks that lie side by side (two for ``gate | up``). ``shared`` and
``ds_pipe_replicated``: an earlier pipeline stage holds and counts it, too. ``allreduce`` is False of experts that are
sharded over replicas, too: Megatron-LM's sign that the data-parallel group does not hold them alike.

The first of the ranks that hold a KV head counts it. One flag cannot describe a weight that is held twice only in part
(a fused ``q | k | v`` with fewer KV heads than ranks): it counts on every rank. DeepSpeed's norms are given what counts
(:mod:`autopar.integrations.deepspeed`), one of your own is too large by the repeated heads; ``autopar.clip_grad_norm_``
is exact there, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.distributed import collectives
from autopar.distributed.axis import Group, axis_of, check_divides
from autopar.distributed.collectives import even_layout
from autopar.distributed.mesh import MPU
from autopar.distributed.shard_reads import Shard, unwatch, watch
from autopar.errors import ConfigError
from autopar.layout import Layout, Range, even_shards
from autopar.plan.plan import Plan, TensorPlan
from autopar.plan.stages import StagePlan

__all__ = ["Group", "axis_of"]


_NAMES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared", "ds_pipe_replicated", "allreduce")


def mark(model: nn.Module, plan: Plan, stages: StagePlan, mpu: MPU) -> None:
    """Set the attributes on the parameters that this rank holds. ``copy.deepcopy`` drops them, ``.to`` keeps them."""
    told: set[tuple[str, int]] = set()
    joins = not any(isinstance(parameter, DTensor) for parameter in model.parameters())  # not with ZeRO 2 and 3
    due: dict[str, TensorPlan] = {name: one for one in plan.tensors.values() for name in (one.name, *one.aliases)}
    for name, parameter in model.named_parameters():
        if name not in due:
            continue
        layout = due[name].layout
        if plan.tp > 1:
            counts = layout is not None and _counts(layout, (mpu.shards if name in plan.experts else mpu.tp).rank)
            mark_shard(parameter, -1 if layout is None else layout.dim, len(layout.blocks) if layout else 1, counts)
        if name in plan.experts:
            parameter.allreduce = False  # type: ignore[attr-defined]
        if layout is not None and plan.shards > 1:
            rank, axis = (mpu.shards.rank, "expert") if name in plan.experts else (mpu.tp.rank, "tensor")
            own = due[name]
            watch(parameter, Shard(own.name, tuple(own.shape), layout, rank, told, f"{axis}-parallel", joins))
        if name in stages.tensors and min(stages.holders(name), default=mpu.pp.rank) < mpu.pp.rank:
            parameter.shared = parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def describe_stage(model: nn.Module, stages: StagePlan, mpu: MPU) -> str:
    """Return which stages this rank holds, and how many of the parameters."""
    here, gone = len(list(model.parameters())), {name for m in model.modules() for name in _gone(m)}
    own = stages.stages_on(mpu.pp.rank)
    which = f"stage{'s' if len(own) > 1 else ''} {' and '.join(map(str, own))} of {stages.stages}"
    return f"this rank holds {which}: {here} of {here + len(gone)} parameters"


def _gone(module: nn.Module) -> list[str]:
    """Return the names of weights of other stages, for which something stands in a module."""
    return [value.weight_name for value in vars(module).values() if hasattr(value, "weight_name")]


def mark_shard(parameter: torch.Tensor, dim: int, stride: int = 1, counts: bool = True) -> None:
    """Set the attributes of one parameter.

    Args:
        dim: along which it is sharded; -1 if it is replicated.
        stride: parts that lie side by side.
        counts: in norms, on this rank whichever it is; otherwise on the first one only.
    """
    marked: Any = parameter
    marked.tensor_model_parallel = counts
    marked.partition_dim = dim
    marked.partition_stride = stride


def _counts(layout: Layout, rank: int) -> bool:
    return bool(layout.owned(rank)) or not layout.ranges(rank)


def unmark(model: nn.Module) -> None:
    """Remove the attributes that :func:`mark` set."""
    for parameter in model.parameters():
        unwatch(parameter)
        for name in _NAMES:
            vars(parameter).pop(name, None)


def copy_to_tensor_model_parallel_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Copy into a sharded region (Megatron's f): ``[...]`` Replicate -> the same, whose Partial gradient is summed."""
    return collectives.copy(x, axis_of(group))


def reduce_from_tensor_model_parallel_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All-reduce (Megatron's g): ``[...]`` Partial -> Replicate; the gradient passes as it is."""
    return collectives.reduce(x, axis_of(group))


def scatter_to_tensor_model_parallel_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Keep this rank's shard: ``[..., n]`` Replicate -> ``[..., n/tp]`` Shard(-1).

    Raises:
        ConfigError: if ``n`` does not divide.
    """
    return _scatter(x, group, -1, "last dim")


def gather_from_tensor_model_parallel_region(x: torch.Tensor, group: Group, *, size: int | None = None) -> torch.Tensor:
    """All-gather ``[..., n/tp]`` Shard(-1) -> ``[..., n]`` Replicate.

    Args:
        size: ``n`` if it does not divide evenly and was sharded by :func:`autopar.layout.even_shards` (the logits of
            a vocabulary of 50257). Without it all ranks must bring the same width.

    Raises:
        ConfigError: if this rank's width is not that of its shard of ``size``.
    """
    return _gather(x, group, -1, size)


def scatter_to_sequence_parallel_region(x: torch.Tensor, group: Group, *, dim: int = 0) -> torch.Tensor:
    """Keep this rank's shard: ``[seq, ...]`` Replicate -> ``[seq/tp, ...]`` Shard(dim).

    Raises:
        ConfigError: if ``seq`` does not divide.
    """
    return _scatter(x, group, dim, "sequence dim")


def gather_from_sequence_parallel_region(
    x: torch.Tensor, tensor_parallel_output_grad: bool = True, group: Group | None = None, *, dim: int = 0
) -> torch.Tensor:
    """All-gather ``[seq/tp, ...]`` Shard(dim) -> ``[seq, ...]`` Replicate.

    Args:
        tensor_parallel_output_grad: whether the result goes into a sharded region, so that its gradient is Partial:
            backward is a reduce-scatter. If False the gradient is Replicate already and backward keeps its own part.
    """
    axis = axis_of(group)
    return collectives.gather_sum(x, axis, dim) if tensor_parallel_output_grad else _gather(x, axis, dim)


def reduce_scatter_to_sequence_parallel_region(x: torch.Tensor, group: Group, *, dim: int = 0) -> torch.Tensor:
    """Reduce-scatter ``[seq, ...]`` Partial -> ``[seq/tp, ...]`` Shard(dim).

    Raises:
        ConfigError: if ``seq`` does not divide.
    """
    axis = axis_of(group)
    check_divides(x.shape[dim], axis, "sequence dim")
    return collectives.reduce_scatter(x, axis, dim)


def all_to_all(
    group: Group,
    x: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
) -> torch.Tensor:
    """Exchange rows, as of tokens between experts: ``[rows, ...] -> [sum(output_split_sizes), ...]``.

    Megatron's order of arguments.

    Args:
        output_split_sizes: rows that come from each rank; None for even parts.
        input_split_sizes: rows of ``x`` that go to each rank; None for even parts.

    Raises:
        ConfigError: if there are not as many splits as ranks, if the input splits are not all the rows, or if there are
            none and the rows do not divide. Checked on each rank's own arguments.
    """
    axis = axis_of(group)
    for name, splits in (("output_split_sizes", output_split_sizes), ("input_split_sizes", input_split_sizes)):
        if splits is None:
            check_divides(x.shape[0], axis, f"dim 0 (without {name})")
        elif len(splits) != axis.size:
            raise ConfigError(f"{name} has {len(splits)} entries for {axis.size} ranks: {splits}")
    if input_split_sizes is not None and sum(input_split_sizes) != x.shape[0]:
        raise ConfigError(
            f"input_split_sizes {input_split_sizes} are {sum(input_split_sizes)} rows, dim 0 has {x.shape[0]}"
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
            f"dim {dim} has {x.shape[dim]} elements on rank {axis.rank} of {axis.size}, "
            f"its shard of {size} has {layout.local_size(axis.rank)}"
        )
    return collectives.gather(x, axis, layout, dim)


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Split ``[..., n] -> num_partitions x [..., n/num_partitions]``: views, or contiguous copies if asked for.

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
    """Keep this rank's elements, ``[...]`` Replicate -> ``[numel/tp]`` Shard(0): a view where that is possible.

    Raises:
        ConfigError: if the number of elements does not divide.
    """
    axis = axis_of(group)
    each = check_divides(tensor.numel(), axis, "flat tensor")
    return tensor.reshape(-1).narrow(0, axis.rank * each, each)


def gather_split_1d_tensor(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """All-gather :func:`split_tensor_into_1d_equal_chunks`: flat elements in rank order, ``[numel * tp]``.

    Every rank brings the same number of elements.
    """
    axis = axis_of(group)
    with torch.no_grad():
        flat = tensor.reshape(-1)
        return collectives.gather(flat, axis, even_layout(flat.numel() * axis.size, axis.size), 0)


def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> Range:
    """Return the ``[first, last)`` vocabulary rows of ``rank``. Uneven if need be: 50257 over 2: 25129, 25128."""
    return even_shards(global_vocab_size, world_size)[rank]


def vocab_range_from_per_partition_vocab_size(per_partition_vocab_size: int, rank: int, world_size: int) -> Range:
    """Return the ``[first, last)`` vocabulary rows of ``rank`` if all ``world_size`` ranks hold equally many."""
    return vocab_range_from_global_vocab_size(per_partition_vocab_size * world_size, rank, world_size)


class VocabUtility:
    """The two functions above under the name of Megatron's class."""

    vocab_range_from_global_vocab_size = staticmethod(vocab_range_from_global_vocab_size)
    vocab_range_from_per_partition_vocab_size = staticmethod(vocab_range_from_per_partition_vocab_size)

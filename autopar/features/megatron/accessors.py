"""Groups, ranks and sizes of an MPU, under the names of OSLO, Megatron-LM and DeepSpeed.

Most names have the form ``get_AXIS_VALUE()``, such as ``get_tensor_parallel_rank()``; they are generated from tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch

from autopar.distributed import collectives
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import even_layout
from autopar.distributed.mesh import rank_groups
from autopar.distributed.process import start_process_group
from autopar.features.megatron.toolbox import Dtypes, broadcast_data, check_divides

_TP, _PP = ("tp", "the ranks that hold the shards of one layer"), ("pp", "the stages of a replica")
_EP = ("ep", "the ranks that hold the experts of one layer")
_AXES = {  # part of a name -> axis, description of its ranks
    **dict.fromkeys(("tensor_parallel", "tensor_model_parallel", "slice_parallel"), _TP),
    **dict.fromkeys(("pipeline_parallel", "pipeline_model_parallel", "pipe_parallel"), _PP),
    **dict.fromkeys(("expert_parallel", "expert_model_parallel"), _EP),
    "context_parallel": ("cp", "the ranks that share a sequence"),
    "tensor_and_context_parallel": ("tp_cp", "the ranks of a stage that get the same batch"),
    "expert_data_parallel": ("edp", "the ranks that hold the same experts, and read other data"),
    "model_parallel": ("tp_pp", "the ranks that hold each shard of the model once (tp x pp)"),
}
_VALUES: dict[str, tuple[Callable[[Axis], Any], str]] = {  # part of a name -> value of the axis, its description
    "group": (attrgetter("group"), "the process group of"),
    "rank": (attrgetter("rank"), "this rank's place among"),
    "world_size": (attrgetter("size"), "the number of"),
    "src_rank": (lambda axis: axis.ranks[0], "the global rank of the first of"),
    "first_rank": (lambda axis: axis.ranks[0], "the global rank of the first of"),
    "last_rank": (lambda axis: axis.ranks[-1], "the global rank of the last of"),
    "next_rank": (lambda axis: axis.ranks[(axis.rank + 1) % axis.size], "the global rank after this one in a ring of"),
    "prev_rank": (lambda axis: axis.ranks[axis.rank - 1], "the global rank before this one in a ring of"),
    "global_ranks": (lambda axis: list(axis.ranks), "the global ranks of"),
    "global_ranks_per_group": (lambda axis: list(axis.ranks), "the global ranks of"),
}

_DATA = {  # VALUE of get_data_parallel_VALUE(with_context_parallel=False) -> value of ``dp`` or ``dp_cp``, description
    "group": ("group", "the process group for ``DistributedDataParallel(model, process_group=...)``"),
    "rank": ("rank", "the index of this rank's replica: ``DistributedSampler(rank=...)``"),
    "world_size": ("world_size", "the number of replicas: ``DistributedSampler(num_replicas=...)``"),
    "src_rank": ("src_rank", "the global rank of the first rank of the data-parallel group"),
    "group_ranks": ("global_ranks", "the global ranks of the data-parallel group"),
}


_EMBEDDING = "the process group of the first and last stage, which hold tied embeddings; None between"
_CHUNKS = "None, since the pipeline manages the chunks of a stage"
_ALIVE = "whether the process groups exist, until ``destroy``"
_OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {  # name -> value of the MPU, and its description
    "is_pipeline_first_stage": (lambda mpu: mpu.pp.rank == 0, "whether this rank holds the embeddings"),
    "is_pipeline_last_stage": (lambda mpu: mpu.pp.rank == mpu.pp.size - 1, "whether this rank holds the head"),
    "get_embedding_group": (lambda mpu: mpu._embedding and mpu._embedding.group, _EMBEDDING),
    "get_embedding_tied_group": (lambda mpu: mpu._embedding and mpu._embedding.group, _EMBEDDING),
    "get_embedding_global_ranks": (
        lambda mpu: sorted({mpu.pp.ranks[0], mpu.pp.ranks[-1]}),
        "the global ranks of the first and the last stage of this replica; a single rank if they are the same",
    ),
    "is_rank_in_embedding_group": (lambda mpu: mpu._embedding is not None, "whether this rank holds tied embeddings"),
    "get_virtual_pipeline_model_parallel_rank": (lambda mpu: None, _CHUNKS),
    "get_virtual_pipeline_model_parallel_world_size": (lambda mpu: None, _CHUNKS),
    "get_pipeline_parallel_global_ranks_across_all_groups": (
        lambda mpu: rank_groups(mpu.sizes)["pp"],
        "the global ranks of the stages of every replica",
    ),
    "model_parallel_is_initialized": (attrgetter("alive"), _ALIVE),
    "is_initialized": (attrgetter("alive"), _ALIVE),
    "destroy_model_parallel": (lambda mpu: mpu.destroy(), "nothing, after ``destroy``"),
}


class MeshAccessors:
    """Methods of :class:`~autopar.distributed.mesh.MPU`."""

    initialize_distributed = staticmethod(start_process_group)

    def broadcast(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Enter a sharded region (Megatron's f): identity forward of ``x``, which is Replicate; all-reduce backward."""
        return collectives.copy(x, self.tp)

    def reduce(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Leave a sharded region (Megatron's g): all-reduce forward (Partial -> Replicate), identity backward."""
        return collectives.reduce(x, self.tp)

    def scatter(self: Any, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Keep the local shard, ``[..., n] -> [..., n/tp]``; backward all-gathers. Raise ConfigError for uneven n."""
        check_divides(x.shape[dim], self.tp, f"dim {dim}")
        return collectives.scatter(x, self.tp, even_layout(x.shape[dim], self.tp.size), dim)

    def gather(self: Any, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All-gather ``[..., n/tp] -> [..., n]`` of equal widths; backward keeps the local shard."""
        return collectives.gather(x, self.tp, even_layout(x.shape[dim] * self.tp.size, self.tp.size), dim)

    def broadcast_data(
        self: Any, keys: Iterable[int | str], data: Mapping[Any, Any] | None, dtype: Dtypes
    ) -> dict[int | str, torch.Tensor]:
        """Broadcast tensors of the first tensor-parallel rank; see :func:`autopar.tensor_parallel.broadcast_data`."""
        return broadcast_data(keys, data, dtype, self)


def _getter(value: Callable[[Any], Any], words: str, axis: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return value(self if axis is None else axis(self))

    get.__doc__ = f"Return {words}."
    return get


for _name, (_of_mesh, _words) in _OTHERS.items():
    setattr(MeshAccessors, _name, _getter(_of_mesh, _words))
for _name, (_axis, _ranks) in _AXES.items():
    for _ending, (_value, _words) in _VALUES.items():
        _found = _getter(_value, f"{_words} {_ranks}", attrgetter(_axis))
        setattr(MeshAccessors, f"get_{_name}_{_ending}", _found)


def _data_getter(value: Callable[[Axis], Any], words: str) -> Callable[..., Any]:
    def get(self: Any, with_context_parallel: bool = False) -> Any:
        return value(self.dp_cp if with_context_parallel else self.dp)

    get.__doc__ = (
        f"Return {words}.\n\n"
        "Average gradients over the ranks ``with_context_parallel``: all ranks with the same weights, including ranks\n"
        "that share a sequence."
    )
    return get


for _name, (_value_name, _words) in _DATA.items():
    setattr(MeshAccessors, f"get_data_parallel_{_name}", _data_getter(_VALUES[_value_name][0], _words))

"""The tensor-parallel toolbox, under Megatron-LM's names.

``ColumnParallelLinear``, ``RowParallelLinear`` and ``VocabParallelEmbedding`` are for a model of one's own.

Every function takes ``group`` as its last argument: a process group, or an MPU (its tp group). There is no module-level
state. :mod:`autopar.api` is built from the same parts. The names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from autopar.distributed.accessors import MeshAccessors
from autopar.errors import nearest
from autopar.on_demand import lazy_names

if TYPE_CHECKING:
    from autopar.distributed.axis import Group, axis_of
    from autopar.distributed.broadcast_data import broadcast_data
    from autopar.distributed.rng_tracker import (
        MODEL_PARALLEL_STREAM,
        RandomStateTracker,
        checkpoint,
        get_cuda_rng_tracker,
        manual_seed,
        model_parallel_cuda_manual_seed,
    )
    from autopar.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from autopar.tensor_parallel.loss import vocab_parallel_cross_entropy
    from autopar.tensor_parallel.megatron import (
        VocabUtility,
        all_to_all,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        gather_split_1d_tensor,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
        scatter_to_tensor_model_parallel_region,
        split_tensor_along_last_dim,
        split_tensor_into_1d_equal_chunks,
        vocab_range_from_global_vocab_size,
        vocab_range_from_per_partition_vocab_size,
    )
    from autopar.tensor_parallel.parallelize import full_state_dict, load_full_state_dict

__all__ = [
    "MODEL_PARALLEL_STREAM",
    "ColumnParallelLinear",
    "Group",
    "RandomStateTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabUtility",
    "all_to_all",
    "axis_of",
    "broadcast_data",
    "checkpoint",
    "copy_to_tensor_model_parallel_region",
    "full_state_dict",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_split_1d_tensor",
    "get_cuda_rng_tracker",
    "load_full_state_dict",
    "manual_seed",
    "model_parallel_cuda_manual_seed",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
    "vocab_parallel_cross_entropy",
    "vocab_range_from_global_vocab_size",
    "vocab_range_from_per_partition_vocab_size",
]

_HOMES = {
    "distributed.axis": "Group axis_of",
    "distributed.broadcast_data": "broadcast_data",
    "distributed.rng_tracker": "MODEL_PARALLEL_STREAM RandomStateTracker checkpoint get_cuda_rng_tracker manual_seed "
    "model_parallel_cuda_manual_seed",
    "tensor_parallel.layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
    "tensor_parallel.loss": "vocab_parallel_cross_entropy",
    "tensor_parallel.parallelize": "full_state_dict load_full_state_dict",
}
_MEGATRON = dict.fromkeys(__all__, "autopar.tensor_parallel.megatron")  # all other ones


def _hint(name: str) -> str:
    if name in dir(MeshAccessors) and not name.startswith("_"):
        return f" It is a method of the MPU here: model.mpu.{name}()."
    return "" if name.startswith("_") else nearest(name, __all__, cutoff=0.7)


_NAMES = {name: f"autopar.{home}" for home, names in _HOMES.items() for name in names.split()}
__getattr__, __dir__ = lazy_names(__name__, _MEGATRON | _NAMES, _hint)

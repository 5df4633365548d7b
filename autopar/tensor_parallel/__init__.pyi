"""The types of the names, which ``__init__.py`` loads when they are first used."""

from autopar.distributed.axis import Group as Group, axis_of as axis_of
from autopar.features.megatron.layers import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
    VocabParallelEmbedding as VocabParallelEmbedding,
    full_state_dict as full_state_dict,
    load_full_state_dict as load_full_state_dict,
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from autopar.features.megatron.random import (
    MODEL_PARALLEL_STREAM as MODEL_PARALLEL_STREAM,
    RandomStateTracker as RandomStateTracker,
    checkpoint as checkpoint,
    get_cuda_rng_tracker as get_cuda_rng_tracker,
    manual_seed as manual_seed,
    model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed,
)
from autopar.features.megatron.toolbox import (
    VocabUtility as VocabUtility,
    all_to_all as all_to_all,
    broadcast_data as broadcast_data,
    copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region,
    gather_split_1d_tensor as gather_split_1d_tensor,
    reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region,
    split_tensor_along_last_dim as split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks as split_tensor_into_1d_equal_chunks,
    vocab_range_from_global_vocab_size as vocab_range_from_global_vocab_size,
    vocab_range_from_per_partition_vocab_size as vocab_range_from_per_partition_vocab_size,
)

"""Names of Megatron-LM, OSLO and DeepSpeed: layers, mappings, accessors, random streams, and schedules."""

from autopar.registry import Feature, Step

_TOOLBOX = (
    *("VocabUtility", "all_to_all", "copy_to_tensor_model_parallel_region", "gather_from_sequence_parallel_region"),
    *("gather_from_tensor_model_parallel_region", "gather_split_1d_tensor", "reduce_from_tensor_model_parallel_region"),
    *("reduce_scatter_to_sequence_parallel_region", "scatter_to_sequence_parallel_region"),
    *("scatter_to_tensor_model_parallel_region", "split_tensor_along_last_dim", "split_tensor_into_1d_equal_chunks"),
    *("vocab_range_from_global_vocab_size", "vocab_range_from_per_partition_vocab_size"),
)

_LAYERS = (
    *("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "full_state_dict"),
    *("load_full_state_dict", "vocab_parallel_cross_entropy"),
)
_RANDOM = (
    *("MODEL_PARALLEL_STREAM", "RandomStateTracker", "checkpoint", "get_cuda_rng_tracker", "manual_seed"),
    "model_parallel_cuda_manual_seed",
)

FEATURE = Feature(
    name="megatron",
    about="names of Megatron-LM, OSLO and DeepSpeed",
    toolbox={
        **{name: f"autopar.features.megatron.layers:{name}" for name in _LAYERS},
        **{name: f"autopar.features.megatron.toolbox:{name}" for name in _TOOLBOX},
        **{name: f"autopar.features.megatron.random:{name}" for name in _RANDOM},
        "broadcast_data": "autopar.features.megatron.data:broadcast_data",
    },
    steps={"mark_like_megatron": Step("autopar.features.megatron.layers:mark_parameters", after="prepare_optimizer")},
    mesh_names={"accessors": "autopar.features.megatron.accessors:MeshAccessors"},
)

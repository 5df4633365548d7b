"""Names of Megatron-LM, OSLO and DeepSpeed: layers, mappings, accessors, random streams, and schedules."""

from autopar.registry import Feature, Step

_HERE = "autopar.features.megatron"
_TOOLBOX = {  # module -> its names
    "layers": (
        *("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "full_state_dict"),
        *("load_full_state_dict", "vocab_parallel_cross_entropy"),
    ),
    "toolbox": (
        *("VocabUtility", "all_to_all", "broadcast_data", "gather_split_1d_tensor"),
        *("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"),
        *("gather_from_sequence_parallel_region", "gather_from_tensor_model_parallel_region"),
        *("scatter_to_sequence_parallel_region", "scatter_to_tensor_model_parallel_region"),
        *("reduce_scatter_to_sequence_parallel_region", "split_tensor_along_last_dim"),
        *("split_tensor_into_1d_equal_chunks", "vocab_range_from_global_vocab_size"),
        "vocab_range_from_per_partition_vocab_size",
    ),
    "random": (
        *("MODEL_PARALLEL_STREAM", "RandomStateTracker", "checkpoint", "get_cuda_rng_tracker", "manual_seed"),
        "model_parallel_cuda_manual_seed",
    ),
}

FEATURE = Feature(
    name="megatron",
    about="names of Megatron-LM, OSLO and DeepSpeed",
    toolbox={name: f"{_HERE}.{module}:{name}" for module, names in _TOOLBOX.items() for name in names},
    steps={"mark_like_megatron": Step(f"{_HERE}.layers:mark_parameters", after="prepare_optimizer")},
    mesh_names={"accessors": f"{_HERE}.accessors:MeshAccessors"},
)

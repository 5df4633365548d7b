"""Configuration keys of OSLO, ColossalAI, Megatron-LM, DeepSpeed and accelerate: what each is called here, or why not.

Data only: :func:`explain` makes one sentence of it.
"""

from __future__ import annotations

from typing import Any

from autopar.errors import clip

_TP = "tp"
_PP = "pp"
_EP = "ep"
_CP = "cp"

# What means the same here: library -> its name -> section.key of ours, or a short name of a size.
_RENAMED: dict[str, dict[str, str]] = {
    "ColossalAI": {
        "tp_size": _TP,
        "pp_size": _PP,
        "ep_size": _EP,
        "sp_size": _CP,
        "pp_style": "pipeline.schedule",
        "num_model_chunks": "pipeline.chunks",
        "max_norm": "gradient_clipping",
        "clip_grad_norm": "gradient_clipping",
        "num_layers_per_stage": "pipeline.layers_per_stage",
    },
    "Megatron-LM": {
        "tensor_model_parallel_size": _TP,
        "pipeline_model_parallel_size": _PP,
        "expert_model_parallel_size": _EP,
        "micro_batch_size": "pipeline.microbatch_size",
        "clip_grad": "gradient_clipping",
        "initial_loss_scale": "precision.initial_scale",
        "distributed_timeout_minutes": "pipeline.timeout",
    },
    "DeepSpeed": {
        "tensor_parallel": _TP,
        "autotp_size": _TP,
        "sequence_parallel_size": _CP,
        "loss_scale_window": "precision.growth_interval",
        "min_loss_scale": "precision.min_scale",
    },
    "OSLO": {"sequence_parallel_size": _CP},
    "accelerate": {"cp_size": _CP, "sp_size": _CP},
}
_SECONDS = "distributed_timeout_minutes"

_SEQUENCE = (
    "write model_parallelism: {sequence_parallel: true} for its split_gather (over the tensor-parallel ranks), "
    "{context_parallel_size: ...} for all_to_all and ring_attn"
)
_METHOD = "write model_parallelism: {context_parallel_method: auto}, or ulysses (all-to-all), or gather (all-gather)"
_NO_RING = "context_parallel_method is ulysses or gather, not a ring; leave it out"
_NO_FUSION = "autopar replaces no kernels: the model's own attn_implementation chooses those of attention"
_SCRIPT = "not the configuration's: it belongs to your own loop and data loader"
_BATCH = "autopar.prepare_dataloader(dataset, batch_size, mpu=model.mpu) takes the samples of a replica and step"
_OPTIMIZER = "make the optimizer yourself and give it to autopar.initialize(model, config, optimizer=optimizer)"
_DDP = "give it to torch's DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group(), ...)"
_ZERO = "write zero: {stage: 1}, 2 or 3 (in 2 and 3 also cpu_offload: true)"
_TORCH_DECIDES = "autopar leaves buckets and overlap to torch; leave it out"
_FSDP = "zero: {stage: 3} (or 2) shards with torch's FSDP2, which decides that itself; leave it out"
_RECOMPUTE = (
    "write activation_checkpointing: {enable: true}: every block is recomputed, whole or with save: [attention, "
    "collectives, matmuls] as much of it as you like"
)
_FP16 = "write precision: {dtype: fp16}; initial_scale, min_scale and growth_interval stand beside dtype"
_BF16 = "write precision: {dtype: bf16}"
_LAZY = "build the model inside `with autopar.lazy_init():`, or call autopar.from_pretrained"
_DATA_PARALLEL = (
    "the data-parallel size is what remains of the processes: world / (tensor x context x pipeline); leave it out"
)
_ALIGNED = "autopar shards a vocabulary of any size as it is; leave it out"
_ACCUMULATE = "call backward (or execute_pipeline in model.no_sync()) that many times before optimizer.step()"

# What is called, built or placed otherwise here, or is not there: library -> its name -> the sentence.
_ELSEWHERE: dict[str, dict[str, str]] = {
    "ColossalAI": {
        "zero_stage": _ZERO,
        "fp16": _FP16,
        "enable_sequence_parallelism": _SEQUENCE,
        "sequence_parallelism_mode": _SEQUENCE,
        "enable_sequence_overlap": _TORCH_DECIDES,
        "inner_ring_size": _NO_RING,
        "enable_all_optimization": _NO_FUSION,
        "enable_fused_normalization": _NO_FUSION,
        "enable_flash_attention": _NO_FUSION,
        "enable_jit_fused": _NO_FUSION,
        "parallel_output": "logits and losses are always those of the plain model; leave it out",
        "broadcast_buffers": _DDP,
        "ddp_bucket_cap_mb": _DDP,
        "find_unused_parameters": _DDP,
        "check_reduction": _DDP,
        "gradient_as_bucket_view": _DDP,
        "static_graph": _DDP,
        "zero_bucket_size_in_m": _TORCH_DECIDES,
        "communication_dtype": "gradients are summed in their own dtype (fp32 with precision); leave it out",
        "overlap_communication": _TORCH_DECIDES,
        "overlap_p2p": "the pipeline sends in the background always; leave it out",
        "overlap_allgather": _TORCH_DECIDES,
        "custom_policy": "write policy: FILE, or autopar.initialize(model, config, policy=...), in YAML",
        "gradient_checkpoint_config": _RECOMPUTE,
        "enable_metadata_cache": "shapes travel with the activations always; leave it out",
        "make_vocab_size_divisible_by": _ALIGNED,
        "dp_outside": "ranks count tensor parallel first, then context, data, pipeline; leave it out",
        "fp8_communication": "autopar sends no fp8; leave it out",
        "use_fp8": "precision.dtype is fp32, bf16 or fp16",
        "moe_dp_size": _DATA_PARALLEL,
        "tp_mode": "weights are sharded along one dimension ('1d'); leave it out",
        "mode": "weights are sharded along one dimension ('1d'); leave it out",
        "parallel": "write {tp: ..., pp: ...}",
        "gradient_accumulation": _ACCUMULATE,
        "gradient_handler": "DistributedDataParallel or execute_pipeline averages gradients; leave it out",
        "amp": _FP16,
        "grad_scaler": _FP16,
        "master_weights": "with precision the optimizer always steps fp32 weights; leave it out",
        "placement_policy": _FSDP,
        "chunk_config_dict": _FSDP,
    },
    "Megatron-LM": {
        "fp16": _FP16,
        "bf16": _BF16,
        "cp_comm_type": _METHOD,
        "hierarchical_context_parallel_sizes": _NO_RING,
        "expert_tensor_parallel_size": "experts are sharded over the tensor-parallel ranks; leave it out",
        "num_layers_per_virtual_pipeline_stage": "write pipeline: {schedule: interleaved, chunks: 2} (stages per rank)",
        "virtual_pipeline_model_parallel_size": "write pipeline: {schedule: interleaved, chunks: ...}",
        "decoder_first_pipeline_num_layers": "write pipeline: {layers_per_stage: [...]}, the blocks of every stage",
        "decoder_last_pipeline_num_layers": "write pipeline: {layers_per_stage: [...]}, the blocks of every stage",
        "global_batch_size": _BATCH,
        "rampup_batch_size": _SCRIPT,
        "recompute_granularity": _RECOMPUTE,
        "recompute_activations": _RECOMPUTE,
        "recompute_method": _RECOMPUTE,
        "recompute_num_layers": _RECOMPUTE,
        "use_distributed_optimizer": "write zero: {stage: 1}",
        "use_torch_fsdp2": "write zero: {stage: 3}",
        "num_distributed_optimizer_instances": "write zero: {stage: 3, shard_size: ...}, the ranks of each instance",
        "muon_tp_mode": "write optimizer: {whole: sharded}, and give torch.optim.Muon to autopar.initialize",
        "muon_split_qkv": "write optimizer: {split_fused: true}, and give torch.optim.Muon to autopar.initialize",
        "overlap_grad_reduce": _TORCH_DECIDES,
        "overlap_param_gather": _TORCH_DECIDES,
        "ddp_bucket_size": _DDP,
        "calculate_per_token_loss": "write pipeline: {loss_reduction: tokens}, the default of execute_pipeline",
        "use_flash_attn": _NO_FUSION,
        "masked_softmax_fusion": _NO_FUSION,
        "bias_gelu_fusion": _NO_FUSION,
        "bias_dropout_fusion": _NO_FUSION,
        "gradient_accumulation_fusion": _NO_FUSION,
        "transformer_impl": _NO_FUSION,
        "tp_comm_overlap": _TORCH_DECIDES,
        "train_iters": _SCRIPT,
        "seq_length": _SCRIPT,
        "seed": "torch.manual_seed before the model is made; ranks share the first one's random state",
    },
    "DeepSpeed": {
        "zero_optimization": _ZERO,
        "train_batch_size": _BATCH,
        "train_micro_batch_size_per_gpu": _BATCH,
        "gradient_accumulation_steps": _ACCUMULATE,
        "fp16": _FP16,
        "bf16": _BF16,
        "bfloat16": _BF16,
        "enabled": "write enable",
        "auto_cast": "inputs are cast always; leave it out",
        "loss_scale": "the scale of fp16 is dynamic: precision.initial_scale, min_scale and max_scale bound it",
        "initial_scale_power": "write precision: {initial_scale: 65536.0}, which is 2**16",
        "consecutive_hysteresis": "precision.hysteresis counts overflows in a row; leave it out",
        "optimizer": _OPTIMIZER,
        "scheduler": "make it yourself over the optimizer, and give lr_scheduler= to autopar.initialize",
        "overlap_comm": _TORCH_DECIDES,
        "contiguous_gradients": _TORCH_DECIDES,
        "reduce_bucket_size": _TORCH_DECIDES,
        "allgather_bucket_size": _TORCH_DECIDES,
        "reduce_scatter": _TORCH_DECIDES,
        "allgather_partitions": _TORCH_DECIDES,
        "round_robin_gradients": _TORCH_DECIDES,
        "offload_param": "write zero: {stage: 3, cpu_offload: true}",
        "offload_optimizer": "write zero: {stage: 1, optimizer_offload: true}, or {stage: 3, cpu_offload: true}",
        "zero_hpz_partition_size": "write zero: {stage: 3, shard_size: ...}",
        "sub_group_size": _FSDP,
        "stage3_prefetch_bucket_size": _FSDP,
        "stage3_param_persistence_threshold": _FSDP,
        "stage3_max_live_parameters": _FSDP,
        "stage3_max_reuse_distance": _FSDP,
        "stage3_gather_16bit_weights_on_model_save": "save_parallelized(folder, merge_checkpoints=True) gathers them",
        "zero_allow_untested_optimizer": "any torch.optim optimizer is taken; leave it out",
        "partition_activations": "activations inside sharded layers are sharded already; leave it out",
        "contiguous_memory_optimization": "recomputed activations are left to torch's allocator; leave it out",
        "number_checkpoints": "every block is recomputed; leave it out",
        "synchronize_checkpoint_boundary": "recomputed activations are left to torch; leave it out",
        "steps_per_print": _SCRIPT,
        "wall_clock_breakdown": _SCRIPT,
        "prescale_gradients": "gradients are averaged, in fp32 with precision; leave it out",
        "gradient_predivide_factor": "gradients are averaged, in fp32 with precision; leave it out",
        "communication_data_type": "use model_parallelism.reduce_dtype: same or fp32",
        "sparse_gradients": "autopar reads that off the model; leave it out",
        "amp": _FP16,
    },
    "OSLO": {
        "tp_mapping": "write policy: FILE, or autopar.initialize(model, config, policy=...), in YAML",
        "zero_stage": _ZERO,
        "kernel_fusion": _NO_FUSION,
        "memory_efficient_fusion": _NO_FUSION,
        "custom_cuda_kernels": _NO_FUSION,
        "partitioned_checkpointing": "activations inside sharded layers are sharded already; leave it out",
        "contiguous_checkpointing": "recomputed activations are left to torch's allocator; leave it out",
        "data_parallelism": "ZeRO is the section zero: {stage: ...}; " + _DATA_PARALLEL,
        "data_parallel_size": _DATA_PARALLEL,
        "distributed_data_parallel": _DDP,
        "expert_parallelism": "write {ep: ...}",
        "tensor_parallel_depth": "weights are sharded along one dimension ('1d'); leave it out",
        "tensor_parallel_mode": "weights are sharded along one dimension ('1d'); leave it out",
        "lazy_initialization": _LAZY,
        "lazy_init": _LAZY,
        "commons": "the device follows from the process group (nccl: GPUs, gloo: CPU); leave it out",
        "force_gpu": "the device follows from the process group (nccl: GPUs, gloo: CPU); leave it out",
        "backend": "the backend follows from the machine, or from your own init_process_group; leave it out",
    },
    "accelerate": {
        "dp_replicate_size": _DATA_PARALLEL,
        "dp_shard_size": _ZERO,
        "cp_backend": _METHOD,
        "sp_backend": _METHOD,
    },
}

# What people write at a venture.
_GUESSED = {
    "dp": _DATA_PARALLEL,
    "data_parallel_size": _DATA_PARALLEL,
    "world_size": _DATA_PARALLEL,
    "sp": "write model_parallelism: {sequence_parallel: true}",
    "data_parallel": _DATA_PARALLEL,
    "pipeline_parallel": "write {pp: ...}",
    "context_parallel": "write {cp: ...}",
    "expert_parallel": "write {ep: ...}",
}


def explain(key: object, value: Any = None) -> str | None:
    """Return what to write here for a key of another library; None for a key that none of them has.

    Args:
        value: what the user gave, which goes into the advice where it means the same.
    """
    name = clip(str(key)).lstrip("-").replace("-", "_").lower()
    libraries = [library for library in _ELSEWHERE if name in _RENAMED[library] or name in _ELSEWHERE[library]]
    if not libraries:
        return f"there is no key '{key}': {_GUESSED[name]}" if name in _GUESSED else None
    owners = ", ".join(f"{library}'s" for library in libraries)
    home = _RENAMED[libraries[0]].get(name)
    if home is None:
        return f"'{key}' is {owners} name: {_ELSEWHERE[libraries[0]][name]}"
    section, _, own = home.rpartition(".")
    simple = type(value) in (bool, int, float, str) and name != _SECONDS
    written = f"{own}: {clip(str(value)) if simple else '...'}"
    if home in (_TP, _PP, _EP, _CP) or section:
        written = f"{section}: {{{written}}}".removeprefix(": ")
    unit = " (in seconds)" if name == _SECONDS else ""
    return f"'{key}' is {owners} name: write {written}{unit}"

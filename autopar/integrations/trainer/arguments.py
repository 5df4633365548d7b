"""Compute the parallel config of a trainer from the user's config and ``TrainingArguments``; check the arguments."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

from autopar.config import ParallelConfig
from autopar.config.parallel_config import raise_problems
from autopar.errors import ConfigError

# Values of args.optim: optimizers that step inside backward, and element-wise optimizers, which support shards.
_LAYERWISE = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
_IN_BACKWARD = ("lomo", "adalomo", *(f"{name}_layerwise" for name in _LAYERWISE))
_OF_ELEMENTS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "lion_32bit", "ademamix")


def parse_parallel_config(given: Any, args: Any, world_size: int) -> ParallelConfig:
    """Return the config from ``parallel_config`` or ``args.parallelism_config``.

    Args:
        given: Config as for ``initialize``, or accelerate's ``ParallelismConfig``. Default:
            ``args.parallelism_config``.
        args: ``TrainingArguments``.

    Raises:
        ConfigError: Both are given, autopar does not support the sizes, or they do not fit the world.
    """
    theirs = args.parallelism_config
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        raise ConfigError(
            "accelerate's launcher set a parallelism config (ACCELERATE_USE_PARALLELISM_CONFIG=true), which would "
            "shard the model a second time\n  Launch without it, and pass the sizes as parallel_config=."
        )
    if theirs is not None and given is not None:
        raise ConfigError("parallel_config and args.parallelism_config are both given\n  Remove one of them.")
    given = theirs if given is None else given
    if hasattr(given, "dp_replicate_size") and hasattr(given, "tp_size"):
        given = _from_accelerate(given, world_size)
    return ParallelConfig.parse(given, world_size)


def _from_accelerate(sizes: Any, world_size: int) -> ParallelConfig:
    if sizes.total_size not in (1, world_size):
        raise ConfigError(
            f"ParallelismConfig: dp_replicate_size={sizes.dp_replicate_size} x dp_shard_size={sizes.dp_shard_size} x "
            f"cp_size={sizes.cp_size} x sp_size={sizes.sp_size} x tp_size={sizes.tp_size} = {sizes.total_size} must "
            f"equal the world size {world_size}"
        )
    cp = max(sizes.cp_size, sizes.sp_size)  # one of them is 1
    hybrid = sizes.dp_replicate_size > 1 and sizes.dp_shard_size > 1
    return ParallelConfig(
        tensor_parallel_size=sizes.tp_size,
        context_parallel_size=cp,
        context_parallel_method="ulysses" if sizes.sp_size > 1 else "auto",
        zero_stage=3 if sizes.dp_shard_size > 1 else 0,
        zero_shard_size=sizes.dp_shard_size * cp if hybrid else 0,
    )


def merge_arguments(config: ParallelConfig, args: Any) -> ParallelConfig:
    """Return ``config`` with the precision, clipping and activation checkpointing of ``args``.

    The trainer clips before the step; in fp16 the optimizer clips after it has removed the loss scale.

    Raises:
        ConfigError: ``config`` and ``args`` contradict each other.
    """
    asked = _precision_of(args)
    if asked != "fp32" and config.precision not in ("fp32", asked):
        raise ConfigError(f"args request {asked}, but precision.dtype={config.precision}\n  Set only one of them.")
    precision = asked if asked != "fp32" else config.precision
    _check_clipping(config, args)
    clipping = float(args.max_grad_norm or 0.0) if precision == "fp16" else 0.0
    recomputed = config.activation_checkpointing or _recomputes(args)
    return dataclasses.replace(
        config, precision=precision, gradient_clipping=clipping, activation_checkpointing=recomputed
    )


def _recomputes(args: Any) -> bool:
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)


def _precision_of(args: Any) -> str:
    """Return the precision that ``args.bf16``, ``args.fp16`` or accelerate's launcher requests."""
    asked: str = {"no": "fp32"}.get(args.mixed_precision, args.mixed_precision)
    if asked not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f"mixed precision must be fp32, bf16 or fp16, got {asked}")
    return asked


def _check_clipping(config: ParallelConfig, args: Any) -> None:
    if config.gradient_clipping and config.gradient_clipping != args.max_grad_norm:
        raise ConfigError(
            f"gradient_clipping={config.gradient_clipping:g} must equal args.max_grad_norm={args.max_grad_norm:g}, by "
            "which the trainer clips\n  Set the same value, or remove gradient_clipping."
        )


def check_parallelized(config: ParallelConfig, args: Any, optimizer: Any, step: Any) -> None:
    """Raise ConfigError if ``args`` or ``optimizer`` do not fit a model that was parallelized before the trainer.

    Args:
        step: autopar's part of the model's optimizer step, or None.
    """
    asked = _precision_of(args)
    if asked not in ("fp32", config.precision):
        raise ConfigError(
            f"args request {asked}, but the model was parallelized with precision.dtype={config.precision}\n"
            f"  Set precision: {{dtype: {asked}}} in its config, or pass the plain model."
        )
    _check_clipping(config, args)
    if config.precision == "fp16" and args.max_grad_norm != config.gradient_clipping:
        raise ConfigError(
            f"args.max_grad_norm={args.max_grad_norm:g} must equal gradient_clipping={config.gradient_clipping:g} of "
            "the model's config, since in fp16 the optimizer clips\n  Set the same value."
        )
    if step is not None and optimizer is not step.optimizer:
        raise ConfigError(
            "the model was parallelized together with an optimizer, so the trainer must get this optimizer\n"
            "  Pass optimizers=(optimizer, None), or pass the plain model."
        )


def check_arguments(args: Any) -> None:
    """Raise ConfigError with all arguments that a parallelized model does not support in a trainer."""
    raise_problems([*_refused(args)], "the arguments have")


_REFUSED = (  # each starts with the name of the argument
    "args.fsdp is not supported: use zero: {stage: 3} in parallel_config, which is torch's FSDP2",
    "args.deepspeed is not supported: use zero: {stage: 1} in parallel_config",
    "args.torch_compile is not supported: use compile: {enable: true} in parallel_config",
    "args.use_liger_kernel is not supported: apply Liger Kernel to the plain model before",
    "args.use_vllm is not supported, since vLLM would get local shards: remove it, and the model samples on its ranks; "
    "send full weights to another engine with autopar.hf_weights(model)",
    "args.auto_find_batch_size is not supported: set a batch size that fits all ranks",
    "args.save_on_each_node is not supported: use one folder on a file system that all nodes share",
    "args.eval_use_gather_object is not supported: return tensors, which are padded and gathered over the replicas",
)


def _refused(args: Any) -> Iterator[str]:
    yield from (text for text in _REFUSED if getattr(args, re.findall(r"\w+", text)[1], None))
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            yield f"args.{name} is not supported: use precision: {{dtype: {name[:4]}}}"
    if args.train_sampling_strategy == "batch_rebalance":
        yield "args.train_sampling_strategy='batch_rebalance' is not supported: use another sampling strategy"
    if _recomputes(args) and (
        getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs
    ):
        yield (
            "args.activation_checkpointing_kwargs is not supported: use activation_checkpointing: {enable: true} and "
            "its other keys in parallel_config"
        )
    loading = args.accelerator_config
    if loading.dispatch_batches:
        yield "accelerator_config.dispatch_batches=True is not supported: every rank reads the samples of its replica"
    if not loading.even_batches:
        yield "accelerator_config.even_batches=False is not supported: all replicas need equally many batches"
    if optim_of(args) in _IN_BACKWARD:
        yield (
            f"args.optim={optim_of(args)} is not supported, since it steps inside backward: use an optimizer that "
            "steps after it"
        )


def optim_of(args: Any) -> str:
    """Return the name of the optimizer of ``args``."""
    return str(getattr(args.optim, "value", args.optim))


def wants_full_model(args: Any) -> bool:
    """Return whether the optimizer of ``args`` may need full matrices, so that it is made before ``initialize``."""
    return optim_of(args) not in _OF_ELEMENTS


def check_stages(config: ParallelConfig, trainer: Any) -> None:
    """Raise ConfigError for code of a trainer around the model's forward, which pipeline stages do not run."""
    stages, args = config.pipeline_parallel_size, trainer.args
    if stages == 1:
        return
    name = type(trainer).__name__
    reasons = {
        f"args.label_smoothing_factor={args.label_smoothing_factor}": bool(args.label_smoothing_factor),
        "args.neftune_noise_alpha": args.neftune_noise_alpha is not None,
        "compute_loss_func": trainer.compute_loss_func is not None,
        f"{name}.compute_loss": trainer.has_own("compute_loss"),
    }
    for what in (what for what, wanted in reasons.items() if wanted):
        raise ConfigError(
            f"{what} is not supported with pipeline_parallel_size={stages}, where the last stage computes the model's "
            "own loss\n  Use tensor parallelism with pipeline_parallel_size=1."
        )

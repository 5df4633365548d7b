"""The trainers of transformers and TRL with tensor, pipeline and data parallelism.

A trainer parallelizes its model, and its accelerator counts, shards, gathers and reduces over replicas.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import Seq2SeqTrainer, Trainer, TrainerControl

from autopar.api import initialize
from autopar.compat.peft import is_peft_model, tuner_layers
from autopar.config import ParallelConfig
from autopar.data_parallel.gradients import clip_grad_norm_
from autopar.data_parallel.optimizer_state import check_optimizer, refuse_unlike
from autopar.distributed.digest import extremes
from autopar.distributed.failures import waiting
from autopar.distributed.mesh import MPU
from autopar.distributed.process import accelerator
from autopar.errors import ConfigError
from autopar.integrations.trainer.arguments import (
    check_arguments,
    check_parallelized,
    check_stages,
    merge_arguments,
    parse_parallel_config,
    wants_full_model,
)
from autopar.integrations.trainer.checkpoints import CheckpointMixin
from autopar.integrations.trainer.replica_view import (
    ReplicaView,
    check_heads,
    count_replicas,
    has_fused_head,
    parallelize_reference,
    seed_by_replica,
    set_full_head,
)
from autopar.integrations.trainer.steps import StepMixin, base_of
from autopar.policy.schema import Policy
from autopar.swap import swap

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class ParallelTrainerMixin(ReplicaView, StepMixin, CheckpointMixin):
    """Mixin that makes a trainer of transformers, or of a subclass, parallel; it must be the first base class.

    An example is ``class ParallelSFTTrainer(ParallelTrainerMixin, SFTTrainer)`` for TRL. Arguments, callbacks, logs and
    folders are those of the trainer, with two additional arguments. The batch size in ``args`` is per replica. Every
    rank must call every method (``train``, ``evaluate``, ``predict``, ``save_model``).

    Args:
        parallel_config: Config for :func:`autopar.initialize`, or accelerate's ``ParallelismConfig``; None for a model
            that is already parallelized. ``args.bf16``, ``args.fp16``, ``args.max_grad_norm`` and
            ``args.activation_checkpointing`` are added to it.
        policy: Policy for ``initialize``.

    Raises:
        ConfigError: A parallelized model does not support an argument; nothing is changed.
    """

    def __init__(
        self, *args: Any, parallel_config: Any = None, policy: str | Path | Policy | None = None, **kwargs: Any
    ) -> None:
        self.autopar_given = parallel_config
        self.autopar_config: ParallelConfig | None = None  # None if the model is already parallelized
        super().__init__(*args, **kwargs)
        self._parallelize(policy)

    @property
    def mpu(self) -> MPU:
        """Sizes, ranks and process groups of the model."""
        return self.model.mpu

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and create an accelerator that does not wrap or cast the model."""
        self._check()
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            kind = "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
            raise ConfigError(
                f"accelerate's launcher was configured for {kind}, which would shard the model a second time\n"
                "  Launch without it; use zero: {stage: 1} or {stage: 3} (torch's FSDP2) in parallel_config."
            )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        arguments.pop("parallelism_config", None)
        return {**arguments, "mixed_precision": "no"}  # autopar handles precision

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing, since ``initialize`` moves the local shards."""

    def _check(self) -> None:
        model = self.model
        if model is None:
            raise ConfigError("model_init= is not supported\n  Pass model= instead.")
        if getattr(model, "hf_device_map", None) is not None:
            raise ConfigError(
                "the model must not be loaded with device_map, which spreads it over devices\n  Load it without "
                "device_map, or with autopar.from_pretrained."
            )
        adapted = hasattr(model, "peft_config") or next(tuner_layers(model), None) is not None
        if adapted and not is_peft_model(model):
            raise ConfigError(
                f"{type(model).__name__} has adapters of PEFT without a PeftModel around it, which is not supported\n"
                "  Use peft.get_peft_model(model, config) instead of model.add_adapter(config), or merge them first."
            )
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if world != self.args.world_size:
            without_gpu = not self.args.use_cpu and accelerator() is None
            fix = "Start with torchrun or accelerate launch, or set RANK, WORLD_SIZE and LOCAL_RANK."
            fix = "Write TrainingArguments(use_cpu=True)." if without_gpu else fix
            raise ConfigError(
                f"TrainingArguments count {self.args.world_size} processes, expected {world}"
                f"{', because this machine has no GPU' if without_gpu else ''}\n  {fix}"
            )
        state = vars(model).get("_autopar")
        if state is not None and self.autopar_given is not None:
            raise ConfigError(
                f"parallel_config is given, but the model is already parallelized ({model.mpu.sizes.in_words()})\n"
                "  Remove parallel_config, or pass the plain model."
            )
        given = None if state is not None else parse_parallel_config(self.autopar_given, self.args, world)
        check_arguments(self.args)
        self.autopar_config = None if given is None else merge_arguments(given, self.args)
        config: ParallelConfig = self.autopar_config or state.config
        count_replicas(self.args, config.data_parallel_size(world))

    def _parallelize(self, policy: Any) -> None:
        model = self.model
        self._set_signature_columns_if_needed()  # needs the plain model
        config = self.autopar_config
        check_stages(config or model._autopar.config, self)
        check_heads(config or model._autopar.config, base_of(model), self.args)
        if config is not None:
            sharded = max(config.tensor_parallel_size, config.expert_parallel_size) > 1
            full = sharded and wants_full_model(self.args)
            if self.optimizer is None and (config.zero_stage or config.precision != "fp32" or full):
                self.create_optimizer()
            initialize(model, config, policy=policy, optimizer=self.optimizer)
        parallelize_reference(getattr(self, "ref_model", None), model, base_of(model), policy)
        state = model._autopar
        check_parallelized(state.config, self.args, self.optimizer, state.dp.step)
        ours, theirs = model.mpu.device, self.args.device
        elsewhere = ours.type != "cpu" and theirs.index not in (None, ours.index)
        if ours.type != theirs.type or elsewhere:
            raise ConfigError(
                f"args.device must be {ours}, where the model is, got {theirs}\n  Let TrainingArguments start the "
                "process group first, or set use_cpu."
            )
        self.args._n_gpu = 1
        if state.config.fully_sharded and hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")  # generate calls an encoder without the outer model
        if has_fused_head(base_of(model)):
            set_full_head(base_of(model), model)
        self.accelerator.dataloader_config.dispatch_batches = False  # every rank reads the samples of its replica
        swap(self.accelerator, _Replicas, autopar_model=model, autopar_mpu=model.mpu)
        seed_by_replica(model, self.args)
        self._watch_norm()
        swap(self.callback_handler, _AgreedEvents, autopar_mpu=model.mpu)
        self.autopar_ready = True

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer of ``args``, and check that its steps are correct on shards."""
        given = self.optimizer
        made = super().create_optimizer(*args, **kwargs)
        if self.autopar_ready and given is None:
            state = self.model._autopar
            check_optimizer(made, None, self.model, state.config)
            refuse_unlike(made, self.model.parameters(), state.config)
        return made

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Share the flags that callbacks set on some ranks with all ranks, before the trainer reads them."""
        _agree(self.control, self.mpu)
        control = self.control
        calls_more = control.should_log or control.should_evaluate or control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if calls_more:  # on_log, on_evaluate or on_save may have set flags
            _agree(self.control, self.mpu)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples of one optimizer step over all replicas."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.mpu.dp.size)

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Return the replica's operations divided by its ranks, since the trainer sums over all ranks."""
        return super().floating_point_ops(inputs) / self.mpu.model.size


class ParallelTrainer(ParallelTrainerMixin, Trainer):
    """transformers' ``Trainer`` with tensor, pipeline and data parallelism.

    This class and one argument make a script parallel::

        trainer = ParallelTrainer(model=model, args=args, train_dataset=dataset, parallel_config="parallel.yaml")

    Every process must run the script. See :class:`~autopar.integrations.trainer.trainers.ParallelTrainerMixin`.
    """


class ParallelSeq2SeqTrainer(ParallelTrainerMixin, Seq2SeqTrainer):
    """The parallel ``Seq2SeqTrainer``; ``predict_with_generate`` yields every sample once."""


NAMES = tuple(f"Parallel{kind}Trainer" for kind in ("DPO", "GRPO", "KTO", "RLOO", "Reward", "SFT"))


def __getattr__(name: str) -> Any:
    """Create a parallel trainer of TRL at the first use of its name."""
    if name not in NAMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    plain = getattr(importlib.import_module("trl"), name.removeprefix("Parallel"))
    words = f"TRL's ``{plain.__name__}`` with a parallelized model: see :class:`ParallelTrainerMixin`."
    made = type(name, (ParallelTrainerMixin, plain), {"__module__": __name__, "__doc__": words})
    return globals().setdefault(name, made)


class _Replicas:
    """Mixin for an ``Accelerator`` that counts, shards and gathers over the replicas."""

    autopar_model: nn.Module
    _models: list[Any]
    _optimizers: list[Any]

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the parallelized model without wrapping it."""
        if model is not self.autopar_model:
            return super().prepare_model(model, *args, **kwargs)  # type: ignore[misc]
        if not any(known is model for known in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer without moving its state, which is already on the device of the parameters."""
        return super().prepare_optimizer(optimizer, device_placement=False)  # type: ignore[misc]

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if gradients overflowed in fp16 on any rank, so that no rank stepped."""
        return any(getattr(wrapper.optimizer, "step_was_skipped", False) for wrapper in self._optimizers)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass of the loss; in fp16 scale the loss first."""
        scaled = [w.optimizer.scale_loss for w in self._optimizers if hasattr(w.optimizer, "scale_loss")]
        for scale in scaled[:1]:
            loss = scale(loss)
        super().backward(loss, **kwargs)  # type: ignore[misc]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of all gradients of the full model; raise ConfigError if ``parameters`` are not complete."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = {id(parameter) for parameter in listed}
        named = self.autopar_model.named_parameters()
        missing = next((name for name, p in named if p.grad is not None and id(p) not in given), None)
        if missing is not None:
            raise ConfigError(
                f"clip_grad_norm_ must get all parameters of a parallelized model, got {len(given)} without {missing}\n"
                "  Pass model.parameters(), or call autopar.clip_grad_norm_(model, max_norm)."
            )
        return clip_grad_norm_(self.autopar_model, max_norm, norm_type)


class _AgreedEvents:
    """Mixin for a ``CallbackHandler``, for flags that the trainer reads right after an event."""

    autopar_mpu: MPU

    def on_substep_end(self, *args: Any, **kwargs: Any) -> Any:
        return _agree(super().on_substep_end(*args, **kwargs), self.autopar_mpu)  # type: ignore[misc]

    def on_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return _agree(super().on_evaluate(*args, **kwargs), self.autopar_mpu)  # type: ignore[misc]


def _agree(control: TrainerControl, mpu: MPU) -> TrainerControl:
    """Set each flag on all ranks if any rank has set it. A collective of the world, on the CPU."""
    if mpu.world_size > 1:
        with waiting(mpu, "the flags that callbacks set", range(mpu.world_size)):
            flags, _ = extremes([getattr(control, flag) for flag in _FLAGS], mpu.control)
        for flag, value in zip(_FLAGS, flags, strict=True):
            setattr(control, flag, bool(value))
    return control

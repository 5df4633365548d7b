"""The trainers of transformers with tensor, pipeline and data parallelism.

The model of one is initialized, and its accelerator sees the replicas.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import Seq2SeqTrainer, Trainer

from autopar.adapters import is_peft_model, tuner_layers
from autopar.api import initialize
from autopar.config import ParallelConfig
from autopar.data_parallel.optimizer_probe import refuse_unlike
from autopar.data_parallel.optimizer_state import check_optimizer
from autopar.distributed.mesh import MPU
from autopar.distributed.process import accelerator
from autopar.errors import ConfigError
from autopar.integrations.trainer.accelerator import show_replicas
from autopar.integrations.trainer.arguments import (
    check_arguments,
    check_parallelized,
    check_stages,
    merge_arguments,
    parse_parallel_config,
    wants_whole_model,
)
from autopar.integrations.trainer.callback_flags import CallbackFlagsMixin, agree_in_events
from autopar.integrations.trainer.checkpoints import CheckpointMixin
from autopar.integrations.trainer.evaluation import EvaluationMixin
from autopar.integrations.trainer.fused_head import give_whole_head, has_fused_head
from autopar.integrations.trainer.replica_view import (
    ReplicaView,
    check_heads,
    count_replicas,
    parallelize_reference,
    seed_by_replica,
)
from autopar.integrations.trainer.steps import StepMixin, base_of

if TYPE_CHECKING:
    from autopar.policy.schema import Policy


class ParallelTrainerMixin(ReplicaView, StepMixin, CallbackFlagsMixin, EvaluationMixin, CheckpointMixin):
    """Make a trainer of transformers, or one that derives from it, parallel: put it first among the base classes.

    ``class ParallelSFTTrainer(ParallelTrainerMixin, SFTTrainer)`` is TRL's. All arguments, callbacks, logs and folders
    are the trainer's own; these two come in addition.

    Args:
        parallel_config: what :func:`autopar.initialize` takes as ``config``, or accelerate's ``ParallelismConfig``.
            None for a model that is parallelized already. ``args.bf16``, ``args.fp16``, ``args.max_grad_norm`` and
            ``args.activation_checkpointing`` are added to it.
        policy: what ``initialize`` takes.

    The batch size of ``args`` is that of a replica. Every rank calls every method (``train``, ``evaluate``,
    ``predict``, ``save_model``).

    Raises:
        ConfigError: what cannot be done with a parallelized model, before anything is changed.
    """

    def __init__(
        self, *args: Any, parallel_config: Any = None, policy: str | Path | Policy | None = None, **kwargs: Any
    ) -> None:
        self.autopar_given = parallel_config
        self.autopar_config: ParallelConfig | None = None  # None: the model is parallelized already
        super().__init__(*args, **kwargs)
        self._parallelize(policy)

    @property
    def mpu(self) -> MPU:
        """Sizes, ranks and process groups of the model."""
        mpu: MPU = self.model.mpu
        return mpu

    # -- while transformers' __init__ runs ----------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and make an accelerator that neither wraps nor casts the model."""
        self._check()
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            kind = "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
            raise ConfigError(
                f"accelerate's launcher was configured for {kind}, which would shard the model a second time\n"
                "  Launch without it; parallel_config has zero: {stage: 1} and {stage: 3} (torch's FSDP2)."
            )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        arguments.pop("parallelism_config", None)
        return {**arguments, "mixed_precision": "no"}  # initialize's precision does it

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: ``initialize`` moves this rank's share."""

    def _check(self) -> None:
        model = self.model
        if model is None:
            raise ConfigError("model_init= makes a new plain model for each train(): give model=")
        if getattr(model, "hf_device_map", None) is not None:
            raise ConfigError(
                "the model was loaded with device_map, which spreads it over devices: load it without, or with "
                "autopar.from_pretrained"
            )
        if not is_peft_model(model) and _has_adapters(model):
            raise ConfigError(
                f"{type(model).__name__} has adapters of PEFT without a PeftModel around it, and the folders of a "
                "parallel trainer would not keep them apart from the model:\n  give peft.get_peft_model(model, config)"
                " instead of model.add_adapter(config), or merge them first"
            )
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if world != self.args.world_size:
            without_gpu = not self.args.use_cpu and accelerator() is None
            fix = (
                "Write TrainingArguments(use_cpu=True)."
                if without_gpu
                else ("Start with torchrun or accelerate launch, or set RANK, WORLD_SIZE and LOCAL_RANK.")
            )
            raise ConfigError(
                f"TrainingArguments count {self.args.world_size} processes, expected {world}"
                f"{', because this machine has no GPU' if without_gpu else ''}\n  {fix}"
            )
        state = vars(model).get("_autopar")
        if state is None:
            self.autopar_config = parse_parallel_config(self.autopar_given, self.args, world)
            check_arguments(self.args)
            self.autopar_config = merge_arguments(self.autopar_config, self.args)
        elif self.autopar_given is not None:
            raise ConfigError(
                f"parallel_config is given, and the model is parallelized already ({model.mpu.sizes.in_words()}): "
                "leave parallel_config out, or give the plain model."
            )
        else:
            check_arguments(self.args)
        config: ParallelConfig = self.autopar_config or state.config
        count_replicas(self.args, config.data_parallel_size(world))

    # -- after it -----------------------------------------------------------------------------------------------------

    def _parallelize(self, policy: Any) -> None:
        if self.model_init is not None:
            raise ConfigError("model_init= makes a new plain model for each train(): give model=")
        model = self.model
        self._set_signature_columns_if_needed()  # of the plain model
        config = self.autopar_config
        check_stages(config or model._autopar.config, self)
        check_heads(config or model._autopar.config, base_of(model), self.args)
        if config is not None:
            sharded = max(config.tensor_parallel_size, config.expert_parallel_size) > 1
            whole = sharded and wants_whole_model(self.args)
            if self.optimizer is None and (config.zero_stage or config.precision != "fp32" or whole):
                self.create_optimizer()
            initialize(model, config, policy=policy, optimizer=self.optimizer)
        parallelize_reference(getattr(self, "ref_model", None), model, base_of(model), policy)
        state = model._autopar
        check_parallelized(state.config, self.args, self.optimizer, state.step)
        ours, theirs = model.mpu.device, self.args.device
        elsewhere = ours.type != "cpu" and theirs.index not in (None, ours.index)
        if ours.type != theirs.type or elsewhere:
            raise ConfigError(
                f"the model computes on {ours}, and args.device is {theirs}: let "
                "TrainingArguments start the process group before anything else does, or set use_cpu"
            )
        self.args._n_gpu = 1
        if state.config.fully_sharded and hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")  # an encoder is called without the model around it
        if has_fused_head(base_of(model)):
            give_whole_head(base_of(model), model)
        show_replicas(self.accelerator, model, model.mpu)
        seed_by_replica(model, self.args)
        self._watch_norm()
        agree_in_events(self.callback_handler, model.mpu)
        self.autopar_ready = True

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer of ``args`` and check that its steps are right on shards."""
        given = self.optimizer
        made = super().create_optimizer(*args, **kwargs)
        if self.autopar_ready and given is None:
            state = self.model._autopar
            check_optimizer(made, None, self.model, state.config)
            refuse_unlike(made, self.model.parameters(), state.config)
        return made

    # -- what the trainer counts --------------------------------------------------------------------------------------

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of one optimizer step, of all replicas."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.mpu.dp.size)

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Return this rank's part of the operations of its replica; the trainer sums over all ranks."""
        return super().floating_point_ops(inputs) / self.mpu.model.size


def _has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") or next(tuner_layers(model), None) is not None


class ParallelTrainer(ParallelTrainerMixin, Trainer):
    """transformers' ``Trainer`` with a model that is tensor, pipeline and data parallel.

    A script becomes parallel by this class and one argument::

        trainer = ParallelTrainer(model=model, args=args, train_dataset=dataset, parallel_config="parallel.yaml")

    Every process runs the script. See :class:`~autopar.integrations.trainer.trainers.ParallelTrainerMixin`.
    """


class ParallelSeq2SeqTrainer(ParallelTrainerMixin, Seq2SeqTrainer):
    """``Seq2SeqTrainer``, as :class:`ParallelTrainer`; ``predict_with_generate`` gives every sample once."""

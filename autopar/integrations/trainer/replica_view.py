"""Let the methods of TRL's trainers, which sample, gather rewards and slice them, count replicas as processes.

TRL's trainers shard prompts over processes, sample completions, gather the rewards of a group, and slice them by
``accelerator.process_index``. All ranks of a replica have identical prompts and completions. So replicas count as
processes where trainers slice and seed, and in the numbers of samples that arguments derive.

Trainers compute log-probabilities from ``get_output_embeddings().weight``, a chunk of tokens at a time, on every rank
from identical hidden states. So the weight is gathered first, and each rank keeps its shard of the gradient.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn

from autopar.api import initialize
from autopar.config import ParallelConfig
from autopar.distributed import collectives
from autopar.distributed.digest import extremes, of_text, of_values
from autopar.distributed.failures import waiting
from autopar.errors import ConfigError, ConsistencyError
from autopar.integrations.accelerate import meaning
from autopar.integrations.trainer.steps import ParallelBase
from autopar.swap import bind, unbind

_HOW = (
    "  The ranks of a replica must have the same samples. In methods of the trainer, slice gathered tensors by\n"
    "  accelerator.process_index and num_processes, which count replicas there. args.process_index, accelerate's\n"
    "  state and torch.distributed.get_rank() count ranks."
)

_FUSED = "fused_lm_head"  # argument of TRL's forward that multiplies by the head
_OF_REFERENCE = (
    *("tensor_parallel_size", "expert_parallel_size", "expert_dispatch", "cpu_transport", "reduce_dtype", "policy"),
    *("consistency_check", "consistency_inputs", "consistency_parameters"),
)


class ReplicaView(ParallelBase):
    """Steps of a trainer in which ``accelerator.process_index`` is the index of the replica."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a step of the trainer, which may sample, score and slice."""
        with meaning(self.model.mpu, deals=True):
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch; a trainer may sample it first."""
        with meaning(self.model.mpu, deals=True):
            return super().prediction_step(*args, **kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        made = super()._prepare_inputs(inputs)
        samples = self.has_own("_generate_and_score_completions")  # which compares the batch
        return self._same_in_replica(made) if self.has_own("_prepare_inputs") and not samples else made

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return self._same_in_replica(super()._generate_and_score_completions(inputs))  # type: ignore[misc]

    def _same_in_replica(self, made: Any) -> Any:
        """Return a batch made by the trainer's code; raise ConsistencyError if it differs within the replica."""
        mpu = self.model.mpu if self.autopar_ready else None
        if mpu is None or mpu.model.size == 1:
            return made
        name = f"{type(self).__name__}'s batch"
        found = {str(key): of_values(value) for key, value in made.items()} if isinstance(made, Mapping) else {}
        with waiting(mpu, f"the comparison of {name}", mpu.model.ranks):
            largest, smallest = extremes([of_text(str(sorted(found.items())))], mpu.model.group)
            if largest != smallest:
                every = collectives.gathered(found, mpu.model.group)
                keys = sorted({key for one in every for key in one})
                unlike = ", ".join(key for key in keys if len({one.get(key) for one in every}) > 1)
                raise ConsistencyError(f"{name} has different {unlike} on the ranks of a replica.\n{_HOW}")
        return made

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        file = Path(checkpoint or "", "entropy_ctrl_state.json")  # from GRPO with use_adaptive_entropy
        if checkpoint is not None and file.is_file():
            state = json.loads(file.read_text())
            self.entropy_coef, self._last_world_entropy = state["entropy_coef"], state["last_world_entropy"]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._of_first_rank(super()._calculate_rewards(*args, **kwargs))  # type: ignore[misc]

    def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._of_first_rank(super()._calculate_rewards_from_functions(*args, **kwargs))  # type: ignore[misc]

    def _of_first_rank(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the rewards of the replica's first rank, since a reward function may draw or call a random judge."""
        mpu, rewards = self.model.mpu, rewards.contiguous()
        with waiting(mpu, "rewards", mpu.model.ranks):
            collectives.broadcast(rewards, mpu.model)
        return rewards


def count_replicas(args: Any, replicas: int) -> None:
    """Recompute the numbers of samples that ``args`` derived from the number of processes, for ``replicas``.

    Raises:
        ConfigError: The batches of all replicas are not divisible by the size of a group of completions.
    """
    steps, group = (getattr(args, name, None) for name in ("steps_per_generation", "num_generations"))
    if steps is None or group is None or getattr(args, "generation_batch_size", None) is None:
        return
    size = args.per_device_train_batch_size * replicas
    if args.generation_batch_size not in (size * steps, args.per_device_train_batch_size * args.world_size * steps):
        return  # a user-defined size
    sizes = {"per_device_train_batch_size": (args.per_device_train_batch_size, steps, group)}
    if args.eval_strategy != "no":
        of_eval = getattr(args, "num_generations_eval", None) or group
        sizes["per_device_eval_batch_size"] = (args.per_device_eval_batch_size, 1, of_eval)
    for name, (of_replica, times, wanted) in sizes.items():
        if of_replica * replicas * times % wanted:
            more = f" x {times} steps_per_generation" if times > 1 else ""
            raise ConfigError(
                f"{name}={of_replica} x {replicas} replicas{more} = {of_replica * replicas * times} samples must be "
                f"divisible by the {wanted} completions of each prompt\n  The {args.world_size // replicas} ranks of a "
                f"replica share their samples. Use a multiple of {wanted}."
            )
    args.generation_batch_size = size * steps


def seed_by_replica(model: Any, args: Any) -> None:
    """Seed by replica if a trainer has seeded by rank, so that replicas sample like processes."""
    if model.mpu.world_size > 1 and extremes([torch.initial_seed() != args.seed], None)[0] == [1]:
        set_seed(args.seed + model.mpu.dp.rank)


def check_heads(config: ParallelConfig, model: Any, args: Any) -> None:
    """Raise ConfigError if log-probabilities of full sequences or a synchronized reference are not supported."""
    parts = {"context_parallel_size": config.context_parallel_size > 1, "sequence_parallel": config.sequence_parallel}
    for key in (key for key, wanted in parts.items() if wanted and has_fused_head(model)):
        raise ConfigError(
            f"{key} is not supported with a trainer of TRL, which computes log-probabilities of full sequences\n"
            "  Use tensor_parallel_size and replicas."
        )
    if getattr(args, "sync_ref_model", False) and config.fully_sharded:
        raise ConfigError(
            f"args.sync_ref_model is not supported with zero: {{stage: {config.zero_stage}}}, where FSDP2 shards the "
            "weights\n  Use zero: {stage: 1}."
        )


def parallelize_reference(reference: Any, model: Any, like: Any, policy: Any) -> None:
    """Parallelize a trainer's reference model like ``model``, if it has the class of ``like``."""
    if not isinstance(reference, nn.Module) or type(reference) is not type(like):
        return
    if "_autopar" not in vars(reference):
        config: ParallelConfig = model._autopar.config
        if config.precision != "fp32":
            reference.to({"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision])
        shared = {name: getattr(config, name) for name in _OF_REFERENCE}  # without settings of training
        initialize(reference, ParallelConfig(**shared), policy=policy)
    if has_fused_head(reference):
        set_full_head(reference, reference)


def has_fused_head(model: nn.Module) -> bool:
    """Return whether the model's forward was replaced by a function with the argument ``fused_lm_head``."""
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and _FUSED in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def set_full_head(model: Any, root: Any) -> None:
    """Let a forward with ``fused_lm_head=True`` use the full weight of the head of ``model``, which is in ``root``."""
    inner = vars(model)["forward"].__func__

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get(_FUSED):
            return inner(self, *args, **kwargs)
        head = _full_head(self, root)
        bind(self, "the fused head", get_output_embeddings=lambda _: head)
        try:
            return inner(self, *args, **kwargs)
        finally:
            unbind(self, "the fused head")

    model.forward = MethodType(forward, model)


def _full_head(model: Any, root: Any) -> SimpleNamespace:
    """Return the weight and bias of the head, gathered over tp. A collective of tp in the forward only."""
    head = model.get_output_embeddings()
    state = root._autopar
    names = {id(parameter): name for name, parameter in root.named_parameters()}

    def gathered(tensor: torch.Tensor | None) -> torch.Tensor | None:
        name = None if tensor is None else names.get(id(tensor))
        layout = None if name is None else state.plan.tensors[state.plan.canonical(name)].layout
        return tensor if tensor is None or layout is None else collectives.gather(tensor, state.mpu.tp, layout, 0)

    return SimpleNamespace(weight=gathered(head.weight), bias=gathered(getattr(head, "bias", None)))

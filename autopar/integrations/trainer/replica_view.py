"""Replicas as the processes that a trainer counts in its methods, which sample, gather rewards and slice them.

TRL's trainers deal out prompts to processes, sample completions, gather the rewards of a group and take their slice by
``accelerator.process_index``. All ranks of a replica have the same prompts and completions. So a process is a replica
where trainers slice and seed, and in the numbers of samples that their arguments derive.

They compute log-probabilities of some tokens at a time from ``get_output_embeddings().weight``, on every rank from the
same hidden states: so the weight is gathered first, and each rank keeps its shard of the gradient.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from torch import nn

from autopar.api import initialize
from autopar.config import ParallelConfig
from autopar.distributed import collectives
from autopar.distributed.digest import extremes, of_text, of_values
from autopar.distributed.failures import waiting
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.process import device_of_numbers
from autopar.errors import ConfigError, ConsistencyError
from autopar.integrations.accelerate import meaning
from autopar.integrations.trainer.steps import ParallelBase
from autopar.swap import bind, unbind

_HOW = (
    "  The ranks of a replica hold the same samples. In its own methods a trainer slices what it has gathered by\n"
    "  accelerator.process_index and num_processes, which count replicas there; args.process_index, a state of\n"
    "  accelerate and torch.distributed.get_rank() count ranks."
)

_FUSED = "fused_lm_head"  # argument of a forward of TRL that multiplies by the head itself
_OF_REFERENCE = (
    *("tensor_parallel_size", "expert_parallel_size", "expert_dispatch", "cpu_transport", "reduce_dtype", "policy"),
    *("consistency_check", "consistency_inputs", "consistency_parameters"),
)


class ReplicaView(ParallelBase):
    """A trainer's own steps, in which ``accelerator.process_index`` is the replica."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a step of the trainer, which may sample, score and slice in it."""
        with meaning(self.model.mpu, deals=True):
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch, which a trainer may sample first."""
        with meaning(self.model.mpu, deals=True):
            return super().prediction_step(*args, **kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        made = super()._prepare_inputs(inputs)
        samples = self.has_own("_generate_and_score_completions")  # compared there
        return self._same_in_replica(made) if self.has_own("_prepare_inputs") and not samples else made

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return self._same_in_replica(super()._generate_and_score_completions(inputs))  # type: ignore[misc]

    def _same_in_replica(self, made: Any) -> Any:
        """Return a batch of the trainer's own code; raise ConsistencyError if it differs within the replica."""
        mpu = self.model.mpu if self.autopar_ready else None
        if mpu is None or mpu.model.size == 1:
            return made
        name = f"{type(self).__name__}'s batch"
        found = {str(key): of_values(value) for key, value in made.items()} if isinstance(made, Mapping) else {}
        with waiting(mpu, f"the comparison of {name}", mpu.model.ranks):
            largest, smallest = extremes([of_text(str(sorted(found.items())))], mpu.model.group)
            if largest != smallest:
                every: list[dict[str, int]] = [{}] * mpu.model.size
                dist.all_gather_object(every, found, group=mpu.model.group)
                keys = sorted({key for one in every for key in one})
                unlike = ", ".join(key for key in keys if len({one.get(key) for one in every}) > 1)
                raise ConsistencyError(f"{name} has other {unlike} on the ranks of a replica.\n{_HOW}")
        return made

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        file = Path(checkpoint or "", "entropy_ctrl_state.json")  # of GRPO with use_adaptive_entropy
        if checkpoint is not None and file.is_file():
            state = json.loads(file.read_text())
            self.entropy_coef, self._last_world_entropy = state["entropy_coef"], state["last_world_entropy"]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._of_first_rank(super()._calculate_rewards(*args, **kwargs))  # type: ignore[misc]

    def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._of_first_rank(super()._calculate_rewards_from_functions(*args, **kwargs))  # type: ignore[misc]

    def _of_first_rank(self, rewards: torch.Tensor) -> torch.Tensor:
        """Take the rewards of a replica's first rank: a function may draw, or query a judge with another answer."""
        mpu, rewards = self.model.mpu, rewards.contiguous()
        with waiting(mpu, "rewards", mpu.model.ranks):
            collectives.broadcast(rewards, mpu.model)
        return rewards


def count_replicas(args: Any, replicas: int) -> None:
    """Let the numbers of samples that ``args`` derived from the number of processes count ``replicas``.

    Raises:
        ConfigError: A group of completions does not fit into the batches of all replicas.
    """
    steps, group = (getattr(args, name, None) for name in ("steps_per_generation", "num_generations"))
    if steps is None or group is None or getattr(args, "generation_batch_size", None) is None:
        return
    size = args.per_device_train_batch_size * replicas
    if args.generation_batch_size not in (size * steps, args.per_device_train_batch_size * args.world_size * steps):
        return  # counts something else
    sizes = {"per_device_train_batch_size": (args.per_device_train_batch_size, steps, group)}
    if args.eval_strategy != "no":
        of_eval = getattr(args, "num_generations_eval", None) or group
        sizes["per_device_eval_batch_size"] = (args.per_device_eval_batch_size, 1, of_eval)
    for name, (of_replica, times, wanted) in sizes.items():
        if of_replica * replicas * times % wanted:
            more = f" x {times} steps_per_generation" if times > 1 else ""
            raise ConfigError(
                f"{name}={of_replica} x {replicas} replicas{more} = {of_replica * replicas * times} samples, and "
                f"{wanted} completions of each prompt do not divide them.\n  The ranks of a replica hold the same "
                f"samples, so its {args.world_size // replicas} ranks count once: write a multiple of {wanted}."
            )
    args.generation_batch_size = size * steps


def seed_by_replica(model: Any, args: Any) -> None:
    """Seed by the replica where a trainer has seeded by the rank, so that replicas sample as processes would."""
    if model.mpu.world_size == 1:
        return
    differs = torch.tensor([float(torch.initial_seed() != args.seed)], device=device_of_numbers())
    all_reduce(differs, dist.ReduceOp.MAX)
    if differs.item():
        set_seed(args.seed + model.mpu.dp.rank)


def check_heads(config: ParallelConfig, model: Any, args: Any) -> None:
    """Raise ConfigError where log-probabilities of full sequences, or a synchronized reference, are not supported."""
    parts = {"context_parallel_size": config.context_parallel_size > 1, "sequence_parallel": config.sequence_parallel}
    for key in (key for key, wanted in parts.items() if wanted and has_fused_head(model)):
        raise ConfigError(
            f"{key} with a trainer of TRL: it takes log-probabilities of whole sequences from the last hidden states, "
            "of which a rank would have a part\n  Use tensor_parallel_size and replicas."
        )
    if getattr(args, "sync_ref_model", False) and config.fully_sharded:
        raise ConfigError(
            f"args.sync_ref_model with zero: {{stage: {config.zero_stage}}}: FSDP2 holds the weights in another form "
            "than the reference model has\n  Use zero: {stage: 1}."
        )


def parallelize_reference(reference: Any, model: Any, like: Any, policy: Any) -> None:
    """Shard a trainer's reference model as ``model``, if it is of the same class as ``like``."""
    if not isinstance(reference, nn.Module) or type(reference) is not type(like):
        return
    if "_autopar" not in vars(reference):
        config: ParallelConfig = model._autopar.config
        if config.precision != "fp32":
            reference.to({"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision])
        shared = {name: getattr(config, name) for name in _OF_REFERENCE}  # no memory of gradients or an optimizer
        initialize(reference, ParallelConfig(**shared), policy=policy)
    if has_fused_head(reference):
        set_full_head(reference, reference)


def has_fused_head(model: nn.Module) -> bool:
    """Return whether the model's forward was replaced by one that takes ``fused_lm_head``."""
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and _FUSED in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def set_full_head(model: Any, root: Any) -> None:
    """Give a forward with ``fused_lm_head=True`` the full weight of the head of ``model``, which is in ``root``."""
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
    """Return the head's weight and bias, all-gathered over tp. A collective of the forward alone."""
    head = model.get_output_embeddings()
    state = root._autopar
    names = {id(parameter): name for name, parameter in root.named_parameters()}

    def gathered(tensor: torch.Tensor | None) -> torch.Tensor | None:
        name = None if tensor is None else names.get(id(tensor))
        layout = None if name is None else state.plan.tensors[state.plan.canonical(name)].layout
        return tensor if tensor is None or layout is None else collectives.gather(tensor, state.mpu.tp, layout, 0)

    return SimpleNamespace(weight=gathered(head.weight), bias=gathered(getattr(head, "bias", None)))

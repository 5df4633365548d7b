"""Plan the memory of a configuration on every rank, before the run: ``plan_memory``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autopar.config import ParallelConfig
from autopar.errors import ConfigError
from autopar.policy.schema import Policy
from autopar.stored import as_plain
from autopar.tools.planner.candidate import Candidate, RankMemory
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.model_states import RankBytes
from autopar.tools.planner.planned_model import PlannedModel


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a configuration.

    Attributes:
        ranks: The exact bytes of weights, gradients, optimizer state and buffers by ``(pp, dp, tp)``. With context
            parallelism ``dp`` counts all dp x cp ranks, cp first.
        kept: The peak bytes by ``(pp, dp, tp)`` that wait for the backward: tensors saved by autograd, and sent
            outputs. The numbers are exact for micro-batches of one size.
        stages: The memory of each rank of the pipeline, on the tp and dp ranks with the highest memory.
    """

    ranks: Mapping[tuple[int, int, int], RankBytes]
    kept: Mapping[tuple[int, int, int], int]
    stages: tuple[RankMemory, ...]

    @property
    def peak(self) -> RankMemory:
        """Memory of the rank with the highest total."""
        return max(self.stages, key=lambda memory: memory.total)

    def __str__(self) -> str:
        lines = []
        for rank, memory in enumerate(self.stages):
            parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.parts().items() if size >= 5e6)
            lines.append(f"pp rank {rank}: {memory.total / 1e9:.2f} GB: {parts}")
        return "\n".join(lines)


def candidate_of(config: ParallelConfig, replicas: int, batch: int) -> Candidate:
    """Return the candidate of a configuration; ``batch``: the samples of a replica in a step."""
    size, count = config.pipeline.microbatch_size, config.pipeline.num_microbatches
    size = min(size or batch, batch) if count is None else -(-batch // min(count, batch))  # the largest one
    count = -(-batch // size) if count is None else min(count, batch)
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    return Candidate(
        *(tp, pp, replicas, config.pipeline.schedule, size, count, config.zero_stage),
        config.activation_checkpointing,
        cp=config.context_parallel_size,
        sequence_parallel=config.sequence_parallel and tp > 1,
        ep=config.expert_parallel_size,
        saves=config.checkpoint_saves,
        every=config.checkpoint_every,
    )


def plan_memory(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    sequence: int,
    batch: int = 1,
    gpus: int | None = None,
    optimizer: str = "adamw",
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    device: str = "cuda",
) -> MemoryPlan:
    """Plan the memory of each rank for a step of ``execute_pipeline``, without process groups or weights.

    The bytes of weights, gradients and optimizer state are exact. Activations are the tensors that each rank's forward
    saves, counted on the meta device at these sizes. Temporary memory is the maximum over blocks. Experts get equally
    many tokens.

    Args:
        model: A Hugging Face model, in memory or built inside :func:`autopar.lazy_init`. It is only read. PEFT
            adapters and quantized weights are counted.
        config: The configuration, as in :func:`autopar.initialize`.
        sequence: The tokens of each sample.
        batch: The samples of a replica in a step.
        gpus: The number of ranks. Default: one replica, or all replicas that share experts.
        optimizer: ``adamw``, ``adam``, ``sgd`` or ``sgd-momentum``, as passed to ``initialize``.
        policy: The policy, as in :func:`autopar.initialize`.
        device: ``cuda``, where CUDA and NCCL reserve memory, or ``cpu``.

    Raises:
        ConfigError, PolicyError, UnsupportedModelError: As in ``initialize``, or if no dry run is possible.
    """
    parsed = ParallelConfig.parse(config)
    if batch < 1:
        raise ConfigError(f"batch must be at least 1, not {batch}")
    with as_plain(model):
        tp, pp, cp = parsed.tensor_parallel_size, parsed.pipeline_parallel_size, parsed.context_parallel_size
        if gpus is None:
            replicas = max(parsed.expert_parallel_size // tp, 1)
        else:
            replicas = ParallelConfig.parse(parsed, gpus).data_parallel_size(gpus)
        planned = PlannedModel(
            model,
            parsed.policy or None if policy is None else policy,
            sequence=sequence,
            precision=parsed.precision,
            optimizer=optimizer,
            loss_chunk=parsed.loss_chunk,
            method=parsed.context_parallel_method,
            dispatch=parsed.expert_dispatch,
        )
        if parsed.activation_checkpointing:
            planned.check_checkpointing()
        candidate = candidate_of(parsed, replicas, batch)
        estimator = Estimator(planned, find_node(), device=device, given=parsed)
        stages, states = planned.stages(parsed), planned.states(tp, candidate.ep)
        ranks = {
            (p, d, t): states.of_rank(stages, parsed, t, p, d, candidate.replicas)
            for p, d, t in itertools.product(range(pp), range(candidate.replicas), range(tp))
        }
        first = list(range(tp))
        if candidate.ep == 1:  # count equal shards only once
            tensors = planned.plans.tensors(tp).tensors.values()
            shapes = [[tensor.local_shape(rank) for tensor in tensors] for rank in first]
            first = [shapes.index(own) for own in shapes]
        places = cp * candidate.sharers  # cp ranks, then replicas that share experts
        found = {(t, c): estimator.kept(candidate, first[t], c % cp, c // cp) for t in range(tp) for c in range(places)}
        kept = {(p, d, t): found[t, d % places][p] for p, d, t in ranks}
        return MemoryPlan(ranks, kept, estimator.memory(candidate))

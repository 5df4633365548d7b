"""Candidate configurations of a run, and their estimates: memory per rank, time per step, bytes sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from autopar.config import ParallelConfig
from autopar.tools.planner.network import DATA


class Rows(NamedTuple):
    """The sizes that shard sequences and experts, and one rank of them. The first rank, the default, has the most.

    Attributes:
        ep: The number of ranks over which experts are distributed; 1: each expert is sharded over tp.
        sharer: The number of the rank's replica among the replicas that share experts.
    """

    tp: int
    cp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    tp_rank: int = 0
    cp_rank: int = 0
    sharer: int = 0


def mesh_words(tp: int, cp: int, pp: int, dp: int) -> str:
    """Return a mesh in words, with cp only if its size is above 1."""
    return f"tp {tp}{f' x cp {cp}' if cp > 1 else ''} x pp {pp} x dp {dp}"


@dataclass(frozen=True)
class Candidate:
    """A mesh, and the settings for batches.

    Attributes:
        schedule: The pipeline schedule; ``1f1b`` with one stage.
        microbatch, microbatches: The samples of a micro-batch, and the micro-batches of a replica in a step.
        saves: The operations whose results recomputed blocks keep.
        ep: The number of ranks over which experts are distributed, a multiple of tp; 1: experts are sharded over tp.
        every: The interval of recomputed blocks: one block out of this many, with ``checkpointing``.
        chunks: The number of stages per rank; 0: the default of the schedule.
    """

    tp: int
    pp: int
    dp: int
    schedule: str
    microbatch: int
    microbatches: int
    zero: int
    checkpointing: bool
    cp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    saves: tuple[str, ...] = ()
    every: int = 1
    chunks: int = 0

    @property
    def gpus(self) -> int:
        """The number of ranks of the mesh."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same shard."""
        return self.dp * self.cp

    @property
    def sharers(self) -> int:
        """The number of replicas that share the experts."""
        return max(self.ep // self.tp, 1)

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.replicas // self.sharers

    @property
    def fully_sharded(self) -> bool:
        """Whether FSDP2 shards the weights over the replicas."""
        return self.zero >= 2

    @property
    def exchanges(self) -> tuple[int, int]:
        """The number of FSDP2's all-gathers of a weight in a step, and of reduce-scatters of its gradient.

        ZeRO-3 gathers before each forward and backward, and ZeRO-2 before each forward. With pipeline stages, ZeRO-2
        gathers once per step, and both reduce gradients once per step.
        """
        count = self.microbatches
        if self.pp == 1:
            return count * (self.zero - 1), count
        return 2 * count if self.zero == 3 else 1, 1

    @property
    def rows(self) -> Rows:
        """The placement of sequences and experts, on the first rank."""
        return Rows(self.tp, self.cp, self.sequence_parallel, self.ep)

    def config(self, precision: str) -> ParallelConfig:
        """Return the parsed configuration."""
        return ParallelConfig.parse(self.sections(precision))

    def sections(self, precision: str) -> dict[str, Any]:
        """Return the configuration in the form of a config file."""
        sizes: dict[str, Any] = {"tensor_parallel_size": self.tp, "pipeline_parallel_size": self.pp}
        sizes |= {"context_parallel_size": self.cp} if self.cp > 1 else {}
        sizes |= {"sequence_parallel": True} if self.sequence_parallel else {}
        sizes |= {"expert_parallel_size": self.ep} if self.ep > 1 else {}
        pipeline: dict[str, Any] = {"schedule": self.schedule, "microbatch_size": self.microbatch}
        pipeline |= {"chunks": self.chunks} if self.chunks else {}
        again: dict[str, Any] = {"enable": True}
        again |= {"every": self.every} if self.every > 1 else {}
        again |= {"save": [*self.saves]} if self.saves else {}
        found: dict[str, Any] = {"model_parallelism": sizes, "pipeline": pipeline}
        found |= {"zero": {"stage": self.zero}} if self.zero else {}
        found |= {"precision": {"dtype": precision}} if precision != "fp32" else {}
        return found | ({"activation_checkpointing": again} if self.checkpointing else {})

    def __str__(self) -> str:
        parts = [mesh_words(self.tp, self.cp, self.pp, self.dp)]
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += [f"ep {self.ep}"] if self.ep > 1 else []
        parts += [self.schedule + (f" of {self.chunks}" if self.chunks else "")] if self.pp > 1 else []
        parts += [f"{self.microbatches} x {self.microbatch}"]
        parts += [f"ZeRO-{self.zero}"] if self.zero else []
        some = "checkpointing" + (f" 1 of {self.every}" if self.every > 1 else "")
        parts += [some + (f" but {' and '.join(self.saves)}" if self.saves else "")] * self.checkpointing
        return ", ".join(parts)


@dataclass(frozen=True)
class RankMemory:
    """Bytes by category, on the rank of a stage with the highest memory.

    Attributes:
        activations, logits: The saved tensors of all micro-batches that wait for their backward.
        work: The temporary bytes of the running operation.
        buffers: The bytes of model buffers, messages and FSDP2's gathered weights.
        step: The temporary bytes of the optimizer step or of a gradient bucket, whichever is larger.
        reserve: The bytes of CUDA and NCCL.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    work: int
    buffers: int
    step: int
    reserve: int

    @property
    def total(self) -> int:
        """The peak bytes, in the backward or in the optimizer step."""
        states = self.weights + self.gradients + self.optimizer + self.buffers + self.reserve
        return states + max(self.activations + self.logits + self.work, self.step)

    def parts(self) -> dict[str, int]:
        """Return the bytes by category at the peak."""
        found = asdict(self)
        step = found.pop("step")
        if step > self.activations + self.logits + self.work:
            found.update(activations=0, logits=0, work=step)
        return found


@dataclass(frozen=True)
class Estimate:
    """The estimate of a candidate.

    Attributes:
        memory: The memory of each rank of the pipeline.
        time, parts: The seconds of a step, in total and by purpose.
        hidden: The seconds of communication that overlap with work, by axis.
        bubble: The fraction of the pipeline's time in which ranks wait.
        bytes: The bytes that a rank sends in a step, by axis; the maximum over ranks.
        flops: The model's FLOPs in a step, without recomputation.
        mfu: The model FLOPs utilization, a fraction of the GPUs' peak.
        tokens_per_second: The tokens per second of all GPUs.
        stored, save, load: The bytes of a checkpoint with optimizer state, and the seconds to save and to load it.
    """

    candidate: Candidate
    memory: tuple[RankMemory, ...]
    time: float = 0.0
    parts: tuple[tuple[str, float], ...] = ()
    hidden: tuple[tuple[str, float], ...] = ()
    bubble: float = 0.0
    bytes: tuple[tuple[str, int], ...] = ()
    flops: int = 0
    mfu: float = 0.0
    tokens_per_second: float = 0.0
    stored: int = 0
    save: float = 0.0
    load: float = 0.0

    @property
    def time_range(self) -> tuple[float, float]:
        """The range of a step's seconds, from the spread of published runs around their estimates."""
        spread = 1 + DATA["assumed"]["spread"]["time"]
        return self.time / spread, self.time * spread

    @property
    def memory_range(self) -> tuple[float, float]:
        """The peak bytes over all ranks, without and with fragmentation."""
        return float(self.peak.total), self.peak.total * (1 + DATA["assumed"]["spread"]["memory"])

    @property
    def time_without_overlap(self) -> float:
        """The seconds of a step without any overlap."""
        return self.time + sum(seconds for _, seconds in self.hidden)

    @property
    def peak(self) -> RankMemory:
        """The memory of the rank with the highest total."""
        return max(self.memory, key=lambda memory: memory.total)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            **asdict(self.candidate),
            "memory": [{**memory.parts(), "total": memory.total} for memory in self.memory],
            "memory_range": self.memory_range,
            "step_time": self.time,
            "step_time_range": self.time_range,
            "step_time_without_overlap": self.time_without_overlap,
            "step_time_parts": dict(self.parts),
            "step_time_hidden": dict(self.hidden),
            "bubble": self.bubble,
            "bytes_sent": dict(self.bytes),
            "model_flops": self.flops,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "checkpoint_bytes": self.stored,
            "save_time": self.save,
            "load_time": self.load,
        }

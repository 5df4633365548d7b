"""Search meshes, micro-batches, schedules and ZeRO stages for the fastest candidates that fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.config.sections import SAVED, SPLIT_BACKWARD
from autopar.dry_run.plan_model import uncollected
from autopar.errors import AutoparError, ConfigError, first_line, listed
from autopar.storage.progress import progress_bar
from autopar.tools.planner.candidate import Candidate, Estimate, RankMemory, mesh_words
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.network import DATA

_SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")  # gpipe has the bubble of 1f1b, and more memory
_MICROBATCHES = (1, 2, 4, 8, 16)
_CHUNKS = {"interleaved": (2, 4, 7)}  # stages per rank, for schedules with a choice
_EVERY = (2, 1)  # recompute one block out of this many
_SAVES = (("attention",), ("collectives",), ("attention", "collectives"), SAVED)  # results that recomputed blocks keep
_FEWEST_ROWS = 4096  # tokens of a sequence on each rank, if the search chooses cp
_CP = (1, 2, 4, 8, 16, 32, 64)
_MOST_EP = 64

Mesh = tuple[int, int, int, int]
"""The sizes of tp, cp, pp and dp."""


@dataclass(frozen=True)
class Space:
    """The space to search. With None the search tries all values.

    Attributes:
        gpus, gpus_per_node: The numbers of GPUs of the run, and of a node. Groups of tp stay within a node.
        global_batch: The samples of a step over all replicas.
        cp: The context-parallel size; None: powers of two with at least 4,096 tokens of a sequence per rank.
        sequence_parallel: A flag; None: both values, if tp is above 1 and cp is 1.
        ep: The expert-parallel size; None: 1, and for models with experts also multiples of tp up to 64.
    """

    gpus: int
    gpus_per_node: int
    global_batch: int
    zero: int | None = None
    checkpointing: bool | None = None
    schedules: Sequence[str] = _SCHEDULES
    cp: int | None = None
    sequence_parallel: bool | None = None
    ep: int | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node", "global_batch", "ep"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1, not {size}")

    def crosses(self, tp: int) -> bool:
        """Return whether tensor-parallel groups of this size span several nodes."""
        return min(self.gpus, self.gpus_per_node) % tp != 0

    def meshes(self, sequence: int) -> Iterator[Mesh]:
        """Yield all meshes for sequences of ``sequence`` tokens, with tp within a node."""
        long_enough = [size for size in _CP if size == 1 or sequence // size >= _FEWEST_ROWS]
        for tp in _divisors(self.gpus):
            for cp in (long_enough if self.cp is None else [self.cp]) if not self.crosses(tp) else ():
                for pp in _divisors(self.gpus // tp // cp) if self.gpus // tp % cp == 0 else ():
                    yield tp, cp, pp, self.gpus // tp // cp // pp

    def candidates(self, mesh: Mesh) -> Iterator[list[Candidate]]:
        """Yield the candidates of a mesh, one list per micro-batch size, the smallest size first."""
        for batch in _MICROBATCHES:
            if self.global_batch % (mesh[3] * batch) == 0:
                yield list(self._with_batch(mesh, batch))

    def _with_batch(self, mesh: Mesh, batch: int) -> Iterator[Candidate]:
        tp, cp, pp, dp = mesh
        count = self.global_batch // (dp * batch)
        for schedule in self.schedules if pp > 1 else ("1f1b",):
            if count < (2 * pp if schedule == "dualpipev" else pp) and pp > 1:
                continue
            fitting = [0] if cp * dp == 1 else [0, 1, 2] if pp > 1 and schedule in SPLIT_BACKWARD else [0, 1, 2, 3]
            for zero in fitting if self.zero is None else [stage for stage in fitting if stage == self.zero]:
                for checkpointing in (False, True) if self.checkpointing is None else (self.checkpointing,):
                    chunked = _CHUNKS.get(schedule, (0,)) if pp > 1 else (0,)
                    kinds = (self._rows(tp, cp), self.experts(tp, dp), _EVERY if checkpointing else (1,), chunked)
                    for rows, ep, every, chunks in itertools.product(*kinds):
                        known = (schedule, batch, count, zero, checkpointing, cp, rows, ep)
                        yield Candidate(tp, pp, dp, *known, every=every, chunks=chunks)

    def _rows(self, tp: int, cp: int) -> Sequence[bool]:
        """Return the choices of sequence parallelism, which does not work with cp because both shard the sequence."""
        if tp == 1 or cp > 1:
            return () if self.sequence_parallel else (False,)
        return (False, True) if self.sequence_parallel is None else (self.sequence_parallel,)

    def experts(self, tp: int, dp: int) -> Sequence[int]:
        """Return the expert-parallel sizes: 1, and sizes that distribute experts over one or more replicas."""
        fitting = [1, *(tp * sharers for sharers in _divisors(dp) if tp * sharers > 1)]
        if self.ep is not None:
            return [ep for ep in fitting if ep == self.ep]
        return [ep for ep in fitting if ep <= max(tp, _MOST_EP)]


@dataclass
class Found:
    """The result of a search.

    Attributes:
        best: The fastest candidates that fit, at most one per mesh with and without checkpointing.
        slower: The other candidates that fit, each with a lower bound of its seconds.
        too_large: The candidate with the lowest memory of each mesh on which no candidate fits.
        refused: The meshes that the model does not support, with the reasons.
        tried: The number of candidates.
    """

    best: list[Estimate] = field(default_factory=list)
    slower: list[tuple[Candidate, float]] = field(default_factory=list)
    too_large: list[tuple[Candidate, RankMemory]] = field(default_factory=list)
    refused: list[tuple[Mesh, str]] = field(default_factory=list)
    tried: int = 0


@uncollected()
def search(estimator: Estimator, space: Space, count: int = 5, progress: bool | None = None) -> Found:
    """Search a space for the ``count`` fastest candidates that fit the GPU. Raises ConfigError if no mesh fits."""
    if space.ep is None:
        try:
            estimator.model.plans.tensors(1, experts=2)
        except ConfigError:  # no experts to distribute
            space = replace(space, ep=1)
    found = Found()
    fitting: list[tuple[float, int, Candidate]] = []
    meshes = list(space.meshes(estimator.model.sequence))
    with progress_bar("planning", len(meshes), progress, unit=" meshes") as bar:
        for mesh in meshes:
            _try_mesh(estimator, space, mesh, found, fitting)
            bar.update()
    if not fitting and not found.too_large and found.refused:
        raise ConfigError(f"no mesh of {space.gpus} GPUs fits: {found.refused[0][1]}")
    across = [tp for tp in _divisors(space.gpus) if tp <= space.gpus_per_node and space.crosses(tp)]
    reason = f"tensor-parallel groups would cross nodes, of {space.gpus_per_node} GPUs each"
    found.refused += [((tp, 1, 1, space.gpus // tp), reason) for tp in across]
    fitting.sort()
    kinds: dict[tuple[int, int, int, bool], Estimate] = {}
    tried = 0
    for least, _, candidate in fitting:
        best = sorted(estimate.time for estimate in kinds.values())
        kind = (candidate.tp, candidate.cp, candidate.pp, candidate.checkpointing)
        known = kinds.get(kind)
        if known is None and len(best) >= 2 * count and least >= best[count - 1]:
            break
        tried += 1
        if known is None or least < known.time:  # else later candidates of this kind are slower
            estimate = estimator.estimate(candidate)
            kinds[kind] = min(known or estimate, estimate, key=lambda each: each.time)
    ranked = sorted(kinds.values(), key=lambda estimate: estimate.time)
    fastest = [with_kept(estimator, estimate) for estimate in ranked[:count]]
    found.best = sorted(fastest, key=lambda estimate: estimate.time)
    found.slower = [(estimate.candidate, estimate.time) for estimate in ranked[count:]]
    found.slower += [(candidate, time) for time, _, candidate in fitting[tried:]]
    return found


def with_kept(estimator: Estimator, estimate: Estimate) -> Estimate:
    """Return the fastest fitting variant of a candidate. A variant keeps some results of recomputed blocks."""
    found = [estimate]
    for saves in _SAVES if estimate.candidate.checkpointing else ():
        candidate = replace(estimate.candidate, saves=saves)
        if max(rank.total for rank in estimator.memory(candidate)) <= estimator.gpu.memory:
            found.append(estimator.estimate(candidate))
    return min(found, key=lambda each: each.time)


@uncollected()
def rehearsed(estimator: Estimator, found: Found) -> None:
    """Run the dry runs of ``initialize`` for the best candidates, and reject candidates that fail."""
    for estimate in list(found.best):
        candidate = estimate.candidate
        try:
            estimator.model.rehearse(candidate.config(estimator.model.precision))
        except AutoparError as error:
            found.best.remove(estimate)
            found.refused.append(((candidate.tp, candidate.cp, candidate.pp, candidate.dp), first_line(error)))


def _try_mesh(
    estimator: Estimator, space: Space, mesh: Mesh, found: Found, fitting: list[tuple[float, int, Candidate]]
) -> None:
    smallest: tuple[Candidate, RankMemory] | None = None
    reason, before = "", len(fitting)
    for candidates in space.candidates(mesh):
        fewer = len(fitting)
        for candidate in candidates:
            try:
                if candidate.checkpointing:
                    estimator.model.check_checkpointing(candidate.every)
                memory = max(estimator.memory(candidate), key=lambda rank: rank.total)
            except AutoparError as error:
                reason = reason or first_line(error)
                continue
            found.tried += 1
            if memory.total <= estimator.gpu.memory:
                fitting.append((estimator.least_time(candidate), found.tried, candidate))
            elif smallest is None or memory.total < smallest[1].total:
                smallest = (candidate, memory)
        if len(fitting) == fewer:
            break  # larger micro-batches need more
    if len(fitting) > before:
        return
    if smallest is not None:
        found.too_large.append(smallest)
    else:
        asked = "the batch, the ZeRO stage, the sequences or the experts that were asked for do not fit"
        found.refused.append((mesh, reason or asked))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


_PCIE = 20e9  # bytes per second between a GPU and CPU memory over PCIe 4, with all GPUs of a node active
_HOST = 4e9  # bytes of state per second of AdamW on a GPU's share of the CPU, measured with 4 threads


def needs(memory: RankMemory) -> str:
    """Return the memory in words (``needs 93 GB: activations 61, weights 18, ...``), the largest part first."""
    parts = sorted(memory.parts().items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts if size >= memory.total / 100)
    return f"needs {gigabytes(memory.total)} GB: {shown}"


def gigabytes(size: float) -> str:
    """Return a number of bytes in GB, with one decimal below 10."""
    return f"{size / 1e9:.0f}" if size >= 9.95e9 else f"{size / 1e9:.1f}"


def rejected(estimator: Estimator, found: Found) -> Iterator[str]:
    """Yield a line with the reason for each mesh that is not among the best."""
    shown = {_mesh(estimate.candidate) for estimate in found.best}
    for candidate, least in found.slower:
        if found.best and _mesh(candidate) not in shown:
            shown.add(_mesh(candidate))
            yield f"{candidate}: fits, takes at least {least / found.best[0].time:.2f} times as long"
    for candidate, memory in sorted(found.too_large, key=lambda each: each[1].total):
        key, left, moved, seconds = on_host(candidate, memory)
        lever = (
            f"; fits with zero.{key}: {gigabytes(left.total)} GB, {gigabytes(moved)} GB in the CPU's memory, and "
            f"about {seconds:.1f} s more per step"
        )
        fits = not found.best and left.total <= estimator.gpu.memory
        yield f"{candidate}: {needs(memory)}{lever if fits else ''}"
    reasons: dict[str, list[str]] = {}
    for sizes, reason in found.refused:
        reasons.setdefault(reason, []).append(mesh_words(*sizes))
    for reason, meshes in reasons.items():
        yield f"{listed(meshes, 3)}: {reason}"


def on_host(candidate: Candidate, memory: RankMemory) -> tuple[str, RankMemory, int, float]:
    """Return the effects of CPU offload: of all shards in ZeRO-2 and ZeRO-3, else of the optimizer state.

    Returns:
        The key of the section ``zero``, the memory on the GPU, the bytes in CPU memory, and the additional seconds of
        a step for transfers and the optimizer on the CPU.
    """
    least = replace(memory, step=0, optimizer=0)
    if candidate.fully_sharded:  # weights are loaded for each forward and backward, gradients are offloaded
        moved = memory.weights + memory.gradients + memory.optimizer
        travel = sum(candidate.exchanges) * memory.weights
        return "cpu_offload", replace(least, weights=0, gradients=0), moved, travel / _PCIE + moved / _HOST
    travel = memory.weights + memory.gradients  # gradients are offloaded, new weights are loaded
    return "optimizer_offload", least, memory.optimizer, travel / _PCIE + memory.optimizer / _HOST


def _mesh(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.tp, candidate.cp, candidate.pp


def assumptions(estimator: Estimator) -> list[str]:
    """Return the assumptions of the estimated time, and the parts left out of the memory."""
    gpu, model, network, held = estimator.gpu, estimator.model, estimator.node.network, DATA["assumed"]
    fast = gpu.peak(model.precision) * gpu.products * held["products"] / 1e12
    extra = f", and {network.latency * 1e6:g} us more per hop" if network.latency else ""
    return [
        f"{gpu.name}: large matmuls run at {fast:.0f} of {gpu.peak(model.precision) / 1e12:.0f} TFLOP/s, memory "
        f"traffic at {held['stream']:.0%} of {gpu.bandwidth / 1e12:.2f} TB/s; each operation takes at least "
        f"{held['launch']} us",
        f"network: NCCL's cost model with {network.intra / 1e9:g} GB/s of {'NVLink' if network.nvlink else 'PCIe'} "
        f"within a node and {network.inter / 1e9:g} GB/s per GPU between nodes, one way{extra}; minus "
        f"{held['fabric_loss']:.0%} each time the number of nodes doubles",
        f"overlap: {held['overlap']:.0%} of FSDP2's traffic (with stages only in ZeRO-3) and of the gradient averaging "
        "in the last backward; none of the tp, cp, ep and optimizer traffic",
        "backward: matmuls take 2 times, attention 2.5 times, other operations 1.5 times their forward time",
        f"memory: {model.optimizer} is passed to initialize and steps run through execute_pipeline; work is the "
        "largest of any block; no fragmentation",
        "tokens reach all experts evenly; a multimodal model gets text only",
    ]


def to_json(estimator: Estimator, space: Space, found: Found) -> dict[str, Any]:
    """Return a search as plain data."""
    model = estimator.model
    return {
        "model": type(model.inner).__name__,
        "parameters": sum(parameter.numel() for parameter in model.model.parameters()),
        "policy": model.policy.name,
        "gpus": space.gpus,
        "node": estimator.node.name,
        "gpus_per_node": space.gpus_per_node,
        "gpu": estimator.gpu.name,
        "gpu_memory": estimator.gpu.memory,
        "sequence": model.sequence,
        "global_batch": space.global_batch,
        "precision": model.precision,
        "optimizer": model.optimizer,
        "tried": found.tried,
        "best": [{**each.to_json(), "config": model.sections(each.candidate)} for each in found.best],
        "rejected": list(rejected(estimator, found)),
        "assumptions": assumptions(estimator),
    }

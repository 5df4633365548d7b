"""The search over meshes, micro-batches, schedules and ZeRO stages: what fits, fastest first, and why others do not."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError, ConfigError
from autopar.planner.candidate import Candidate, Estimate, RankMemory
from autopar.planner.estimate import Estimator

__all__ = ["Found", "Space", "rehearsed", "search"]

_SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")  # gpipe waits as long as 1f1b and holds more
_MICROBATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        gpus: of the run; ``gpus_per_node``: tp stays within a node.
        global_batch: samples of a step, of all replicas.
        zero, checkpointing, schedules: what may be chosen; None: any.
    """

    gpus: int
    gpus_per_node: int
    global_batch: int
    zero: int | None = None
    checkpointing: bool | None = None
    schedules: Sequence[str] = _SCHEDULES

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node", "global_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")

    def meshes(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(tp, pp, dp)`` of all meshes with as many ranks as there are GPUs."""
        for tp in _divisors(self.gpus):
            if tp <= self.gpus_per_node:
                for pp in _divisors(self.gpus // tp):
                    yield tp, pp, self.gpus // tp // pp

    def candidates(self, tp: int, pp: int, dp: int) -> Iterator[list[Candidate]]:
        """Yield what may be run on a mesh, for one size of micro-batches after the other."""
        for batch in _MICROBATCHES:
            if self.global_batch % (dp * batch) == 0:
                yield list(self._with_batch(tp, pp, dp, batch))

    def _with_batch(self, tp: int, pp: int, dp: int, batch: int) -> Iterator[Candidate]:
        count = self.global_batch // (dp * batch)
        for schedule in self.schedules if pp > 1 else ("1f1b",):
            if count < (2 * pp if schedule == "dualpipev" else pp) and pp > 1:
                continue
            for zero in _zero_stages(self.zero, pp, dp):
                for checkpointing in (False, True) if self.checkpointing is None else (self.checkpointing,):
                    yield Candidate(tp, pp, dp, schedule, batch, count, zero, checkpointing)


def _zero_stages(wanted: int | None, pp: int, dp: int) -> Sequence[int]:
    fitting = [0] if dp == 1 else [0, 1, 3] if pp == 1 else [0, 1]
    return fitting if wanted is None else [stage for stage in fitting if stage == wanted]


@dataclass
class Found:
    """The result of a search.

    Attributes:
        best: the fastest that fit, of each mesh with and without checkpointing the fastest one.
        slower: others that fit and were estimated.
        bounded: others that fit: a time that they need at least.
        too_large: meshes of which nothing fits: what needs least memory there.
        refused: meshes that the model does not have, and why.
        tried: number of candidates.
    """

    best: list[Estimate] = field(default_factory=list)
    slower: list[Estimate] = field(default_factory=list)
    bounded: list[tuple[Candidate, float]] = field(default_factory=list)
    too_large: list[tuple[Candidate, RankMemory]] = field(default_factory=list)
    refused: list[tuple[tuple[int, int, int], str]] = field(default_factory=list)
    tried: int = 0


def search(estimator: Estimator, space: Space, count: int = 5) -> Found:
    """Search a space for the ``count`` fastest candidates that fit the GPU.

    Raises:
        UnsupportedModelError: the model cannot be counted on any mesh.
    """
    found = Found()
    fitting: list[tuple[float, int, Candidate]] = []
    for mesh in space.meshes():
        _try_mesh(estimator, space, mesh, found, fitting)
    if not fitting and not found.too_large and found.refused:
        raise ConfigError(f"no mesh of {space.gpus} GPUs fits: {found.refused[0][1]}")
    heapq.heapify(fitting)
    kinds: dict[tuple[int, int, bool], Estimate] = {}
    while fitting:
        least, number, candidate = heapq.heappop(fitting)
        best = sorted(estimate.time for estimate in kinds.values())
        kind = (candidate.tp, candidate.pp, candidate.checkpointing)
        known = kinds.get(kind)
        if known is not None and least >= known.time:
            continue  # all others of its kind are slower
        if known is None and len(best) >= 2 * count and least >= best[count - 1]:
            heapq.heappush(fitting, (least, number, candidate))
            break
        estimate = estimator.estimate(candidate)
        if known is None or estimate.time < known.time:
            kinds[kind] = estimate
    found.bounded = [(candidate, time) for time, _, candidate in sorted(fitting)]
    ranked = sorted(kinds.values(), key=lambda estimate: estimate.time)
    found.best, found.slower = ranked[:count], ranked[count:]
    return found


def rehearsed(estimator: Estimator, found: Found) -> None:
    """Try the shards and the stages of the best candidates, as ``initialize`` does; what fails there is refused."""
    holds: dict[tuple[int, int, str], str] = {}
    for estimate in list(found.best):
        candidate = estimate.candidate
        config = candidate.config(estimator.model.precision)
        kind = (candidate.tp, candidate.pp, str(config.pipeline.chunks) + str(config.pipeline.folded))
        if kind not in holds:
            try:
                estimator.model.rehearse(config)
                holds[kind] = ""
            except AutoparError as error:
                holds[kind] = str(error).splitlines()[0]
        if holds[kind]:
            found.best.remove(estimate)
            found.refused.append(((candidate.tp, candidate.pp, candidate.dp), holds[kind]))


def _try_mesh(
    estimator: Estimator,
    space: Space,
    mesh: tuple[int, int, int],
    found: Found,
    fitting: list[tuple[float, int, Candidate]],
) -> None:
    smallest: tuple[int, Candidate, RankMemory] | None = None
    reason = ""
    fits = False
    for candidates in space.candidates(*mesh):
        one_fits = False
        for candidate in candidates:
            try:
                if candidate.checkpointing:
                    estimator.model.check_checkpointing()
                memory = max(estimator.memory(candidate), key=lambda rank: rank.total)
            except AutoparError as error:
                reason = reason or str(error).splitlines()[0]
                continue
            found.tried += 1
            if memory.total <= estimator.gpu.memory:
                one_fits = True
                fitting.append((estimator.least_time(candidate), found.tried, candidate))
            elif smallest is None or memory.total < smallest[0]:
                smallest = (memory.total, candidate, memory)
        fits = fits or one_fits
        if not one_fits:
            break  # larger micro-batches need more
    if fits:
        return
    if smallest is not None:
        found.too_large.append(smallest[1:])
    else:
        found.refused.append((mesh, reason or _no_batch(space, mesh)))


def _no_batch(space: Space, mesh: tuple[int, int, int]) -> str:
    _, pp, dp = mesh
    if space.global_batch % dp:
        return f"the global batch of {space.global_batch} does not divide over {dp} replicas"
    if space.global_batch // dp < pp:
        return f"{space.global_batch // dp} samples a replica are fewer than {pp} stages"
    return f"ZeRO stage {space.zero} does not go with pp {pp} x dp {dp}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]

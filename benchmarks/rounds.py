"""Rounds: variants take turns in one run, so that all see the same machine; medians, and ratios of neighbours.

Wall time is that of the slowest rank, from a barrier on. CPU time is that of all threads of a process: what a rank
computes, copies and spends on waiting actively; its mean over the ranks.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist


class Variant(NamedTuple):
    """What is measured: by all ranks, or by the first one ``alone``, while the others sleep."""

    work: Callable[[], Any]
    alone: bool = False
    before: Callable[[], Any] | None = None


class Taken(NamedTuple):
    """Seconds of the clock, and of this process's CPU."""

    wall: float
    cpu: float


def seconds(work: Callable[[], Any]) -> Taken:
    """Time one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


class Turns:
    """One rank works and the others sleep (a barrier would keep their cores busy), or all work together.

    Args:
        folder: that all ranks share.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.number = Path(folder), itertools.count()

    def alone(self, work: Callable[[], Any]) -> Taken:
        """Time ``work`` on rank 0; the others get zeros."""
        done = self.folder / f"done-{next(self.number)}"
        taken = Taken(0.0, 0.0)
        barrier()
        if not dist.is_initialized() or dist.get_rank() == 0:
            taken = seconds(work)
            done.touch()
        while not done.exists():
            time.sleep(0.002)
        return taken

    def together(self, work: Callable[[], Any]) -> Taken:
        """Time ``work`` on every rank, from a barrier on."""
        barrier()
        return seconds(work)

    def take(self, variant: Variant) -> Taken:
        """Time one call of a variant."""
        if variant.before is not None:
            variant.before()
        return (self.alone if variant.alone else self.together)(variant.work)


def barrier() -> None:
    """Wait for all ranks, if there are several."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def interleave(
    variants: Mapping[str, Variant], rounds: int, turns: Turns, warm_up: int = 2
) -> dict[str, list[list[Taken]]]:
    """Run all variants in turn, every second time in the reverse order; ``name -> rounds of [each rank's time]``."""
    mine: dict[str, list[Taken]] = {name: [] for name in variants}
    for number in range(warm_up + rounds):
        names = list(variants)
        for name in names if number % 2 else reversed(names):
            taken = turns.take(variants[name])
            if number >= warm_up:
                mine[name].append(taken)
    world = dist.get_world_size() if dist.is_initialized() else 1
    everyone: list[Any] = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine)
    return {name: [[Taken(*row[name][n]) for row in everyone] for n in range(rounds)] for name in variants}


def summary(
    samples: Mapping[str, Sequence[Sequence[Taken]]], alone: Sequence[str] = (), base: str | None = None
) -> dict[str, dict[str, float]]:
    """Summarise rounds: medians in ms of wall and CPU, and how many times as fast as ``base`` in the same round."""
    walls = {name: [max(taken.wall for taken in ranks) for ranks in rows] for name, rows in samples.items()}
    found: dict[str, dict[str, float]] = {}
    for name, rows in samples.items():
        cpus = [sum(taken.cpu for taken in ranks) / (1 if name in alone else len(ranks)) for ranks in rows]
        found[name] = {
            "ms": statistics.median(walls[name]) * 1e3,
            "p10_ms": quantile(walls[name], 0.1) * 1e3,
            "min_ms": min(walls[name]) * 1e3,
            "cpu_ms": statistics.median(cpus) * 1e3,
            "rounds": len(rows),
        }
        if base is not None:
            found[name]["speedup"] = ratio(walls[base], walls[name])
    return {name: {key: round(value, 4) for key, value in row.items()} for name, row in found.items()}


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of what was measured in the same round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the others lie; the nearest one that was measured."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]

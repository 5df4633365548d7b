"""Compare gradients and weights over the data-parallel replicas at ``optimizer.step()``.

Ranks with the same shard write digests into torch.distributed's key-value store, and each rank reads the digests of the
others. It uses no collective, because a rank that skips its step would block it. The first step waits for the digests
of the other ranks. Later steps wait a few seconds, and compare late digests in a later step.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.c10d import PrefixStore, default_store
from autopar.distributed.digest import of_text, sum_of_bits
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError
from autopar.features.rank_checks.forward import some_rows
from autopar.features.rank_checks.messages import unlike_gradients, unlike_weights
from autopar.guards.step import Progress, group_call, replicas_in_words

_FULL = 3  # number of first steps that compare all gradients and weights
_DEADLINES = (5.0, 1.0, 1.0, 0.0)  # seconds that a later step waits for another rank, by its number of late steps
_KEPT = 64  # number of steps kept for a comparison with late digests
_GPU_INTERVAL = 10  # steps between two comparisons on a GPU, where reading a digest makes the host wait
_BUSY = 16  # number of ranks from which on the store is read less often
OVERFLOW = -1  # digest of a gradient that is not finite
_OF_STEP = (4, 4096)  # number of weights in a sample, and of elements of each; sizes of shards may differ by replica


@dataclass
class _Published:
    """The comparisons of one optimizer.

    Attributes:
        compared: Number of comparisons so far.
        digests: Number of a comparison that waits for other ranks -> (True if it covers all weights, local digests as
            JSON).
        late: Number of consecutive steps in which the digests of another rank were late.
    """

    compared: int = 0
    digests: dict[int, tuple[bool, str]] = field(default_factory=dict)
    late: int = 0


class StepComparison:
    """The comparison of a model's optimizer steps over the data-parallel replicas; created on every rank.

    Args:
        full_every: Interval of steps that compare all gradients and weights; 0: the first steps only.
        experts: Names of parameters that are also sharded over replicas.
    """

    def __init__(self, mpu: MPU, failures: FailureLog, full_every: int, experts: frozenset[str]) -> None:
        self.mpu, self.failures, self.full_every, self._experts = mpu, failures, full_every, experts
        self._published: dict[int, _Published] = {}  # number of an optimizer -> its comparisons
        self._store = PrefixStore(f"autopar steps {failures.name}", default_store())
        self._before = mpu.dp_cp.ranks[mpu.dp_cp.rank - 1]
        self._others = [rank for rank in mpu.dp_cp.ranks if rank != mpu.rank]
        self._interval = (1 if mpu.device.type == "cpu" else _GPU_INTERVAL) * max(1, mpu.world_size // _BUSY)

    def compare(self, optimizer: str, progress: Progress, *, closure: bool, scaled: bool) -> None:
        """Publish the digests of this step, and compare the published digests of the other ranks.

        Args:
            optimizer: Name of the optimizer for messages.
            closure: True if the step computes gradients, so that only weights are compared.
            scaled: True if a step with an overflow is skipped.
        """
        step = progress.steps
        full = step < _FULL or (self.full_every > 0 and (step + 1) % self.full_every == 0)
        if not full and step % self._interval:
            return
        held = [(name, p) for name, p in progress.held if not isinstance(p, DTensor) and not p.is_meta]
        seen = self._published.setdefault(progress.number, _Published())
        turn, seen.compared = seen.compared, seen.compared + 1
        digests = digest_step(held, None if full else turn, closure, scaled)
        replicated = [name for name, _ in held if name not in self._experts]
        mine = json.dumps([of_text(repr(replicated)), step, digests, len(replicated)])
        self._store.set(_key(progress, turn, self.mpu.rank), mine)
        seen.digests[turn] = full, mine
        self._compare_with_others(optimizer, progress, seen)
        old = turn - _KEPT
        seen.digests.pop(old, None)
        if old >= 0:
            self._store.delete_key(_key(progress, old, self.mpu.rank))

    def _compare_with_others(self, optimizer: str, progress: Progress, seen: _Published) -> None:
        """Compare digests of all weights with all replicas, so that all raise; samples with the previous replica."""
        for turn, (full, mine) in list(seen.digests.items()):
            keys = {rank: _key(progress, turn, rank) for rank in (self._others if full else [self._before])}
            seconds = _DEADLINES[min(seen.late, len(_DEADLINES) - 1)] if turn else self.failures.timeout
            for rank, key in keys.items():
                if not self._wait_for(rank, key, seconds):
                    if turn == 0:
                        replica, place = divmod(self.mpu.dp_cp.ranks.index(rank), self.mpu.cp.size)
                        where = f" (context-parallel rank {place})" if self.mpu.cp.size > 1 else ""
                        raise self.failures.failure(
                            f"the first {optimizer}.step() waited for rank {rank}, which holds the same weights in "
                            f"data-parallel replica {replica}{where} and has not stepped.",
                            [rank],
                            TimeoutError(f"{self.failures.timeout:g} s (pipeline.timeout)"),
                        )
                    seen.late += 1
                    return
            del seen.digests[turn]
            for rank, key in keys.items():
                theirs = self._store.get(key).decode()
                if theirs != mine:
                    self._refuse(optimizer, json.loads(mine), json.loads(theirs), rank)
        seen.late = 0

    def _wait_for(self, rank: int, key: str, seconds: float) -> bool:
        deadline, pause = time.monotonic() + seconds, 0.0002
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            if pause > 0.05 and self.failures.has_ended(rank):
                return bool(self._store.check([key]))
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return True

    def _refuse(self, optimizer: str, mine: Any, theirs: Any, rank: int) -> None:
        (names, step, ours, count), (other_names, _, others, other_count) = mine, theirs
        if names != other_names and ours.keys().isdisjoint(others):
            return  # with ZeRO each rank steps different parameters
        pair = sorted([self.mpu.rank, rank])
        first, second = (ours, others) if self.mpu.rank == pair[0] else (others, ours)
        place = f"  Ranks {pair[0]} and {pair[1]}, step {step + 1} of {optimizer}"
        replicas = replicas_in_words(self.mpu)
        if rank not in self.mpu.copies.ranks:  # the other rank holds different experts
            ours = {name: two for name, two in ours.items() if name not in self._experts}
        weights = {name: (first[name][1], second[name][1]) for name in ours if name in others}
        weights = {name: two for name, two in weights.items() if two[0] != two[1]}
        gradients = ((name, ours[name][0], others[name][0]) for name in ours if name in others)
        different = [name for name, one, two in gradients if one != two and OVERFLOW not in (one, two)]
        if names != other_names:
            counts = (count, other_count) if self.mpu.rank == pair[0] else (other_count, count)
            text = (
                f"the {replicas} step different parameters of the model.\n{place}: it holds {counts[0]} and "
                f"{counts[1]} parameters.\n  Add the same parameter groups to the optimizer on every replica."
            )
        elif weights:
            text = unlike_weights(replicas, place, pair, weights)
        elif different:
            text = unlike_gradients(replicas, place, different, group_call(self.mpu))
        else:
            return
        self.failures.publish(text)
        raise ConsistencyError(text)


def _key(progress: Progress, turn: int, rank: int) -> str:
    return f"{progress.number}/{turn}/{rank}"


# -- samples of a step -------------------------------------------------------------------------------------------------


@torch.no_grad()
def digest_step(
    held: list[tuple[str, nn.Parameter]], turn: int | None, closure: bool, scaled: bool
) -> dict[str, tuple[int, int]]:
    """Return the digests of each gradient and weight by name; with ``turn`` only of a sample that rotates with it.

    If the loss is ``scaled``, gradients that are not finite are not compared, because their step is skipped.
    """
    names, sums, (count, most) = [], list[torch.Tensor](), _OF_STEP

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        return sum_of_bits(tensor if turn is None or tensor.is_sparse else some_rows(tensor, turn, most))

    chosen = range(min(count, len(held))) if turn is not None else ()
    for name, parameter in held if turn is None else [held[(count * turn + n) % len(held)] for n in chosen]:
        gradient = None if closure else parameter.grad
        if gradient is None or isinstance(gradient, DTensor):
            found = torch.zeros((), dtype=torch.int64, device=parameter.device)
        else:
            found = summed(gradient)
        if scaled and gradient is not None:
            found = torch.where(torch.isfinite(gradient).all(), found, OVERFLOW)
        names.append(name)
        sums += [found, summed(parameter.detach())]
    numbers = torch.stack(sums).tolist() if sums else []
    return {name: (numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(names)}

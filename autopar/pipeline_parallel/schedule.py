"""Make schedules: the order in which each rank runs the forwards and backwards of its stages, without communication.

For each rank a schedule is a list of slots: an action and one of the rank's stages. Each slot runs the next micro-batch
of its stage. The engine's sends do not wait, so a schedule cannot deadlock if the inputs of each action are sent by
earlier actions; the tests check this for all schedules.

| name          | stages a rank | backward    | idle | forwards that wait | source                                    |
|---------------|---------------|-------------|------|--------------------|-------------------------------------------|
| `gpipe`       | 1             | last        | 3v   | m                  | Huang et al., 2019                        |
| `1f1b`        | 1             | first       | 3v   | p - r              | PipeDream-Flush (Narayanan et al., 2021)  |
| `interleaved` | v, in turns   | first       | 3    | about p v + p      | Megatron-LM (Narayanan et al., 2021)      |
| `zero-bubble` | 1             | split       | v    | p                  | ZB-H1 (Qi et al., 2023)                   |
| `zbv`         | 2, in a V     | split       | 1    | 2p                 | Qi et al., "... Controllable Memory", 2024 |
| `dualpipev`   | 2, in a V     | some split  | 1    | 2p + 1             | DeepSeek-V3, 2024, 3.2.1, in half         |

[Note: memory of the schedule] p ranks, r the rank, m micro-batches, v stages per rank. Each forward that waits for its
backward keeps the activations of one stage, so the column "forwards that wait" is the memory of the schedule: `gpipe`
keeps all micro-batches, `1f1b` at most p. Idle: the waiting time of each rank, in units of p - 1 ticks, if a forward,
an input gradient and a weight gradient take one tick each in a stage of 1/v of a rank's layers. Split backwards fill
the idle time with weight gradients, and keep activations longer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

_Slots = list[tuple[str, int]]


class Action(NamedTuple):
    """``F`` forward, ``B`` backward, or its halves ``I`` (gradient of the input) and ``W`` (of the weights)."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f"@{self.stage}" if self.stage else "")


def forwards(name: str, rank_of: Sequence[int], microbatches: int) -> list[list[Action]]:
    """Make the lists of actions of a pass without a backward, one per rank."""
    return [[action for action in row if action.kind == "F"] for row in make_schedule(name, rank_of, microbatches)]


def make_schedule(name: str, rank_of: Sequence[int], microbatches: int) -> list[list[Action]]:
    """Make the lists of actions, one per rank, in order.

    Args:
        name: One of :data:`autopar.config.sections.SCHEDULES`.
        rank_of: Stage -> rank.
        microbatches: The number of micro-batches, at least 1. With fewer than two per rank (a smaller last batch)
            ``dualpipev`` becomes ``zbv``; with one stage per rank both become ``zero-bubble``.
    """
    ranks = max(rank_of) + 1
    folded = len(rank_of) == 2 * ranks
    if name == "dualpipev" and microbatches < 2 * ranks:
        name = "zbv"
    if name in ("zbv", "dualpipev") and not folded:
        name = "zero-bubble"
    lists = []
    for rank in range(ranks):
        if name == "interleaved":
            lists.append(_interleaved(rank, ranks, len(rank_of) // ranks, microbatches))
        elif name == "zbv":
            enough = max(microbatches, 2 * ranks - 1)  # the minimum of the schedule; actions of the excess are dropped
            lists.append([action for action in _number(_zbv(rank, ranks, enough)) if action.microbatch < microbatches])
        elif name == "dualpipev":
            lists.append(_number(_dualpipev(rank, ranks, microbatches)))
        else:
            lists.append(_number(_straight(name, rank, ranks, microbatches)))
    return lists


def _number(slots: _Slots) -> list[Action]:
    """Assign the next micro-batch of its stage to each slot; ``W`` follows the order of the ``I`` of all stages."""
    actions: list[Action] = []
    begun: Counter[tuple[bool, int]] = Counter()  # forwards and backwards of each stage
    halves: deque[Action] = deque()
    for kind, stage in slots:
        if kind == "W":
            actions.append(halves.popleft()._replace(kind="W"))
            continue
        action = Action(kind, stage, begun[kind == "F", stage])
        begun[kind == "F", stage] += 1
        actions.append(action)
        if kind == "I":
            halves.append(action)
    return actions


def _straight(name: str, rank: int, ranks: int, microbatches: int) -> _Slots:
    """Make ``gpipe``, ``1f1b`` or ``zero-bubble``, with one stage per rank: some forwards first, then alternating.

    In ``zero-bubble`` rank r delays r weight gradients, to fill the time until the next input.
    """
    ahead = microbatches if name == "gpipe" else min(ranks - rank, microbatches)
    backward, late = ("B", microbatches) if name != "zero-bubble" else ("I", rank)
    slots = [("F", rank)] * ahead
    for done in range(microbatches):
        slots.append((backward, rank))
        if done >= late:
            slots.append(("W", rank))
        if done + ahead < microbatches:
            slots.append(("F", rank))
    return slots + [("W", rank)] * (min(late, microbatches) if backward == "I" else 0)


def _interleaved(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """Make forwards and backwards in rounds, chunk by chunk, with Megatron-LM's warm-up.

    In Megatron-LM a round has as many micro-batches as ranks; here it may have up to twice as many if they do not
    divide.
    """
    rounds = max(1, microbatches // ranks)
    sizes = [microbatches // rounds + (number < microbatches % rounds) for number in range(rounds)]
    forward: list[Action] = []
    backward: list[Action] = []
    start = 0
    for size in sizes:
        batch = range(start, start + size)
        forward += [Action("F", chunk * ranks + rank, m) for chunk in range(chunks) for m in batch]
        backward += [Action("B", chunk * ranks + rank, m) for chunk in reversed(range(chunks)) for m in batch]
        start += size
    ahead = min((ranks - rank - 1) * 2 + (chunks - 1) * sizes[0], len(forward))
    actions = forward[:ahead]
    for later, earlier in zip(forward[ahead:], backward[: len(forward) - ahead], strict=True):
        actions += [later, earlier]
    return actions + backward[len(forward) - ahead :]


def _zbv(rank: int, ranks: int, microbatches: int) -> _Slots:
    """Make the V schedule of Qi et al. (2024, "... Controllable Memory"), for at least 2 * ranks - 1 micro-batches.

    Backwards are split, so that input gradients come early. In the middle each stage's forward is followed by a
    backward of the other stage; at the end delayed weight gradients fill the time.
    """
    down, up = rank, 2 * ranks - 1 - rank
    behind = ranks - rank  # number of ranks from this one to the turn of the V
    slots = [("F", down)] * (2 * behind - 1)
    slots += [("F", up), ("F", down)] * rank
    slots += [("F", up), ("I", up), ("W", up)] * behind
    left = microbatches - (2 * behind - 1 + rank)  # forwards of the stage down
    for number in range(microbatches - ranks):
        slots += [("F", down)] * (number < left)
        slots += [("I", down), ("W", down), ("F", up), ("I", up), ("W", up)]
    slots += [("I", down), ("I", up)] * rank
    slots += [("I", down), ("W", down)] * behind
    return slots + [("W", down)] * (2 * rank)


def _dualpipev(rank: int, ranks: int, microbatches: int) -> _Slots:
    """Make one half of DualPipe (arXiv 2412.19437, 3.2.1) on the stages of a V, for at least 2 * ranks micro-batches.

    In the middle the rank alternates a forward of one stage and a backward of the other. The paper overlaps such a
    pair; here they run in sequence, with the order and memory of the schedule. Backwards are split only if other ranks
    would wait for the input gradient: at the beginning, and in the second half of the end.
    """
    down, up = rank, 2 * ranks - 1 - rank
    behind, here = ranks - 1 - rank, rank + 1  # ranks nearer to the turn of the V; this one and those before it
    slots = [("F", down)] * (2 * behind)
    slots += [("F", down), ("F", up)] * here
    slots += [("I", up), ("W", up), ("F", up)] * behind
    slots += [("F", down), ("B", up), ("F", up), ("B", down)] * (microbatches - 2 * ranks + here)
    slots += [("B", up), ("F", up), ("B", down)] * behind
    last = [up, down] * here
    slots += [("B", stage) for stage in last[:here]] + [("I", stage) for stage in last[here:]]
    return slots + [("W", down), ("I", down)] * behind + [("W", down)] * here

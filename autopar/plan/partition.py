"""Sharing a row of blocks out over stages, and stages over ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ConfigError

__all__ = ["partition", "rank_of_stage"]


def rank_of_stage(ranks: int, chunks: int, *, folded: bool = False) -> tuple[int, ...]:
    """Stage -> rank: round and round, or (``folded``) to the last rank and back, which puts first and last together."""
    return tuple(
        ranks - 1 - stage % ranks if folded and stage // ranks % 2 else stage % ranks for stage in range(ranks * chunks)
    )


def partition(costs: Sequence[int], stages: int) -> list[int]:
    """Bounds of the contiguous split of ``costs`` into non-empty stages whose largest sum is the smallest.

    Of several such splits the most even one (the smallest sum of squares).

    Raises:
        ConfigError: more stages than costs.
    """
    count = len(costs)
    if stages > count:
        raise ConfigError(f"{count} blocks cannot be shared out over {stages} stages")
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[dict[int, tuple[tuple[int, int], list[int]]]] = [{0: ((0, 0), [0])}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[tuple[int, int], list[int]]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            options = []
            for start, ((worst, squares), bounds) in best[-1].items():
                if start < end:
                    cost = sums[end] - sums[start]
                    options.append(((max(worst, cost), squares + cost * cost), [*bounds, end]))
            row[end] = min(options)
        best.append(row)
    return best[-1][count][1]

"""Run a composition on the ranks of the pool."""

from __future__ import annotations

import torch.distributed as dist

from tests.compositions.compare import compare
from tests.compositions.draw import Composition, draw
from tests.compositions.minimise import minimise
from tests.pool import pooled

__all__ = ["check", "failure_of"]

_SECONDS = 120.0


def body(composition: Composition) -> None:
    """Run on each rank: compare, and let rank 0 say what is refused."""
    refused = compare(composition)
    if refused and dist.get_rank() == 0:
        print(f"refused: {refused}", flush=True)


def failure_of(composition: Composition) -> str | None:
    """Return what the first rank that fails says; None if all is right, or refused by all ranks alike."""
    try:
        pooled(composition.ranks, timeout=_SECONDS)(body)(composition)
    except AssertionError as error:
        return str(error)
    return None


def check(seed: int, ranks: int) -> None:
    """Run the composition of a seed.

    Raises:
        AssertionError: the simplest composition that fails, how it fails, and the command that repeats the seed.
    """
    composition = draw(seed, ranks)
    if failure_of(composition) is None:
        return
    simplest, text = minimise(composition, failure_of)
    raise AssertionError(
        f"seed {seed}: {composition}\n  fails; without the options that do not matter:\n  {simplest}\n{text}\n"
        f"  python -m tests.compositions {seed} --ranks {ranks}"
    )

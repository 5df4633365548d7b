"""The processes of verify: forks of one that may have had process groups of its own."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.tools.verification.report import VerificationReport
from autopar.tools.verification.verify import run_on_ranks
from tests.harness.tiers import mainly


class Kept:
    """Holds a process group, and itself: only the garbage collection ends it."""

    def __init__(self, group: object) -> None:
        self.group, self.own = group, self


def collects(alarm: Callable[[VerificationReport], None]) -> str:
    gc.collect()
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


@pytest.mark.tier("all")
@pytest.mark.parametrize("alive", mainly(True, False, later="sweep"))
def test_a_process_group_that_this_process_had_is_not_ended_by_its_forks(alive: bool, tmp_path: Path) -> None:
    """Its end joins threads that a fork does not have."""
    gc.disable()
    try:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
        kept = Kept(dist.group.WORLD)
        dist.destroy_process_group()
        held = [kept] if alive else []
        del kept
        assert run_on_ranks(collects, 2, timeout=60) == "rank 0 of 2"
        held.clear()
        assert run_on_ranks(collects, 2, timeout=60) == "rank 0 of 2"
    finally:
        gc.enable()

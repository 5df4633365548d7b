"""Waits of one rank for another that does something else: they end, and say what either of them waits in."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.distributed import failures, waits
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import PipelineError
from tests.pool import pooled
from tests.small import gpt2
from tests.timeouts import TIMEOUT, hurry, say, wait_for
from tests.worlds import distributed


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Look often, and give others less time to say why they failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "_LOOK", 0.2)
        patch.setattr(failures, "GRACE", 1.0)
        yield


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_another_rank_is_in_is_known_while_it_lasts() -> None:
    log, rank = FailureLog(MPU(2), 5), dist.get_rank()
    with _quick():
        time.sleep(1.1)  # the thread sleeps as long as it did before
        if rank == 1:
            with log.blame("gathering cups", [0, 1]):
                with log.blame("counting spoons", [0, 1]):
                    pass
                say("begun")
                wait_for("described", [0])
            time.sleep(1.0)
            say("ended")
        else:
            wait_for("begun", [1])
            said = log.describe([1])
            say("described")
            assert re.fullmatch(
                r"  rank 1 has been for [12] s in gathering cups \(.*/tests/timeouts.py:\d+\)\.", said
            ), said
            wait_for("ended", [1])
            assert log.describe([1]) == "  rank 1 said nothing: hanging, late, or ended on another machine."
    dist.barrier()


@pytest.mark.tier("test")
@distributed(world_size=2)  # a time-out breaks the connections of the world
def test_a_replica_evaluates_while_another_averages() -> None:
    """Its data has ended, and the other's has not."""
    model = autopar.initialize(gpt2(), {})
    ids, rank = torch.arange(6)[None], dist.get_rank()
    for step in range(2):
        model(ids + 6 * rank, labels=ids).loss.backward()
        if step == 0:
            autopar.average_gradients(model)
            hurry(model)
    own = ["averaging the gradients over the data-parallel replicas", "gather_for_metrics"]
    start = time.monotonic()
    with _quick(), pytest.raises(PipelineError) as error:
        if rank == 0:
            autopar.average_gradients(model)
        else:
            autopar.gather_for_metrics([torch.ones(1)], mpu=model.mpu)
    assert time.monotonic() - start < TIMEOUT + 6
    say("told")
    wait_for("told", [0, 1])
    first, other, *_ = str(error.value).splitlines()
    assert first == f"{own[rank]} failed: one of the ranks [0, 1] ended, failed or hangs."
    assert re.match(rf"  rank {1 - rank} (said|has been for \d s in).*{own[1 - rank]}", other), other


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@distributed(world_size=2)
def test_a_forward_of_one_rank_alone(transport: str) -> None:
    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2, "cpu_transport": transport}})
    ids, rank = torch.arange(6)[None], dist.get_rank()
    model(ids)
    hurry(model)
    if rank == 0:
        start = time.monotonic()
        with _quick(), pytest.raises(PipelineError, match=r"comparing what the forward begins with failed: one of"):
            model(ids)
        assert time.monotonic() - start < TIMEOUT + 4
        say("waited")
    else:
        wait_for("waited", [0])

"""Waits of one rank for another that does something else: they end, and say what either of them waits in."""

import re
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.distributed import failures
from autopar.errors import PipelineError
from tests.small import gpt2
from tests.timeouts import TIMEOUT, hurry, say, wait_for
from tests.worlds import distributed


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
    with patch.object(failures, "GRACE", 1.0), pytest.raises(PipelineError) as error:
        if rank == 0:
            autopar.average_gradients(model)
        else:
            autopar.gather_for_metrics([torch.ones(1)], mpu=model.mpu)
    assert time.monotonic() - start < TIMEOUT + 6
    say("told")
    wait_for("told", [0, 1])
    first, other, *_ = str(error.value).splitlines()
    assert first == f"{own[rank]} failed: one of the ranks [0, 1] ended, failed or hangs."
    told = [None, None]
    dist.all_gather_object(told, other, group=dist.new_group(backend="gloo"))
    assert any(re.match(rf"  rank \d said.*{name}", line) for name in own for line in told if line), told


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@distributed(world_size=2)
def test_a_forward_of_one_rank_alone(transport: str) -> None:
    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2, "cpu_transport": transport}})
    ids, rank = torch.arange(6)[None], dist.get_rank()
    model(ids)
    hurry(model)
    if rank == 0:
        start = time.monotonic()
        words = r"comparing the inputs of the forward failed: one of"
        with patch.object(failures, "GRACE", 1.0), pytest.raises(PipelineError, match=words):
            model(ids)
        assert time.monotonic() - start < TIMEOUT + 4
        say("waited")
    else:
        wait_for("waited", [0])

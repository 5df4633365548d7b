import json
import os
import random
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from autopar.distributed import agree as waiting
from autopar.distributed.agree import all_ranks, barrier, rank_zero
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from tests.exchange import everyones
from tests.pool import pooled
from tests.worlds import raises_everywhere, spawn


@pooled(world_size=3)
def test_a_call_on_some_ranks_fails_and_a_later_one_works():
    mpu = MPU()
    for _ in range(2):
        dist.barrier()
        if mpu.rank != 1:
            start = time.monotonic()
            with pytest.raises(CheckpointError, match=r"called on ranks 0, 2 but not on rank 1 of 3 within 1 s"):
                barrier(mpu, "save_parallelized", 1)
            assert time.monotonic() - start < 6
        dist.barrier()
        barrier(mpu, "save_parallelized", 20)


@pooled(world_size=3)
def test_nobody_goes_ahead_while_somebody_gives_up():
    mpu = MPU()
    draw = random.Random(mpu.rank)
    went: list[bool] = []
    timeout = 0.015
    for _ in range(60):
        dist.barrier()
        time.sleep(draw.random() * 0.03)
        try:
            barrier(mpu, "save", timeout)
            went.append(True)
        except CheckpointError:
            went.append(False)
        timeout *= 0.8 if went[-1] else 1.25  # stays where both outcomes are likely, on any machine
    dist.barrier()
    rounds = list(zip(*everyones(went), strict=True))
    # a late rank that finds the others gone waits alone and gives up too
    assert all(len(set(round)) == 1 for round in rounds)
    assert 5 < sum(went) < 55, "both outcomes must occur for this test to say anything"


@pooled(world_size=2)
def test_a_rank_that_arrives_while_another_gives_up_takes_it_along():
    mpu = MPU()
    if mpu.rank == 0:  # loses patience at 0.3 s, and the other one comes and goes before it says so

        def slow(value):
            assert value == [0]
            dist.barrier()
            dist.barrier()
            return json.dumps(value)

        waiting.json = SimpleNamespace(dumps=slow, loads=json.loads)
        barrier(mpu, "save", 0.3)
        waiting.json = json
    else:
        dist.barrier()
        barrier(mpu, "save", 0.3)
        dist.barrier()
    all_ranks(mpu, lambda: None)


@pooled(world_size=2)
def test_meetings_leave_no_keys_behind():
    mpu = MPU()
    store = dist.distributed_c10d._get_default_store()
    for _ in range(3):
        barrier(mpu, "save", 20)
    dist.barrier()
    counts = []
    for _ in range(5):
        barrier(mpu, "save", 20)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert len(set(counts)) == 1, counts


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_the_verdict_of_the_lowest_failing_rank_is_everybodys():
    mpu = MPU()

    def work():
        if mpu.rank in (2, 3):
            raise CheckpointError(f"rank {mpu.rank} is sad") if mpu.rank == 2 else ValueError("x")
        return mpu.rank

    with raises_everywhere(CheckpointError, "rank 2 is sad", "Reported by ranks 2, 3 of 4"):
        all_ranks(mpu, work)
    assert all_ranks(mpu, lambda: {"rank": mpu.rank}) == ([{"rank": r} for r in range(4)] if mpu.rank == 0 else [])
    assert rank_zero(mpu, lambda: ["é" * 100_000, mpu.rank]) == ["é" * 100_000, 0]

    def refuse(values):
        assert values == [0, 1, 2, 3]
        raise CheckpointError("they do not fit")

    with raises_everywhere(CheckpointError, "they do not fit"):
        all_ranks(mpu, lambda: mpu.rank, check=refuse)
    with raises_everywhere(CheckpointError, "/nowhere/x: No such file"):
        rank_zero(mpu, lambda: os.stat("/nowhere/x").st_size)


@pooled(world_size=2)
def test_an_interrupt_on_one_rank_is_an_error_on_the_other():
    mpu = MPU()

    def work():
        if mpu.rank == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if mpu.rank == 1 else CheckpointError):
        all_ranks(mpu, work)
    all_ranks(mpu, lambda: None)


def death(victim: int) -> None:
    mpu = MPU()
    barrier(mpu, "save", 20)
    if mpu.rank == victim:
        time.sleep(0.5)
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"^rank {victim} of 4 failed.*\n  all is well"):
        all_ranks(mpu, lambda: None, lambda: "all is well")
    assert time.monotonic() - start < 5


@pytest.mark.tier("all")
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_the_others_learn_at_once_who_died(victim):
    spawn(__name__, "death", 4, 60, (victim,), expect_dead=(victim,))


def death_before() -> None:
    mpu = MPU()
    if mpu.rank == 1:
        os._exit(1)
    with pytest.raises(CheckpointError, match="not on rank 1 of 3"):
        barrier(mpu, "save", 1)


@pytest.mark.tier("all")
def test_a_rank_that_died_before_the_call_is_named():
    spawn(__name__, "death_before", 3, 60, expect_dead=(1,))

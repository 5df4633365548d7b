"""Agreement of all ranks: barriers, verdicts, names of attempts, stop signals, arguments of initialize."""

import json
import os
import random
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import autopar
from autopar import StopSignal
from autopar.distributed import agree as waiting
from autopar.distributed.agree import all_ranks, barrier, differences, rank_zero
from autopar.distributed.mesh import MPU
from autopar.distributed.process import name_of_attempt
from autopar.errors import CheckpointError, ConfigError, ConsistencyError
from tests.exchange import everyones, raises_everywhere
from tests.harness.worlds import pooled, spawn
from tests.small import gpt2


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


def agreed(store: HashStore, ranks: list[int], late: int | None = None) -> list[str]:
    """The names that ranks get; ``late`` starts when the others have been looking for a while."""
    names: dict[int, str] = {}

    def join(rank: int) -> None:
        names[rank] = name_of_attempt(store, rank, len(ranks))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks if rank != late]
    for thread in threads:
        thread.start()
    if late is not None:
        threads[0].join(0.2)
        assert not names.keys() & {0}
        join(late)
    for thread in threads:
        thread.join(20)
    assert sorted(names) == ranks
    return [names[rank] for rank in ranks]


@pytest.mark.parametrize("late", [None, 0, 2])
def test_each_attempt_gets_its_own_name(late: int | None) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    seen = set()
    for _ in range(3):  # in the later ones the store is full of the words of ranks that are gone
        (name,) = set(agreed(store, [0, 1, 2], late if late != 0 else None))
        assert name not in seen
        seen.add(name)
    (name,) = set(agreed(store, [0, 1]))  # and with fewer ranks
    assert name not in seen


def test_one_rank_waits_for_nobody_and_a_rank_that_does_not_come_is_an_error() -> None:
    store = HashStore()
    assert name_of_attempt(store, 0, 1) != name_of_attempt(store, 0, 1)
    store.set_timeout(timedelta(seconds=20))
    agreed(store, [0, 1])
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match="2 ranks should start, and not all did within"):
        name_of_attempt(store, 0, 2)  # the other one's word is there, of an earlier attempt


@pooled(world_size=2)
def test_all_ranks_stop_after_the_same_step_and_a_second_signal_does_what_it_did_before() -> None:
    mpu, before = MPU(tensor_parallel_size=2), signal.getsignal(signal.SIGTERM)
    with StopSignal(mpu, signal.SIGTERM, signal.SIGUSR1) as stop:
        steps = 0
        for step in range(5):
            steps += 1
            if step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.requested():
                break
        assert steps == 3
        assert stop.requested()  # it stays so
    assert signal.getsignal(signal.SIGTERM) is before
    got = list[int]()
    before = signal.signal(signal.SIGUSR2, lambda number, _: got.append(number))
    try:
        with StopSignal(mpu, signal.SIGUSR2) as stop:
            assert not stop.requested()
            os.kill(os.getpid(), signal.SIGUSR2)
            assert stop.requested() and not got
            os.kill(os.getpid(), signal.SIGUSR2)
            assert got == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


@pooled(world_size=1)
def test_only_the_main_thread_handles_signals() -> None:
    mpu, errors = MPU(), list[str]()

    def make() -> None:
        with pytest.raises(ConfigError) as caught:
            StopSignal(mpu)
        errors.append(str(caught.value))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert errors and "main thread" in errors[0] and "in the main thread" in errors[0]


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": {"b": 2}}, {"a": {"b": 1}}, [("a.b", "2", "1")]),
        ({"a": 1}, {"b": None}, [("a", "1", "missing"), ("b", "missing", "null")]),
        ([[1, "x"], 2], [[1, "y"], 2], [("[0][1]", '"x"', '"y"')]),
        ({"shape": [2, 3]}, {"shape": [2]}, [("shape", "2 entries", "1 entries")]),
        ({"x": [1, {"y": True}]}, {"x": [1, {"y": True}]}, []),
        ({"x": "a" * 500}, {"x": None}, [("x", '"' + "a" * 95 + " ...", "null")]),
    ],
)
def test_differences_are_named_with_both_values(one: Any, other: Any, found: list[tuple[str, str, str]]) -> None:
    assert list(differences(one, other)) == found


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_ranks_that_call_initialize_differently_learn_the_key_and_both_values():
    rank = dist.get_rank()
    sizes = {"model_parallelism": {"tensor_parallel_size": 2}}
    with raises_everywhere(
        ConsistencyError,
        "ranks [1] call autopar.initialize with other arguments than rank 0:",
        "  config.pipeline.timeout: rank 0: 60, rank 1: 61\n",
    ):
        autopar.initialize(gpt2(), {**sizes, "pipeline": {"timeout": 60 + rank}})
    with raises_everywhere(ConsistencyError, "config.tensor_parallel_size: rank 0: 2, rank 1: 1"):
        autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 1 if rank else 2}})
    with raises_everywhere(
        ConsistencyError, "tensors.transformer.wte.weight.shape[0]: rank 0: 131, rank 1: 132", "and more"
    ):
        autopar.initialize(gpt2(vocab_size=131 + rank), sizes)
    model = gpt2()
    model.transformer.wpe.weight.requires_grad_(rank == 0)
    with raises_everywhere(ConsistencyError, "parameters.transformer.wpe.weight.requires_grad: rank 0: true, rank 1"):
        autopar.initialize(model, sizes)


@pooled(world_size=2)
def test_buffers_may_be_registered_in_another_order_on_each_rank():
    model = gpt2()
    for value in (1.0, 2.0) if dist.get_rank() == 0 else (2.0, 1.0):
        model.transformer.register_buffer(f"angles_{value:g}", torch.full((3,), value), persistent=False)
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": 2}})
    assert [model.transformer.angles_1[0].item(), model.transformer.angles_2[0].item()] == [1.0, 2.0]

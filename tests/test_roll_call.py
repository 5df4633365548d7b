"""Who is still there: processes that are gone, what ranks say, and how long collectives wait."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from autopar.errors import PipelineError
from autopar.mesh import MPU
from autopar.roll_call import PATIENCE, Process, RollCall, _timeout_of
from tests.worlds import distributed, spawn


def test_this_process_is_there():
    here = Process.here()
    assert here.pid == os.getpid()
    assert here.is_there() is True
    assert here._replace(place="elsewhere").is_there() is None
    assert here._replace(started="").is_there() is True  # where the kernel tells no start time


@pytest.mark.parametrize("started", [True, False])
def test_a_process_that_is_gone(started):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = Process.here()._replace(pid=child.pid, started="")
    if started:
        process = process._replace(started=_started(child.pid))
    assert process.is_there() is True
    child.kill()
    if started:  # a zombie, until somebody waits for it
        deadline = time.monotonic() + 5
        while process.is_there() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.is_there() is False
    child.wait()
    assert process.is_there() is False


def _started(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def test_another_process_with_the_same_number_is_another_one():
    assert Process.here()._replace(started="1").is_there() is False


@distributed(world_size=2)
def test_what_a_rank_says_is_heard_until_it_is_withdrawn() -> None:
    mpu = MPU(2)
    calls = [RollCall(mpu, 5), RollCall(mpu, 5)]
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    assert calls[0].heard(other) == ("", False)
    dist.barrier()
    calls[0].say(f"rank {mine} has no disk\nand no hope")
    dist.barrier()
    assert calls[0].heard(other) == (f"rank {other} has no disk\nand no hope", False)
    assert calls[1].heard(other) == ("", False)  # of another model
    assert calls[0].about([0, 1]) == f"  rank {other} said: rank {other} has no disk\n    and no hope"
    dist.barrier()
    calls[0].withdraw()
    dist.barrier()
    assert calls[0].heard(other) == ("", False)
    start = time.monotonic()
    expected = f"  rank {other} said nothing: hanging, late, or ended on another machine."
    assert calls[0].about([other]) == expected
    assert PATIENCE <= time.monotonic() - start < PATIENCE + 1
    dist.barrier()


@distributed(world_size=2)
def test_what_is_said_may_be_long_and_strange() -> None:
    roll = RollCall(MPU(2), 5)
    roll.say("ü" * 100_000 + "\0")
    dist.barrier()
    assert roll.heard(1 - dist.get_rank()) == ("ü" * 4000, False)


@distributed(world_size=2)
def test_patience_holds_inside_only() -> None:
    mpu = MPU(2, 1)
    roll = RollCall(mpu, 2)
    before = [_timeout_of(group) for group in roll._groups()]
    with pytest.raises(PipelineError) as info, roll.patience():
        assert {_timeout_of(group) for group in roll._groups()} == {timedelta(seconds=2)}
        with roll.patience():  # generate calls the model
            pass
        assert {_timeout_of(group) for group in roll._groups()} == {timedelta(seconds=2)}
        with roll.naming("summing", mpu.tp.ranks):
            if dist.get_rank():
                time.sleep(3)
                roll.say("ValueError: something broke")
                time.sleep(2)
                raise PipelineError("this is rank 1")
            dist.all_reduce(torch.ones(1), group=mpu.tp.group)
    assert [_timeout_of(group) for group in roll._groups()] == before
    if dist.get_rank() == 0:
        first, said, torch_says = str(info.value).splitlines()
        assert first == "summing failed: one of the ranks [0, 1] ended, failed or hangs."
        assert said == "  rank 1 said: ValueError: something broke"
        assert torch_says.startswith("  torch says: ")
        assert "2000ms" in torch_says
        assert roll.heard(0) == (str(info.value), False)


@distributed(world_size=3)
def test_who_is_asking_itself_is_given_time_to_finish() -> None:
    roll = RollCall(MPU(3), 5)
    rank = dist.get_rank()
    if rank == 1:  # waits for rank 2, which says nothing
        roll.say("the last word is not this", asking=True)
        dist.barrier()
        time.sleep(PATIENCE + 0.5)
        roll.say("rank 2 hangs")
    else:
        dist.barrier()
        if rank == 0:
            assert roll.about([1]) == "  rank 1 said: rank 2 hangs"
            roll.say("nor this", asking=True)
    dist.barrier()
    if rank == 1:
        assert roll.about([0, 2]) == "  rank 2 said nothing: hanging, late, or ended on another machine."
    dist.barrier()


@distributed(world_size=1)
def test_errors_of_the_users_own_pass() -> None:
    roll = RollCall(MPU(), 2)
    with pytest.raises(RuntimeError, match=r"^of the user's$"), roll.naming("summing", [0]):
        raise RuntimeError("of the user's")
    with pytest.raises(KeyError), roll.patience(), roll.naming("summing", [0]):
        raise KeyError("x")


def _one_of_four_ends() -> None:
    mpu = MPU(4)
    roll = RollCall(mpu, 20)
    dist.all_reduce(torch.ones(1), group=mpu.tp.group)
    if dist.get_rank() == 2:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(PipelineError) as info, roll.patience(), roll.naming("summing", mpu.tp.ranks):
        dist.all_reduce(torch.ones(1), group=mpu.tp.group)
    assert time.monotonic() - start < 10
    assert f"  rank 2 has ended: its process {roll._processes[2].pid} is gone." in str(info.value).splitlines()


def test_a_rank_whose_process_is_gone_is_named() -> None:
    spawn(__name__, "_one_of_four_ends", 4, 60.0, expect_dead=(2,))

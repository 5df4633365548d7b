"""Processes that are gone, what ranks publish, and how long collectives and ranks wait."""

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.distributed import failures
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.distributed.process import Process
from autopar.errors import PipelineError
from tests.harness.worlds import distributed, pooled
from tests.small import gpt2
from tests.timeouts import TIMEOUT, hurry, say, wait_for


def test_this_process_is_alive_and_one_that_is_gone_is_not():
    here = Process.current()
    assert here.pid == os.getpid()
    assert here.is_alive() is True
    assert here._replace(place="elsewhere").is_alive() is None
    assert here._replace(started="1").is_alive() is False  # another process with the same number
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    process = Process.current()._replace(pid=child.pid, started=started)
    assert process.is_alive() is True
    child.kill()
    deadline = time.monotonic() + 5
    while process.is_alive() and time.monotonic() < deadline:  # a zombie, until its parent waits for it
        time.sleep(0.01)
    assert process.is_alive() is False
    child.wait()
    assert process.is_alive() is False


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_a_rank_says_is_read_until_it_is_cleared() -> None:
    mpu = MPU(2)
    logs = [FailureLog(mpu, 5), FailureLog(mpu, 5)]
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    assert logs[0].read(other)[:2] == ("", False)
    dist.barrier()
    logs[0].publish(f"rank {mine} has no disk\nand no hope")
    dist.barrier()
    assert logs[0].read(other)[:2] == (f"rank {other} has no disk\nand no hope", False)
    assert logs[1].read(other)[:2] == ("", False)  # of another model
    assert logs[0].describe([0, 1]) == f"  rank {other} said: rank {other} has no disk\n    and no hope"
    later = time.time() + 90
    with patch.object(time, "time", lambda: later):
        said = logs[0].describe([0, 1])
    assert re.fullmatch(rf"  rank {other} said (89|9\d) s ago: rank {other} has no disk\n    and no hope", said)
    dist.barrier()
    logs[0].clear()
    dist.barrier()
    assert logs[0].read(other)[:2] == ("", False)
    start = time.monotonic()
    expected = f"  rank {other} said nothing: hanging, late, or ended on another machine."
    with patch.object(failures, "GRACE", 1.0):
        assert logs[0].describe([other]) == expected
    assert 1.0 <= time.monotonic() - start < 2.0
    dist.barrier()


@distributed(world_size=2)  # its time-out breaks the connections of the world
def test_patience_holds_inside_only() -> None:
    mpu = MPU(2, 1)
    log = FailureLog(mpu, TIMEOUT)
    before = [each.options._timeout for each in log._backends()]
    with pytest.raises(PipelineError) as info, log.deadline():
        assert {each.options._timeout for each in log._backends()} == {timedelta(seconds=TIMEOUT)}
        with log.deadline():  # generate calls the model
            pass
        assert {each.options._timeout for each in log._backends()} == {timedelta(seconds=TIMEOUT)}
        with log.blame("summing", mpu.tp.ranks):
            if dist.get_rank():
                time.sleep(TIMEOUT + 1)
                log.publish("ValueError: something broke")
                wait_for("noticed", [0])
                raise PipelineError("this is rank 1")
            dist.all_reduce(torch.ones(1), group=mpu.tp.group)
    say("noticed")
    assert [each.options._timeout for each in log._backends()] == before
    if dist.get_rank() == 0:
        first, said, torch_says = str(info.value).splitlines()
        assert first == "summing failed: one of the ranks [0, 1] ended, failed or hangs."
        assert said == "  rank 1 said: ValueError: something broke"
        assert torch_says.startswith("  torch says: ")
        assert f"{TIMEOUT}000ms" in torch_says
        assert log.read(0)[:2] == (str(info.value), False)


@pooled(world_size=3)
def test_who_is_asking_itself_is_given_time_to_finish() -> None:
    log = FailureLog(MPU(3), 5)
    rank = dist.get_rank()
    if rank == 1:  # waits for rank 2, which says nothing
        log.publish("the last report is not this", pending=True)
        dist.barrier()
        time.sleep(1.0 + 0.5)
        log.publish("rank 2 hangs")
    else:
        dist.barrier()
        if rank == 0:
            with patch.object(failures, "GRACE", 1.0):
                assert log.describe([1]) == "  rank 1 said: rank 2 hangs"
            log.publish("nor this", pending=True)
    dist.barrier()
    if rank == 1:
        with patch.object(failures, "GRACE", 1.0):
            assert log.describe([0, 2]) == "  rank 2 said nothing: hanging, late, or ended on another machine."
    dist.barrier()


@pooled(world_size=2)
def test_errors_of_the_users_own_pass_and_are_said() -> None:
    mpu = MPU(2)
    log = FailureLog(mpu, 2)
    other = 1 - dist.get_rank()
    for error in (
        RuntimeError("the residual connection has shape 3"),
        RuntimeError("nccl is not my name"),
        KeyError("x"),
    ):
        with pytest.raises(type(error), match=re.escape(str(error))), log.deadline(), log.blame("it", mpu.tp.ranks):
            raise error
        dist.barrier()
        assert log.read(other)[:2] == (f"{type(error).__name__}: {error}", False)
        dist.barrier()
    with pytest.raises(StopIteration), log.deadline():  # clears the report, and is no error
        raise StopIteration
    dist.barrier()
    assert log.read(other)[:2] == ("", False)
    dist.barrier()
    with pytest.raises(RuntimeError, match="gloo/transport"), log.blame("it", [dist.get_rank()]):  # no collective
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    with (
        patch.object(failures, "GRACE", 0.2),
        pytest.raises(PipelineError, match=r"it failed: one of the ranks \[0, 1\]"),
        log.blame("it", mpu.tp.ranks),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Application timeout caused pair closure")
    dist.barrier()


@pooled(world_size=1)
def test_a_store_that_does_not_answer_is_asked_once() -> None:
    log = FailureLog(MPU(), 2)

    class Frozen:
        def check(self, keys: list[str]) -> bool:
            time.sleep(60)
            return False

    log._store = Frozen()
    start = time.monotonic()
    for _ in range(5):
        assert log.read(0)[:2] == ("", False)
    log.publish("nobody hears it")
    log.clear()
    assert time.monotonic() - start < 2


@distributed(world_size=2)  # a time-out breaks the connections of the world
def test_a_replica_evaluates_while_another_averages() -> None:
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

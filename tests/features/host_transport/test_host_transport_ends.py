"""When shared memory carries the collectives, and its end: given back, refused to forks, failed ranks."""

import mmap
import os
import platform
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.distributed import collectives
from autopar.distributed.axis import Axis
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.distributed.process import Process
from autopar.errors import ConfigError, PipelineError
from autopar.features.host_transport import transport as host_transport
from autopar.features.host_transport.transport import HostTransport, _obstacle, _Offer, segment_bytes
from tests.exchange import raises_everywhere
from tests.features.host_transport.test_host_transport import axes_of
from tests.harness.worlds import pooled, spawn
from tests.small import gpt2
from tests.transports import segments


@pytest.mark.tier("sweep")
@pooled(world_size=2)
def test_the_memory_is_given_back() -> None:
    before = opened, mapped = segments()
    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2, "cpu_transport": "shm"}})
    assert segments() == (opened + 1, mapped + 1)
    ids = torch.arange(6).view(1, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    autopar.deparallelize(model)
    assert segments() == before
    mpu = MPU(2, cpu_transport="shm")
    out = collectives.reduce(torch.ones(3), mpu.tp)
    mpu.destroy()
    assert segments() == before
    assert out.tolist() == [2, 2, 2]  # a result is no view of it
    dist.barrier()
    MPU(2, cpu_transport="shm").tp.transport = None  # dropped, and not destroyed
    assert segments() == before
    assert not [name for name in os.listdir("/dev/shm") if "autopar" in name]


@pytest.mark.parametrize("end", ["left", "ended"])
def test_a_rank_that_ends_right_after_the_last_collective_is_not_missed(monkeypatch, end) -> None:
    """It comes, and leaves, between the look at whether it has come and the look at whether it has left."""
    monkeypatch.setattr(host_transport, "_timeout", lambda group: 10.0)
    monkeypatch.setattr(host_transport, "_LOOK_AFTER", 0.0)
    ranks = [Rank(), Rank()]
    axis = Axis("tp", None, range(2), 0)
    transport = HostTransport(axis, ranks, mmap.mmap(-1, segment_bytes(2)))
    memory, other = transport._flags, transport._others[0]
    looks = []

    class Flags:
        def __getitem__(self, place: int) -> int:
            if end == "left" and place == other + 1:
                come()
                memory[other + 1] = 1
            return memory[place]

        def __setitem__(self, place: int, value: int) -> None:
            memory[place] = value

    def come() -> bool:
        looks.append(end)
        memory[other] = max(memory[other], memory[transport._own])
        return False

    transport._flags = Flags()
    if end == "ended":
        ranks[1].is_alive = come
    assert transport.run("all_reduce", torch.ones(3)) and looks
    memory[other] = 0
    looks.clear()
    monkeypatch.setattr(transport, "_flags", memory)
    expected = r"ranks \[1\] have left it" if end == "left" else "rank 1 has ended"
    ranks[1].is_alive = lambda: end == "left"
    with pytest.raises(dist.DistBackendError, match=expected):
        transport.run("all_reduce", torch.ones(3))


class Rank:
    """A process as this one looks at it."""

    pid = 17

    def is_alive(self) -> bool:
        return True


@pooled(world_size=2)
def test_a_fork_of_a_rank_is_no_rank() -> None:
    _, shm = axes_of(2)
    total = collectives.reduce(torch.ones(4), shm)
    child = os.fork()
    if child == 0:
        try:
            collectives.reduce(torch.ones(4), shm)
        except RuntimeError as error:
            said = re.fullmatch(r"process \d+ was forked from rank \d \(process \d+\): only .*", str(error))
            os._exit(0 if said else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(collectives.reduce(torch.ones(4), shm), total)


@pooled(world_size=3)
def test_ranks_in_different_collectives_learn_it() -> None:
    for case in range(3):
        mpu = MPU(3, cpu_transport="shm")
        odd, shm = dist.get_rank() == 1, mpu.tp
        x = torch.ones(4 + (odd and case == 0), dtype=torch.int32 if odd and case == 1 else torch.float32)
        named = 0 if odd else 1
        with pytest.raises(RuntimeError) as info:
            if odd and case == 2:
                collectives.all_gather(x, shm, collectives.even_layout(12, 3), 0)
            else:
                collectives.reduce(x, shm)
        text = str(info.value)
        different = f"the ranks {sorted((dist.get_rank(), named))} are in different collectives."
        assert different in text or re.search(r"ranks \[.*\] have left it, after an error or at their end", text), text
        with pytest.raises(RuntimeError, match="no collective is possible any more: "):
            collectives.reduce(torch.ones(4), shm)
        dist.barrier()
        mpu.destroy()


def gone_from(mpu: MPU) -> None:
    """Rank 0 has left, and all of its last collective was there."""
    assert collectives.reduce(torch.ones(4), mpu.tp).tolist() == [2] * 4
    with pytest.raises(dist.DistBackendError, match=r"ranks \[0\] have left it"):
        collectives.reduce(torch.ones(4), mpu.tp)


@pooled(world_size=2)
def test_a_rank_that_does_not_come_or_is_interrupted_ends_the_collective_of_all() -> None:
    mpu = MPU(2, cpu_transport="shm")
    log = FailureLog(mpu, 1)
    other = 1 - dist.get_rank()
    if dist.get_rank() == 0:
        start = time.monotonic()
        expected = rf"shared memory of ranks \[0, 1\] \(tp axis\): timed out after 1 s of waiting for ranks \[{other}\]"
        with pytest.raises(dist.DistBackendError, match=expected), log.deadline():
            collectives.reduce(torch.ones(4), mpu.tp)
        assert 1 <= time.monotonic() - start < 3
    dist.barrier()
    if dist.get_rank() == 1:
        gone_from(mpu)
    dist.barrier()

    mpu = MPU(2, cpu_transport="shm")
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            collectives.reduce(torch.ones(4), mpu.tp)
        signal.signal(signal.SIGALRM, before)
        dist.barrier()
    else:
        dist.barrier()
        gone_from(mpu)
    dist.barrier()


def _killed(doomed: int) -> None:
    sizes = {"tensor_parallel_size": 3, "cpu_transport": "shm"}
    model = autopar.initialize(gpt2(), {"model_parallelism": sizes, "pipeline": {"timeout": 30}})
    ids = torch.arange(6).view(1, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    mpu = model.mpu
    if dist.get_rank() == doomed:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PipelineError) as info:
        collectives.reduce(torch.ones(4), mpu.tp)
    text = str(info.value)
    assert text.startswith("a tensor-parallel collective failed: one of the ranks [0, 1, 2] ended, failed or hangs.\n")
    assert f"rank {doomed} has ended: its process " in text
    assert time.monotonic() - start < 10, "not at once, but after the timeout"
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done on {dist.get_rank()}", "yes")
    store.wait([f"done on {rank}" for rank in range(3) if rank != doomed])


@pytest.mark.tier("all")
@pytest.mark.parametrize("doomed", [pytest.param(0, marks=pytest.mark.tier("sweep")), 2])
def test_a_rank_that_is_killed_is_named_and_leaves_nothing(doomed: int) -> None:
    before = set(os.listdir("/dev/shm"))
    spawn(__name__, "_killed", 3, 60.0, (doomed,), expect_dead=(doomed,))
    left = {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("sem.mp")}
    assert not [name for name in left if "autopar" in name]


def _offers(hosts: str, cores: int = 8) -> list[_Offer]:
    """One rank on each of these hosts of one letter."""
    processes = [Process(f"{host} boot-{host}", rank, "1") for rank, host in enumerate(hosts)]
    return [_Offer(process, frozenset(range(cores)), -1, "") for process in processes]


@pytest.mark.parametrize(
    ("hosts", "groups", "cores", "choice", "expected"),
    [
        ("aaaa", [[0, 1], [2, 3]], 4, "auto", ""),
        ("aabb", [[0, 1], [2, 3]], 2, "auto", ""),
        ("aaaa", [[0, 1], [2, 3]], 3, "auto", "4 ranks run on the 3 cores of a (boot-a)"),
        ("aaaa", [[0, 1], [2, 3]], 3, "shm", ""),
        ("aaab", [[2, 3]], 9, "shm", "ranks [2, 3] form a group, and rank 2 runs on a (boot-a), rank 3 on b (boot-b)"),
    ],
)
def test_who_shares_memory(hosts: str, groups: list[list[int]], cores: int, choice: str, expected: str) -> None:
    assert _obstacle(_offers(hosts, cores), groups, choice) == expected
    offers = [offer._replace(cores=frozenset({rank})) for rank, offer in enumerate(_offers("aaaa"))]
    assert _obstacle(offers, [[0, 1, 2, 3]], "auto") == ""
    assert _obstacle(offers[:1] * 2, [[0, 1]], "auto") == "2 ranks run on the 1 cores of a (boot-a)"


@pooled(world_size=2)
def test_auto_takes_shared_memory_where_it_can_and_shm_is_an_error_elsewhere() -> None:
    with pytest.raises(ConfigError, match=re.escape("cpu_transport must be auto, gloo or shm, not mpi")):
        MPU(2, cpu_transport="mpi")
    for cores, expected in ((2, HostTransport), (1, type(None))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
            assert type(MPU(2).tp.transport) is expected
            assert type(MPU(2, cpu_transport="shm").tp.transport) is HostTransport
            assert MPU(2, cpu_transport="gloo").tp.transport is None
            assert MPU(1, cpu_transport="shm").tp.transport is None  # nothing to carry
            assert type(MPU(1).dp_cp.transport) is type(MPU(1, cpu_transport="shm").dp.transport) is expected

    rank = dist.get_rank()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    size = segment_bytes(2)
    before, places = segments(), "ranks [0, 1] form a group, and rank 0 runs on host-0 (boot), rank 1 on host-1 (boot)"
    cases = [
        (platform, "machine", lambda: "aarch64" if rank else "x86_64", "rank 1: its processor, aarch64, may show"),
        (os, "posix_fallocate", refuse, f"rank 0: there are no {size} bytes to share ([Errno 28] No space left"),
        (host_transport.mmap, "mmap", refuse, "rank 0: it cannot open the memory of rank 0 ([Errno 28] No space"),
        (host_transport, "segment_bytes", lambda _: size + rank, "rank 1: /proc/"),
        (host_transport.Process, "current", lambda: Process(f"host-{rank} boot", os.getpid(), ""), places),
    ]
    for holder, name, instead, text in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, name, instead)
            groups = len(dist.distributed_c10d._world.pg_map)
            with raises_everywhere(ConfigError, f"cpu_transport=shm is not supported here: {text}", "or auto, which"):
                MPU(2, cpu_transport="shm")
            assert len(dist.distributed_c10d._world.pg_map) == groups
            assert MPU(2).tp.transport is None
    assert segments() == before

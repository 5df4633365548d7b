"""When shared memory carries the collectives, and what says that it cannot."""

import os
import platform
import re

import pytest
import torch
import torch.distributed as dist

from autopar.distributed.mesh import MPU
from autopar.distributed.process import Process
from autopar.errors import ConfigError
from autopar.features.host_transport import transport as host_transport
from autopar.features.host_transport.transport import HostTransport, _obstacle, _Offer, segment_bytes
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.transports import segments


def _offers(hosts: str, cores: int = 8, problems: dict[int, str] | None = None) -> list[_Offer]:
    """One rank on each of these hosts of one letter."""
    problem = problems or {}
    return [
        _Offer(Process(f"{host} boot-{host}", rank, "1"), frozenset(range(cores)), -1, problem.get(rank, ""))
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "groups", "cores", "choice", "expected"),
    [
        ("aaaa", [[0, 1], [2, 3]], 4, "auto", ""),
        ("aabb", [[0, 1], [2, 3]], 2, "auto", ""),
        ("aaaa", [[0, 1], [2, 3]], 3, "auto", "4 ranks run on the 3 cores of a (boot-a)"),
        ("aaaa", [[0, 1], [2, 3]], 3, "shm", ""),
        (
            "aaab",
            [[0, 1], [2, 3]],
            9,
            "shm",
            "ranks [2, 3] form a group, and rank 2 runs on a (boot-a), rank 3 on b (boot-b)",
        ),
    ],
)
def test_who_shares_memory(hosts: str, groups: list[list[int]], cores: int, choice: str, expected: str) -> None:
    assert _obstacle(_offers(hosts, cores), groups, choice) == expected


def test_ranks_that_are_pinned_to_cores_of_their_own_are_counted_together() -> None:
    offers = [offer._replace(cores=frozenset({rank})) for rank, offer in enumerate(_offers("aaaa"))]
    assert _obstacle(offers, [[0, 1, 2, 3]], "auto") == ""
    assert _obstacle(offers[:1] * 2, [[0, 1]], "auto") == "2 ranks run on the 1 cores of a (boot-a)"


@pooled(world_size=2)
def test_auto_takes_shared_memory_where_each_rank_has_a_core() -> None:
    original = os.sched_getaffinity
    for cores, expected in ((2, HostTransport), (1, type(None))):
        os.sched_getaffinity = lambda _, cores=cores: set(range(cores))  # type: ignore[assignment]
        try:
            assert type(MPU(2).tp.transport) is expected
            assert type(MPU(2, cpu_transport="shm").tp.transport) is HostTransport
            assert MPU(2, cpu_transport="gloo").tp.transport is None
            assert MPU(1, cpu_transport="shm").tp.transport is None  # nothing to carry
        finally:
            os.sched_getaffinity = original


@pooled(world_size=2)
def test_where_it_is_impossible_auto_takes_gloo_and_shm_is_an_error() -> None:
    rank = dist.get_rank()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def other_place() -> str:
        return f"host-{rank} boot"

    size = segment_bytes(2)
    before = segments()
    cases = [
        (platform, "machine", lambda: "aarch64" if rank else "x86_64", "rank 1: its processor, aarch64, may show"),
        (os, "posix_fallocate", refuse, f"rank 0: there are no {size} bytes to share ([Errno 28] No space left"),
        (host_transport.mmap, "mmap", refuse, "rank 0: it cannot open the memory of rank 0 ([Errno 28] No space"),
        (host_transport, "segment_bytes", lambda _: size + rank, "rank 1: /proc/"),
        (
            host_transport.Process,
            "current",
            lambda: Process(other_place(), os.getpid(), ""),
            "ranks [0, 1] form a group, and rank 0 runs on host-0 (boot), rank 1 on host-1 (boot)",
        ),
    ]
    for holder, name, instead, text in cases:
        original = getattr(holder, name)
        setattr(holder, name, instead)
        try:
            groups = len(dist.distributed_c10d._world.pg_map)
            with raises_everywhere(ConfigError, f"cpu_transport=shm is not supported here: {text}", "or auto, which"):
                MPU(2, cpu_transport="shm")
            assert len(dist.distributed_c10d._world.pg_map) == groups
            assert MPU(2).tp.transport is None
        finally:
            setattr(holder, name, original)
    assert segments() == before


@pooled(world_size=2)
def test_the_wrong_word_is_an_error() -> None:
    with pytest.raises(ConfigError, match=re.escape("cpu_transport must be auto, gloo or shm, not mpi")):
        MPU(2, cpu_transport="mpi")
    assert torch.distributed.is_initialized()

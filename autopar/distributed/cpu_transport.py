"""Choose what carries a tensor-parallel group's collectives on the CPU: the config's ``cpu_transport``.

``shm`` is :class:`~autopar.distributed.host_transport.HostTransport`, ``gloo`` the process group. All groups of a mesh
get the same, because all ranks decide from what all of them have told.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from autopar.distributed.axis import Axis, device_of
from autopar.distributed.host_transport import HostTransport, segment_bytes
from autopar.distributed.process import Process
from autopar.distributed.trace import VARIABLE as TRACE
from autopar.errors import ConfigError

_ORDERED = ("x86_64", "AMD64")  # processors on which flags are seen after the data, without barriers


class _Offer(NamedTuple):
    """A rank's message to the others.

    Attributes:
        cores: numbers of those on which it may run.
        descriptor: of the memory that it made for its group; -1 if it is not the group's first rank.
        problem: what keeps it from sharing memory.
    """

    process: Process
    cores: frozenset[int]
    descriptor: int
    problem: str


def choose_transport(axis: Axis, groups: Sequence[Sequence[int]], choice: str, control: Any) -> HostTransport | None:
    """Connect the ranks of each group through shared memory if that is chosen and possible; None: use gloo.

    Collective over the world, unless ``choice`` is gloo or the axis has one rank.

    Args:
        axis: this rank's.
        groups: global ranks of the axis's groups, on all ranks of the world.
        choice: ``auto``, ``gloo`` or ``shm``.
        control: gloo group of the world.

    Raises:
        ConfigError: on every rank, if ``shm`` is chosen and impossible for one of them; says why.
    """
    if choice == "gloo" or axis.size == 1:
        return None
    offer = _offer(axis)
    made = None
    try:
        offers = [offer] * dist.get_world_size()
        dist.all_gather_object(offers, offer, group=control)
        problem = _obstacle(offers, groups, choice)
        if not problem:
            made, mine = _connect(axis, [offers[rank] for rank in axis.ranks], own_cores=not _crowded(offers))
            problems = [mine] * len(offers)
            dist.all_gather_object(problems, mine, group=control)
            problem = _first(problems)
    finally:
        if offer.descriptor >= 0:
            os.close(offer.descriptor)
    if not problem:
        return made
    if made is not None:
        made.close()
    if choice == "shm":
        raise ConfigError(
            f"model_parallelism.cpu_transport=shm is impossible: {problem}.\n"
            "  gloo works everywhere; auto takes shm where it is possible and there is a core for each rank."
        )
    return None


def _offer(axis: Axis) -> _Offer:
    cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    descriptor, problem = -1, ""
    if platform.machine() not in _ORDERED:
        problem = f"its processor, {platform.machine()}, may show a flag before the data (x86_64 does not)"
    elif not hasattr(os, "memfd_create"):
        problem = f"{platform.system()} has no memory without a name (memfd_create)"
    elif device_of(axis).type != "cpu":
        problem = f"its tensors are on {device_of(axis)}"
    elif os.environ.get(TRACE):  # perhaps of this rank alone
        problem = f"{TRACE} is set, and a trace sees what torch carries"
    elif "gloo" not in str(dist.get_backend_config(axis.group)):
        problem = f"the tensor-parallel group is {dist.get_backend(axis.group)}, not gloo"
    elif axis.rank == 0:
        size = segment_bytes(axis.size)
        try:
            descriptor = os.memfd_create("autopar", os.MFD_CLOEXEC)
            os.posix_fallocate(descriptor, 0, size)  # now, and not when a page is first written
        except OSError as error:
            problem = f"there are no {size} bytes to share ({error})"
    return _Offer(Process.current(), cores, descriptor, problem)


def _obstacle(offers: list[_Offer], groups: Sequence[Sequence[int]], choice: str) -> str:
    """Return why the groups do not get shared memory; empty if nothing speaks against it."""
    problem = _first([offer.problem for offer in offers])
    if problem:
        return problem
    for group in groups:
        here, *others = ((rank, _host(offers[rank])) for rank in group)
        for rank, host in others:
            if offers[rank].process.place != offers[here[0]].process.place:
                return f"ranks {list(group)} form a group, and rank {here[0]} runs on {here[1]}, rank {rank} on {host}"
    return _crowded(offers) if choice == "auto" else ""


def _crowded(offers: list[_Offer]) -> str:
    """Return on which machine a core has more than one rank; empty if each rank has its own."""
    by_place: dict[str, list[_Offer]] = {}
    for offer in offers:
        by_place.setdefault(offer.process.place, []).append(offer)
    for here_too in by_place.values():
        cores = len(frozenset[int]().union(*(offer.cores for offer in here_too)))
        if len(here_too) > cores:
            return f"{len(here_too)} ranks run on the {cores} cores of {_host(here_too[0])}"
    return ""


def _host(offer: _Offer) -> str:
    """Return the host name, and its boot time and container, which differ between machines of one name."""
    name, *rest = offer.process.place.split()
    return f"{name} ({' '.join(rest)})" if rest else name


def _first(problems: list[str]) -> str:
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), "")


def _connect(axis: Axis, offers: list[_Offer], *, own_cores: bool) -> tuple[HostTransport | None, str]:
    """Map the memory of the group's first rank; or say what keeps this rank from that."""
    owner, size = offers[0], segment_bytes(axis.size)
    path = f"/proc/{owner.process.pid}/fd/{owner.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != size:
                return None, f"{path} is not the memory of rank {axis.ranks[0]}"
            segment = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
    except OSError as error:
        return None, f"it cannot open the memory of rank {axis.ranks[0]} ({error})"
    return HostTransport(axis, [offer.process for offer in offers], segment, own_cores=own_cores), ""

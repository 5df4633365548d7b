"""Collectives of CPU tensors through memory that the ranks of one machine share, instead of gloo's sockets.

vLLM, SGLang and DeepSpeed have similar collectives in C++ for inference on CPUs. Here every step is one torch operation
on a cached view, and a flag of 8 bytes.

**Protocol.** Every rank has a slot in each of two buffers, and a flag. In a collective, each rank copies its data into
its slot of the next buffer, sets its flag to the number of the collective, waits until no flag is lower, and reads the
slots. Two buffers suffice: before a rank writes into a buffer again, it has seen all flags of the collective in
between, and a rank sets its flag only after reading. Every rank adds in the order of ranks, so sums are bitwise
identical. Large sums over three or more ranks take two steps (reduce-scatter, all-gather). A tensor larger than a slot
is sent in chunks.

**Memory order.** A flag must not become visible before its data. On x86, stores become visible in program order, and
loads run in program order (Intel SDM 3A 8.2.2; AMD APM 2 7.2). String instructions are ordered before a later store to
a flag (8.2.4), and the non-temporal stores of memcpy end with a fence. Separate calls into compiled code write flag and
data, so no compiler reorders them, and an aligned flag of 8 bytes is a single store. Python has no barrier for weaker
memory orders such as ARM's, so autopar uses gloo there.

**Waiting.** A rank spins for a few milliseconds (0.1 ms if ranks share cores), yielding its core to other processes.
Then it sleeps, and checks for terminated processes. A rank that fails inside a collective sets a mark for the other
ranks and cannot use the transport again.

**Memory.** The memory is an anonymous file (memfd) of the group's first rank, which the other ranks open through /proc.
It has no name that could be left behind, and the kernel frees it with the last process that maps it.

**Choice.** All groups of a mesh get the same transport, because all ranks decide from the same facts.
"""

from __future__ import annotations

import itertools
import mmap
import os
import platform
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.compat.c10d import backend_of
from autopar.compat.tensors import is_in_torch_dispatch_mode, no_dispatch_modes
from autopar.distributed.axis import Axis, device_of
from autopar.distributed.process import Process
from autopar.errors import ConfigError
from autopar.registry import TRACE
from autopar.swap import NotCopied

_SLOT = 1 << 20  # bytes
_ONE_STEP = 1 << 16  # largest tensor, in bytes, that three or more ranks sum in one step
_LINE = 16  # words between flags: two cache lines, which CPUs fetch together
_PAGE = 4096
_SIGNATURE = 24  # low bits of a flag, which identify the collective; its number is above them
_SPIN = 1e-4  # seconds; with shared cores a longer spin blocks the awaited rank
_SPIN_ON_OWN_CORE = 3e-3  # seconds; waking up from sleep costs 3 to 7 % of the time per decoded token (measured)
_SLEEPS = (2e-5, 1e-3)  # seconds: shortest and longest
_LOOK_AFTER = 0.1  # seconds between two checks of the other processes
_CACHED = 256  # number of shapes whose views are cached
_METHODS = {  # collective of autopar.distributed.gloo_collectives -> method
    "all_reduce": "_all_reduce",
    "reduce_scatter_tensor": "_reduce_scatter",
    "all_gather_into_tensor": "_all_gather",
    "broadcast": "_broadcast",
}


_HALF = (torch.float16, torch.bfloat16)
_SUMMABLE = frozenset({*_HALF, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64})


def segment_bytes(size: int) -> int:
    """Return the size of the memory that ``size`` ranks share."""
    return _header_bytes(size) + 2 * size * _SLOT


def _header_bytes(size: int) -> int:
    return -(-size * _LINE * 8 // _PAGE) * _PAGE


_Views = tuple[int, list[torch.Tensor], list[list[torch.Tensor]]]
"""Signature of dtype and shape, slots of each buffer, ``[size, *shape]``, and slot of each rank, ``[*shape]``."""


class HostTransport(NotCopied):
    """Collectives of one axis through shared memory. A lock serializes calls of several threads.

    Args:
        axis: Axis whose ranks all run on this machine.
        processes: Processes of these ranks.
        segment: Mapped memory of :func:`segment_bytes`, initially zero.
        own_cores: True if the machine has a core for each of its ranks.
    """

    def __init__(
        self, axis: Axis, processes: Sequence[Process], segment: mmap.mmap, *, own_cores: bool = False
    ) -> None:
        self._spin = _SPIN_ON_OWN_CORE if own_cores else _SPIN
        self._axis, self._processes, self._rank, self._size = axis, tuple(processes), axis.rank, axis.size
        header = _header_bytes(axis.size)
        self._flags = memoryview(segment)[:header].cast("q")
        self._own = axis.rank * _LINE
        self._others = [rank * _LINE for rank in range(axis.size) if rank != axis.rank]
        with torch.inference_mode(False):
            self._data = torch.frombuffer(segment, dtype=torch.uint8, offset=header).view(2, axis.size, _SLOT)
        self._views: dict[tuple[torch.dtype, torch.Size], _Views] = {}
        self._count = 0  # number of collectives so far
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._failed = ""

    def run(self, collective: str, *args: Any) -> bool:
        """Run a collective by torch's name, with identical sizes on all ranks.

        ``all_reduce(x)`` sums in place; ``broadcast(x, source)`` from a global rank, ``all_gather_into_tensor(out, x)``
        and ``reduce_scatter_tensor(out, x)`` need contiguous tensors, the last two flat ones.
        Returns False on all ranks if shared memory does not support the collective.

        Raises:
            DistBackendError: A rank has ended, failed or timed out (timeout of the axis's group).
            RuntimeError: The ranks are in different collectives, or this process is a fork of a rank.
        """
        name = _METHODS.get(collective, "")
        first: torch.Tensor = args[0]
        if not name or not first.is_cpu or torch.compiler.is_compiling():
            return False
        if first.dtype not in _SUMMABLE and name in ("_all_reduce", "_reduce_scatter"):
            return False
        if first.numel() == 0:
            return True
        if torch.is_grad_enabled():
            args = tuple(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args)
        method = getattr(self, name)
        if not is_in_torch_dispatch_mode():
            self._call(method, args)
            return True
        # Show a dispatch mode that follows tensors the sources of the result, but hide the slots.
        if name == "_all_gather":
            args[0].view(self._size, -1).copy_(args[1])
        elif name == "_reduce_scatter":
            args[0].copy_(args[1].view(self._size, -1)[0])
        with no_dispatch_modes():
            self._call(method, args)
        return True

    def close(self) -> None:
        """Release the memory; ranks that wait for this one raise."""
        with self._lock:
            self._leave("the transport was closed")
            self._views.clear()
            del self._flags, self._data

    def _call(self, method: Callable[..., None], args: tuple[Any, ...]) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"process {os.getpid()} was forked from rank {self._axis.ranks[self._rank]} (process {self._pid}): "
                "only the rank's process may run collectives"
            )
        with self._lock:
            if self._failed:
                raise dist.DistBackendError(f"{self}: no collective is possible any more: {self._failed}")
            try:
                method(*args)
            except BaseException as error:  # also for an interrupt: no rank may read half-written data
                self._leave(f"{type(error).__name__}: {error}")
                raise

    def _all_reduce(self, x: torch.Tensor) -> None:
        two_steps = self._size > 2 and x.nbytes > _ONE_STEP
        if x.nbytes <= _SLOT and not two_steps:
            self._sum(x)
            return
        flat = x.reshape(-1)
        for part in flat.split(_SLOT // x.itemsize):
            (self._sum_in_two_steps if two_steps else self._sum)(part)
        if flat.data_ptr() != x.data_ptr() or not x.is_contiguous():
            x.copy_(flat.view(x.shape))

    def _sum(self, x: torch.Tensor) -> None:
        signature, _, slots = self._put(x)
        self._meet(signature ^ 1)
        _add_in_order(slots, x)

    def _sum_in_two_steps(self, x: torch.Tensor) -> None:
        signature, _, slots = self._put(x)
        self._meet(signature ^ 2)
        bounds = [x.numel() * rank // self._size for rank in range(self._size + 1)]
        parts = list(itertools.pairwise(bounds))
        start, stop = parts[self._rank]
        _add_in_order([slot[start:stop] for slot in slots], x[start:stop])
        slots[self._rank][start:stop].copy_(x[start:stop])
        self._meet(signature ^ 3, step=1)
        for rank, (start, stop) in enumerate(parts):
            if rank != self._rank:
                x[start:stop].copy_(slots[rank][start:stop])

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        rows, width = out.view(self._size, -1), _SLOT // x.itemsize
        for start in range(0, x.numel(), width):
            part = x if x.numel() <= width else x[start : start + width]
            signature, block, _ = self._put(part)
            self._meet(signature ^ 4)
            rows[:, start : start + width].copy_(block)

    def _reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        rows, width = x.view(self._size, -1), _SLOT // (self._size * x.itemsize)
        for start in range(0, out.numel(), width):
            signature, _, slots = self._put(rows[:, start : start + width])
            self._meet(signature ^ 5)
            _add_in_order([slot[self._rank] for slot in slots], out[start : start + width])

    def _broadcast(self, x: torch.Tensor, source: int) -> None:
        place = self._axis.ranks.index(source)
        for part in x.view(-1).split(_SLOT // x.itemsize):
            signature, _, slots = self._put(part, writes=place == self._rank)
            self._meet(signature ^ 6 ^ place << 3)
            if place != self._rank:
                part.copy_(slots[place])

    def _put(self, x: torch.Tensor, *, writes: bool = True) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
        """Start a collective: write ``x`` into the next buffer, and return its signature and slots."""
        signature, blocks, slots = self._views.get((x.dtype, x.shape)) or self._make_views(x)
        self._count += 1
        turn = self._count & 1
        if writes:
            slots[turn][self._rank].copy_(x)
        return signature, blocks[turn], slots[turn]

    def _make_views(self, x: torch.Tensor) -> _Views:
        if len(self._views) >= _CACHED:
            self._views.clear()
        with torch.inference_mode(False):  # the views must work in any mode
            blocks = [buffer[:, : x.nbytes].view(x.dtype).view(self._size, *x.shape) for buffer in self._data]
            slots = [list(block.unbind(0)) for block in blocks]
        signature = zlib.crc32(f"{x.dtype} {x.numel()}".encode()) >> (32 - _SIGNATURE)
        made = self._views[x.dtype, x.shape] = (signature, blocks, slots)
        return made

    def _meet(self, signature: int, step: int = 0) -> None:
        """Set this rank's flag, and wait until all ranks have reached the same point."""
        flags = self._flags
        mark = (2 * self._count + step) << _SIGNATURE | signature
        flags[self._own] = mark
        for place in self._others:
            if flags[place] != mark:
                self._wait(place, mark)

    def _wait(self, place: int, mark: int) -> None:
        flags, number = self._flags, mark >> _SIGNATURE
        pause, start = _SLEEPS[0], time.monotonic()
        looked = start
        while True:
            found, now = flags[place], time.monotonic()
            if found == mark or found >> _SIGNATURE > number:  # the other rank may already be in a later collective
                return
            if now - start < self._spin:
                os.sched_yield()
                continue
            if found >> _SIGNATURE == number:
                both = [self._axis.ranks[own // _LINE] for own in sorted((self._own, place))]
                raise RuntimeError(
                    f"{self}: the ranks {both} are in different collectives.\n"
                    "  All ranks must make the same calls in the same order: forward, generate, save, step."
                )
            left = any(flags[other + 1] for other in self._others)
            if left or now - looked > _LOOK_AFTER:
                gone = self._gone(left)
                if gone and flags[place] >> _SIGNATURE < number:  # read again: it may have set its flag before it ended
                    raise dist.DistBackendError(f"{self}: {gone}")
                looked = now
            if now - start > (seconds := _timeout(self._axis.group)):
                late = [self._axis.ranks[o // _LINE] for o in self._others if flags[o] >> _SIGNATURE < number]
                raise dist.DistBackendError(f"{self}: timed out after {seconds:g} s of waiting for ranks {late}")
            time.sleep(pause)
            pause = min(1.5 * pause, _SLEEPS[1])

    def _gone(self, left: bool) -> str:
        """Return a description of ranks that have ended, or left after an error; empty if there are none."""
        for rank, process in zip(self._axis.ranks, self._processes, strict=True):
            if process.is_alive() is False:
                return f"rank {rank} has ended: its process {process.pid} is gone"
        if not left:
            return ""
        gone = [self._axis.ranks[other // _LINE] for other in self._others if self._flags[other + 1]]
        return f"ranks {gone} have left it, after an error or at their end"

    def _leave(self, reason: str) -> None:
        if not self._failed:
            self._failed = reason
            self._flags[self._own + 1] = 1

    def __str__(self) -> str:
        return f"shared memory of ranks {list(self._axis.ranks)} ({self._axis.name} axis)"


def _timeout(group: Any) -> float:
    """Return the current timeout of the group in seconds (FailureLog.deadline sets it)."""
    backend = backend_of(group, torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend.options._timeout.total_seconds()


def _add_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of the parts, added in order, into ``out``; half precision is summed in fp32 and rounded once."""
    if out.dtype in _HALF and len(parts) > 2:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        torch.add(out, part, out=out)


_ORDERED = ("x86_64", "AMD64")  # processors on which flags become visible after the data without barriers


class _Offer(NamedTuple):
    """The message of a rank to the other ranks.

    Attributes:
        process: Process of the rank.
        cores: Numbers of the cores on which the rank may run.
        descriptor: File descriptor of the group's memory on the first rank of the group; -1 on other ranks.
        problem: Reason why the rank cannot share memory; empty if it can.
    """

    process: Process
    cores: frozenset[int]
    descriptor: int
    problem: str


def choose_transport(axis: Axis, groups: Sequence[Sequence[int]], choice: str, control: Any) -> HostTransport | None:
    """Connect the ranks of each group through shared memory if it is chosen and possible; return None for gloo.

    A collective of the world, unless ``choice`` is gloo or the axis has one rank.

    Args:
        axis: Axis of this rank.
        groups: Global ranks of all groups of the axis in the world.
        choice: ``auto``, ``gloo`` or ``shm``.
        control: gloo group of the world.

    Raises:
        ConfigError: ``shm`` is chosen but a rank does not support it; on every rank.
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
            f"model_parallelism.cpu_transport=shm is not supported here: {problem}\n"
            "  Use gloo, which works everywhere, or auto, which takes shm where it works and each rank has a core."
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
    elif os.environ.get(TRACE):  # maybe set on this rank only
        problem = f"{TRACE} is set, and a trace sees what torch carries"
    elif "gloo" not in str(dist.get_backend_config(axis.group)):
        problem = f"the group of its {axis.name} axis is {dist.get_backend(axis.group)}, not gloo"
    elif axis.rank == 0:
        size = segment_bytes(axis.size)
        try:
            descriptor = os.memfd_create("autopar", os.MFD_CLOEXEC)
            os.posix_fallocate(descriptor, 0, size)  # fail here instead of at the first write to a page
        except OSError as error:
            problem = f"there are no {size} bytes to share ({error})"
    return _Offer(Process.current(), cores, descriptor, problem)


def _obstacle(offers: list[_Offer], groups: Sequence[Sequence[int]], choice: str) -> str:
    """Return the reason why the groups cannot use shared memory; empty if they can."""
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
    """Return a description of a machine with more ranks than cores; empty if each rank has a core."""
    by_place: dict[str, list[_Offer]] = {}
    for offer in offers:
        by_place.setdefault(offer.process.place, []).append(offer)
    for here_too in by_place.values():
        cores = len(frozenset[int]().union(*(offer.cores for offer in here_too)))
        if len(here_too) > cores:
            return f"{len(here_too)} ranks run on the {cores} cores of {_host(here_too[0])}"
    return ""


def _host(offer: _Offer) -> str:
    """Return the host name with boot time and container, which distinguish machines of the same name."""
    name, *rest = offer.process.place.split()
    return f"{name} ({' '.join(rest)})" if rest else name


def _first(problems: list[str]) -> str:
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), "")


def _connect(axis: Axis, offers: list[_Offer], *, own_cores: bool) -> tuple[HostTransport | None, str]:
    """Map the memory of the group's first rank; return the transport, or None and the problem."""
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

"""The identity of this process, its accelerator, and the start of its process group from torchrun's environment.

[Note: restarts and the store] With torch 2.13 all attempts of a job (``torchrun --max-restarts``, ``--nnodes 1:2``)
use one store, which keeps the addresses of earlier attempts. A rank that starts early would read these and wait for
processes that have ended. So the ranks of an attempt agree on a name, under which the process group stores its keys.
The number of the attempt differs between nodes and cannot serve as the name.

[Note: the end of a process] torch 2.13 attaches a Python object to each collective of a backward pass. A gloo thread
releases it, which needs the interpreter. If the interpreter ends first, the process aborts in a destructor. Without
this package that happens in more than half of the scripts whose last line is a backward pass. ``destroy_process_group``
does not end these threads while a model still refers to its groups.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from autopar.compat.c10d import HashStore, PrefixStore
from autopar.errors import ConfigError

TIMEOUT = timedelta(minutes=10)
_PAUSE = 0.05  # seconds between two looks at the store
_LAST_PAUSE = 0.2  # seconds at the end of a process, for threads of gloo on a busy machine
_OF_THE_HOST = ("gloo", "mpi", "ucc", "fake", "undefined", None)  # backends of CPU tensors


@functools.cache
def end_after_gloo() -> None:
    """Release the interpreter for gloo threads before the process ends ([Note: the end of a process])."""
    atexit.register(time.sleep, _LAST_PAUSE)


class Process(NamedTuple):
    """The identity of a process, with which another process can check whether it is still alive.

    Attributes:
        place: The machine, its boot id, and the namespace of ``pid``.
        started: The start time in the kernel's ticks; ``""`` if ``/proc`` cannot be read.
    """

    place: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Process:
        """Return the identity of this process."""
        return cls(_place(), os.getpid(), _status(os.getpid())[1])

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None if it belongs to another machine."""
        if self.place != _place():
            return None
        state, started = _status(self.pid)
        return None if state == "?" else state not in "ZX" and started == self.started


def _place() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _status(pid: int) -> tuple[str, str]:
    """Return state and start time of a process from /proc/pid/stat: state X if it has ended, ? if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    except OSError:
        return "?", ""
    return fields[0], fields[19]


class Accelerator:
    """A type of device with a collective backend.

    Attributes:
        type: The device type, such as ``cuda`` or ``xpu``.
        backend: The backend of its collectives, such as ``nccl`` or ``xccl``.
        module: The module of torch for it, such as ``torch.cuda``.
    """

    def __init__(self, type: str, backend: str) -> None:
        self.type, self.backend = type, backend
        self.module: Any = torch.get_device_module(type)

    @property
    def device(self) -> torch.device:
        """The current device of this process."""
        return torch.device(self.type, self.module.current_device())

    @property
    def in_use(self) -> bool:
        """Whether this process has used the accelerator."""
        return bool(self.module.is_initialized())

    def backend_of(self, group: dist.ProcessGroup | None = None) -> str | None:
        """Return the backend of the accelerator's tensors in a group (default: the world); None for a host backend."""
        entries = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
        backend = {type: name for type, _, name in entries}.get(self.type)
        return None if backend in _OF_THE_HOST else backend


def accelerator() -> Accelerator | None:
    """Return the accelerator of the machine, or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    backend = dist.Backend.default_device_backend_map.get(found.type)
    return None if backend is None or backend in _OF_THE_HOST else Accelerator(found.type, backend)


def device_of_numbers(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for collectives of numbers in a group: the CPU if possible, so that no accelerator waits."""
    found = accelerator()
    on_host = found is None or "cpu:" in str(dist.get_backend_config(group))
    return torch.device("cpu") if found is None or on_host else found.device


def start_process_group() -> None:
    """Start torch.distributed from torchrun's environment, or with one process, unless it runs already.

    CPU tensors use gloo, and accelerator tensors their backend. The current device becomes ``LOCAL_RANK``. Raises
    ConfigError if this machine has more processes than GPUs.
    """
    if dist.is_initialized():
        return
    found = accelerator()
    if found is not None:
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), found.module.device_count()
        if here > gpus:
            raise ConfigError(
                f"{here} processes were started on a machine with {gpus} GPUs; {found.backend} needs one GPU each.\n"
                f"  Start {gpus} (torchrun --nproc-per-node {gpus}), or hide the GPUs (CUDA_VISIBLE_DEVICES='') to run "
                "on the CPU with gloo."
            )
        found.module.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "gloo" if found is None else f"cpu:gloo,{found.type}:{found.backend}"
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, world = next(iter(rendezvous("env://", timeout=TIMEOUT)))
        attempt = PrefixStore(name_of_attempt(store, rank, world), store)
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=world, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)


def name_of_attempt(store: Any, rank: int, world: int) -> str:
    """Agree with the other running ranks on a name that no earlier attempt has used. Every rank calls it.

    Each rank stores a new random word. Rank 0 answers every word that it finds, including words of earlier attempts,
    until all ranks have acknowledged the name.

    Args:
        store: torch's store, with the keys of earlier attempts.

    Raises:
        torch.distributed.DistStoreError: A rank did not start within the store's timeout.
    """
    place = "autopar/attempt"
    if rank > 0:
        word = secrets.token_hex(8)
        store.set(f"{place}/{world}/{rank}", word)
        name: str = store.get(f"{place}/answer/{word}").decode()
        store.add(f"{place}/thanks/{name}", 1)
        return name
    name = secrets.token_hex(8)
    keys = [f"{place}/{world}/{other}" for other in range(1, world)]
    answered: set[str] = set()
    until = time.monotonic() + store.timeout.total_seconds()
    while keys and store.add(f"{place}/thanks/{name}", 0) < len(keys):
        words = {word.decode() for word in store.multi_get(keys)}
        for word in words - answered:
            store.set(f"{place}/answer/{word}", name)
        answered |= words
        if time.monotonic() > until:
            raise dist.DistStoreError(f"{len(keys) + 1} ranks should start, and not all did within {store.timeout}")
        time.sleep(_PAUSE if answered else 0)
    return name


def cores_of_a_rank(ranks: int) -> int:
    """Return the number of cores per rank of this machine, at least 1; ``ranks``: their number without torchrun."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    return max(1, len(os.sched_getaffinity(0)) // max(1, here))

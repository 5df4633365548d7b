"""This process: its identity, its accelerator, and how it joins the world from torchrun's environment.

[Note: restarts and the store] With torch 2.13 the ranks of every attempt (``torchrun --max-restarts``, ``--nnodes
1:2``) use one store, with the addresses of earlier attempts. A rank that starts early would read those and wait for
processes that are gone. So the ranks of an attempt agree on a name for it, under which the process group keeps its
keys. The number of the attempt differs between nodes.

[Note: the end of a process] torch 2.13 attaches a Python object to each collective of a backward pass. A thread of gloo
drops it, for which it needs the interpreter. If that ends first, the process aborts in a destructor: more than half of
the scripts do whose last line is a backward pass, also without this package. ``destroy_process_group`` does not end
these threads while a model still refers to its groups.
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
_OF_THE_HOST = ("gloo", "mpi", "ucc", "fake", "undefined", None)  # backends whose tensors are the CPU's


@functools.cache
def end_after_gloo() -> None:
    """Let threads of gloo have the interpreter once more before it ends (see the note above)."""
    atexit.register(time.sleep, _LAST_PAUSE)


class Process(NamedTuple):
    """Identity of a process, from which another process can tell whether it is still alive.

    Attributes:
        place: The machine, since it was started, and the namespace in which ``pid`` counts.
        started: Start time in the kernel's ticks; "" where ``/proc`` cannot be read.
    """

    place: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Process:
        """Return the identity of this process."""
        return cls(_place(), os.getpid(), _status(os.getpid())[1])

    def is_alive(self) -> bool | None:
        """Check whether the process runs; None if it runs on another machine."""
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
    """State and start time of a process (proc(5), /proc/pid/stat); X if there is none, ? if that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    except OSError:
        return "?", ""
    return fields[0], fields[19]


class Accelerator:
    """A kind of device, by torch's names, that has a collective backend.

    Attributes:
        type: ``cuda``, ``xpu`` and the like.
        backend: Backend of its collectives: ``nccl``, ``xccl``.
        module: ``torch.cuda`` or its like: devices, generators, streams.
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
        """Whether this process has used it so far."""
        return bool(self.module.is_initialized())

    def backend_of(self, group: dist.ProcessGroup | None = None) -> str | None:
        """Return what carries the accelerator's tensors in a group (by default the world); None if the host does."""
        entries = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
        backend = {type: name for type, _, name in entries}.get(self.type)
        return None if backend in _OF_THE_HOST else backend


def accelerator() -> Accelerator | None:
    """Return the accelerator, None on a machine that has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    backend = dist.Backend.default_device_backend_map.get(found.type)
    return None if backend is None or backend in _OF_THE_HOST else Accelerator(found.type, backend)


def device_of_numbers(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where numbers of the host travel in a group: on the CPU if possible, so that no device waits."""
    found = accelerator()
    on_host = found is None or "cpu:" in str(dist.get_backend_config(group))
    return torch.device("cpu") if found is None or on_host else found.device


def start_process_group() -> None:
    """Start torch.distributed from torchrun's environment, or alone without it; nothing if it runs already.

    gloo serves CPU tensors always, the accelerator's backend its own. The current device becomes ``LOCAL_RANK``. Raises
    ConfigError if there are more processes on this machine than GPUs.
    """
    if dist.is_initialized():
        return
    found = accelerator()
    if found is not None:
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), found.module.device_count()
        if here > gpus:
            raise ConfigError(
                f"{here} processes were started on a machine with {gpus} GPUs: {found.backend} needs one for "
                f"each.\n  Start {gpus} (torchrun --nproc-per-node {gpus}), or hide the GPUs (CUDA_VISIBLE_DEVICES='') "
                "to compute on the CPU with gloo."
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
    """Agree with the other live ranks on a name that no earlier attempt has used. Every rank calls it.

    Each rank leaves a new word. Rank 0 answers every word that it finds, old ones too, until all ranks have thanked.

    Args:
        store: Store of torch, with the keys of earlier attempts.

    Raises:
        torch.distributed.DistStoreError: a rank did not come within the store's timeout.
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
    """Count the cores of this machine for each of its ranks (all ``ranks`` unless torchrun counts them), at least 1."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    return max(1, len(os.sched_getaffinity(0)) // max(1, here))

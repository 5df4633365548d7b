"""Start torch.distributed from torchrun's environment, also after torchrun has started all ranks again.

[Note: restarts and the store] With torch 2.13 the ranks of every attempt (``torchrun --max-restarts``, ``--nnodes
1:2``) use one store, in which those of the last one have left their addresses. A rank that starts earlier than the
others reads theirs and waits for processes that are gone. So the ranks of an attempt agree on a name for it, under
which the process group keeps its keys. Nobody knows that name before, not even the number of the attempt, which differs
between nodes.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from autopar.distributed.accelerator import accelerator
from autopar.errors import ConfigError
from autopar.foreign.groups import HashStore, PrefixStore

__all__ = ["TIMEOUT", "name_of_attempt", "start_process_group"]

TIMEOUT = timedelta(minutes=10)
_PAUSE = 0.05  # seconds between two looks at the store


def start_process_group() -> None:
    """Start torch.distributed from torchrun's environment, or alone without it; nothing if it runs already.

    gloo serves CPU tensors always, nccl CUDA tensors where there are GPUs, and another accelerator has its own backend.
    The current device becomes ``LOCAL_RANK``. Raises ConfigError if there are more processes on this machine than GPUs.
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
    """Agree with the other ranks that are alive on a name that no earlier attempt has used. Every rank calls it.

    Each rank leaves a word that nobody used before. Rank 0 answers to every word that it finds, the old ones included,
    until all ranks have thanked for the answer to theirs.

    Args:
        store: of torch, with whatever earlier attempts have left in it.

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

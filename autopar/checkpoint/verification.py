"""Who verifies what: every stored byte is verified once by some rank, if possible by one that needs it anyway. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autopar.checkpoint.shards import Held
from autopar.distributed.mesh import MeshSizes

__all__ = ["share_of_verification"]


def share_of_verification(held: Sequence[Held], saved: MeshSizes, now: MeshSizes, rank: int) -> list[Held]:
    """What ``rank`` of a world of mesh ``now`` verifies of a checkpoint that was saved on mesh ``saved``.

    On the same tensor-parallel size a shard goes to a rank that is going to read it; the replicas share the work. All
    ranks together verify everything exactly once, about the same number of bytes each.
    """
    world = now.tp * now.pp * now.dp
    load = [0] * world
    mine = []
    free = []
    for item in sorted(held, key=lambda one: (-one.bytes, one.file, one.name)):
        if saved.tp != now.tp or item.tp >= now.tp:
            free.append(item)
            continue
        taker = min(range(item.tp, world, now.tp), key=lambda candidate: load[candidate])  # tp varies fastest
        load[taker] += item.bytes
        if taker == rank:
            mine.append(item)
    heap = [(bytes, taker) for taker, bytes in enumerate(load)]
    heapq.heapify(heap)
    for item in free:
        bytes, taker = heap[0]
        heapq.heapreplace(heap, (bytes + item.bytes, taker))
        if taker == rank:
            mine.append(item)
    return mine

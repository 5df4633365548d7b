"""Wait for ranks that may never come, within a time-out.

Ranks find each other through the key-value store of the default process group, in which no rank can get stuck. A call
on some of the ranks only raises within the time-out and leaves nothing behind, so a later call works again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autopar.call_site import line_of_user, warn_user
from autopar.distributed.axis import Axis
from autopar.distributed.mesh import MPU
from autopar.distributed.trace import as_one
from autopar.errors import CheckpointError, ConsistencyError
from autopar.foreign.groups import PrefixStore, default_store

_PREFIX = "autopar/barrier"
_WARN_AFTER = 5.0  # seconds in which nobody wonders


def barrier(mpu: MPU, caller: str, timeout: float) -> None:
    """Wait until every rank of the world has called this.

    Raises:
        CheckpointError: after ``timeout`` seconds, the same on all ranks that did call; a later call works again.
    """
    if not dist.is_initialized():
        raise CheckpointError(f"{caller} needs the process group, which has been destroyed")
    with as_one("barrier", mpu.control) as rehearsed:
        if rehearsed:
            return
        try:
            store = PrefixStore(_PREFIX, default_store())
            arrived = _arrive(store, mpu.rank, mpu.world_size, timeout)
        except RuntimeError as error:
            raise CheckpointError(f"{caller} cannot reach the store of torch.distributed: {error}") from error
    if arrived is not None:
        missing = [rank for rank in range(mpu.world_size) if rank not in arrived]
        raise CheckpointError(
            f"{caller} was called on {names_of(arrived)} but not on {names_of(missing)} of {mpu.world_size} "
            f"within {timeout:g} s\n"
            "  Every rank must call it, also those of other data-parallel replicas; nothing was read or written.\n"
            "  If ranks may arrive later than that, pass a larger timeout=."
        )


def meet(axis: Axis, what: str, timeout: float, advice: str) -> None:
    """Wait until all ranks of an axis are about to read the same, before a collective that some might not come to.

    A rank that waits longer than some seconds warns.

    Args:
        what: the same text on every rank, or they do not mean the same.
        advice: what to do about ranks that do not come; lines of the message.

    Raises:
        ConsistencyError: on all ranks that came.
    """
    if axis.group is None:  # one rank
        return
    mine = axis.ranks[axis.rank]
    store = PrefixStore(f"{_PREFIX}/{axis.name} {axis.ranks}", default_store())
    said: dict[int, str] = {}

    def alone(arrived: list[int], end: str) -> str:
        missing = [rank for place, rank in enumerate(axis.ranks) if place not in arrived]
        where = line_of_user()
        return f"rank {mine} reads {what} in {where}, and {names_of(missing)} did not within {end}.\n  {advice}"

    def warn(arrived: list[int]) -> None:
        warn_user(alone(arrived, f"{_WARN_AFTER:g} s: after {timeout:g} s it raises"))

    with as_one("barrier", axis.group) as rehearsed:
        arrived = None if rehearsed else _arrive(store, axis.rank, axis.size, timeout, what, said, warn)
    if arrived is not None:
        raise ConsistencyError(alone(arrived, f"{timeout:g} s"))
    if len(set(said.values())) > 1:
        each = "; ".join(f"rank {axis.ranks[place]} reads {text}" for place, text in sorted(said.items()))
        raise ConsistencyError(f"the ranks do not read the same: {each}.\n  {advice}")


def _arrive(
    store: Any,
    rank: int,
    size: int,
    timeout: float,
    what: str = "here",
    said: dict[int, str] | None = None,
    warn: Callable[[list[int]], None] | None = None,
) -> list[int] | None:
    """None once everybody is here, else the ranks that were. ``said`` takes up what each brought.

    Args:
        warn: called once, with the ranks that are here, when that has taken long.

    Meetings are numbered. Each ends with one atomic decision, ``go`` by the last rank to arrive or the list of those
    present by the first one to lose patience; all follow it, so nobody leaves while somebody else goes ahead.
    """
    start = time.monotonic()
    while True:
        number = store.add("number", 0)
        decision = f"{number}/decision"
        store.set(f"{number}/{rank}", what)
        if store.add(f"{number}/count", 1) == size:
            store.compare_set(decision, "", "go")
        pause = 0.001
        while not store.check([decision]):
            waited = time.monotonic() - start
            if waited > timeout:
                store.compare_set(decision, "", json.dumps(_present(store, number, size)))
                break
            if warn is not None and waited > _WARN_AFTER:
                warn(_present(store, number, size))
                warn = None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        verdict = store.get(decision).decode()
        store.compare_set("number", str(number), str(number + 1))  # whoever sees the next number has left this one
        if verdict == "go":
            if said is not None:
                said.update({other: store.get(f"{number}/{other}").decode() for other in range(size)})
            if rank == 0:
                _forget(store, number - 1, size)  # all came here from there: nobody reads it any more
            return None
        arrived: list[int] = json.loads(verdict)
        if rank in arrived:
            return arrived
        # came after the others had given up: they may be calling again


def _present(store: Any, number: int, size: int) -> list[int]:
    return [other for other in range(size) if store.check([f"{number}/{other}"])]


def _forget(store: Any, number: int, size: int) -> None:
    for key in ("count", "decision", *map(str, range(size))):
        try:
            store.delete_key(f"{number}/{key}")
        except (RuntimeError, NotImplementedError):
            return


def names_of(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2"; of very many the first sixteen."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

"""Ranks that act together: they meet, they share verdicts, and they notice at once when one of them dies.

Every rank of the world takes part. Meeting goes through the store of the default process group, which nobody can get
stuck in: a call on some of the ranks only ends in an error within the time-out and leaves nothing behind. Verdicts
go in a star around rank 0, over gloo: the death of a rank closes its connection to rank 0 (or rank 0's to everyone),
so the others learn it immediately and by name. In a ring, the two neighbours would know and the rest would wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError

__all__ = ["Peers", "first", "meet", "together"]

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)  # for a peer that is alive and writes a large file
_TAG = 7001
_PREFIX = "autopar/checkpoint"


class Peers(Protocol):
    """The ranks of the world and the groups over which verdicts travel: an MPU is one."""

    rank: int
    world_size: int
    control: Any


def meet(mpu: MPU, caller: str, timeout: float) -> None:
    """Wait until every rank of the world has called this.

    Raises:
        CheckpointError: after ``timeout`` seconds, the same on all ranks that did call; a later call works again.
    """
    if not dist.is_initialized():
        raise CheckpointError(f"{caller} needs the process group, which has been destroyed")
    try:
        arrived = _meet(mpu.rank, mpu.world_size, timeout)
    except RuntimeError as error:
        raise CheckpointError(f"{caller} cannot reach the store of torch.distributed: {error}") from error
    if arrived is not None:
        absent = [rank for rank in range(mpu.world_size) if rank not in arrived]
        raise CheckpointError(
            f"{caller} was called on {_ranks(arrived)} but not on {_ranks(absent)} of {mpu.world_size} "
            f"within {timeout:g} s\n"
            "  Every rank must call it, also those of other data-parallel replicas; nothing was read or written.\n"
            "  If ranks may arrive later than that, pass a larger timeout=."
        )


def _meet(rank: int, world_size: int, timeout: float) -> list[int] | None:
    """None once everybody is here, else the ranks that were.

    Meetings are numbered. Each ends with one atomic decision, ``go`` by the last rank to arrive or the list of those
    present by the first one to lose patience; all follow it, so nobody leaves while somebody else goes ahead.
    """
    store = PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
    deadline = time.monotonic() + timeout
    while True:
        number = store.add("number", 0)
        decision = f"{number}/decision"
        store.set(f"{number}/{rank}", "here")
        if store.add(f"{number}/count", 1) == world_size:
            store.compare_set(decision, "", "go")
        pause = 0.001
        while not store.check([decision]):
            if time.monotonic() > deadline:
                present = [other for other in range(world_size) if store.check([f"{number}/{other}"])]
                store.compare_set(decision, "", json.dumps(present))
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        verdict = store.get(decision).decode()
        store.compare_set("number", str(number), str(number + 1))  # whoever sees the next number has left this one
        if verdict == "go":
            if rank == 0:
                _forget(store, number - 1, world_size)  # all came here from there: nobody reads it any more
            return None
        arrived: list[int] = json.loads(verdict)
        if rank in arrived:
            return arrived
        # came after the others had given up: they may be calling again


def _forget(store: Any, number: int, world_size: int) -> None:
    for key in ("count", "decision", *map(str, range(world_size))):
        try:
            store.delete_key(f"{number}/{key}")
        except (RuntimeError, NotImplementedError):
            return


def together(
    peers: Peers,
    work: Callable[[], Any],
    note: Callable[[], str] = str,
    check: Callable[[list[Any]], None] | None = None,
) -> list[Any]:
    """Every rank does ``work``, whose result must be JSON; then all go on or all raise the same error.

    Args:
        work: done on each rank.
        note: added to the message if a rank has died.
        check: on rank 0, raises CheckpointError if the results of the ranks do not fit together.

    Returns:
        The results of all ranks on rank 0, an empty list elsewhere.

    Raises:
        CheckpointError: with the message of the lowest rank that failed, or the ranks that died.
    """
    return _round(peers, work, note, check)[1]


def first(peers: Peers, work: Callable[[], T], note: Callable[[], str] = str) -> T:
    """Rank 0 does ``work``; every rank returns its result, which must be JSON, or raises the same error."""
    result: T = _round(peers, work if peers.rank == 0 else lambda: None, note, None, share=True)[0]
    return result


def _round(
    peers: Peers,
    work: Callable[[], Any],
    note: Callable[[], str],
    check: Callable[[list[Any]], None] | None,
    share: bool = False,
) -> tuple[Any, list[Any]]:
    value, cause = None, None
    try:
        value = work()
    except BaseException as error:  # a keyboard interrupt on one rank must not leave the others waiting
        cause = error
    report = {"error": None if cause is None else _describe(cause), "value": None if cause else value}
    if peers.rank == 0:
        reports, lost = _collect(peers, report)
        failed = [rank for rank, other in enumerate(reports) if other and other["error"]]
        values = [other["value"] if other else None for other in reports]
        text = None
        if lost:
            text = _lost(lost, peers.world_size, note())
        elif failed:
            text = _failed(reports, failed)
        elif check is not None:
            try:
                check(values)
            except CheckpointError as error:
                text = str(error)
        answer = {"error": text, "value": value if share and text is None else None}
        for rank in range(1, peers.world_size):
            if rank not in lost:
                _try(partial(_send, peers, rank, answer))
    else:
        values = []
        if _try(partial(_send, peers, 0, report)) and (reply := _try(partial(_receive, peers, 0))):
            answer = reply
        else:
            answer = {"error": _lost([0], peers.world_size, note()), "value": None}
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    if answer["error"] is not None:
        raise CheckpointError(answer["error"]) from cause
    return answer["value"], values


def _collect(peers: Peers, own: dict[str, Any]) -> tuple[list[dict[str, Any] | None], list[int]]:
    reports: list[dict[str, Any] | None] = [own]
    for rank in range(1, peers.world_size):
        reports.append(_try(partial(_receive, peers, rank)))
    return reports, [rank for rank, report in enumerate(reports) if report is None]


def _try(action: Callable[[], T]) -> T | None:
    """What ``action`` returns; None if the connection to the peer is closed."""
    try:
        return action()
    except RuntimeError:
        return None


def _send(peers: Peers, rank: int, value: Any) -> bool:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    for tensor in (torch.tensor([data.numel()], device="cpu"), data):
        _wait(peers.control.send([tensor], rank, _TAG))  # not dist.isend: see background.py
    return True


def _receive(peers: Peers, rank: int) -> Any:
    size = torch.zeros(1, dtype=torch.long, device="cpu")
    _wait(peers.control.recv([size], rank, _TAG))
    data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    _wait(peers.control.recv([data], rank, _TAG))
    return json.loads(data.numpy().tobytes())


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait(_PATIENCE)


def _describe(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _failed(reports: list[dict[str, Any] | None], failed: list[int]) -> str:
    lowest = reports[failed[0]]
    assert lowest is not None
    text = str(lowest["error"])
    if len(reports) > 1:
        text += f"\n  Reported by {_ranks(failed)} of {len(reports)}."
    return text


def _lost(ranks: list[int], world_size: int, note: str) -> str:
    return f"{_ranks(ranks)} of {world_size} died (the connection is closed)" + (f"\n  {note}" if note else "")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

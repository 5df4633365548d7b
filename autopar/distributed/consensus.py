"""One verdict on every rank: all succeed alike, or all raise.

:func:`same_on_every_rank` is for ``initialize``, before there is a mesh: over the default group, whatever its backend.
:func:`all_ranks` and :func:`rank_zero` are for saving and loading, which take long and touch disks: verdicts go in a
star around rank 0, over gloo, because the death of a rank closes its connection to rank 0 (or rank 0's to everyone),
so the others learn it at once and by name. In a ring, the two neighbours would know and the rest would wait. torch's
``_DistWrapper`` (``torch/distributed/checkpoint/utils.py``) has the same idea without the deaths.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.barrier import name_ranks
from autopar.distributed.digest import extremes
from autopar.distributed.start import start_process_group
from autopar.distributed.uncaught import shorten_uncaught
from autopar.errors import AutoparError, CheckpointError, ConsistencyError
from autopar.foreign.groups import default_group

__all__ = ["Ranks", "all_ranks", "differences", "rank_zero", "same_on_every_rank"]

T = TypeVar("T")

_SHOWN = 4  # differences that an error lists
_LONGEST = 100  # characters of a value
_PATIENCE = timedelta(hours=2)  # for a rank that is alive and writes a large file
_TAG = 7001


class Ranks(Protocol):
    """The ranks of the world and the groups over which verdicts travel: an MPU is one."""

    rank: int
    world_size: int
    control: Any


def same_on_every_rank(step: Callable[[], T], facts: Callable[[T], Any]) -> T:
    """Run ``step`` on every rank of the world; if it fails on one, or its facts differ between ranks, all raise.

    Args:
        facts: what must be the same on all ranks, as JSON; names in it are quoted where it differs.

    Raises:
        ConsistencyError, or CheckpointError after one: on the ranks where nothing failed, quoting the error of the one
            that did; or naming what differs, with both values. A rank that fails raises its own error.
    """
    shorten_uncaught()
    result: T | None = None
    error: Exception | None = None
    made: Any = None
    verdict: tuple[str, str]
    try:
        result = step()
        made = facts(result)
        text = json.dumps(made, default=str, sort_keys=True)  # some models register buffers in the order of a set
        verdict = ("fine", hashlib.blake2b(text.encode(), digest_size=12).hexdigest())
    except Exception as caught:  # whatever it is, the peers must not wait for this rank
        kind = "checkpoint" if isinstance(caught, CheckpointError) else "error"
        error, verdict = caught, (kind, f"{type(caught).__name__}: {caught}")
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start_process_group()
        if not _all_fine(verdict):
            verdicts: list[tuple[str, str]] = [verdict] * dist.get_world_size()
            dist.all_gather_object(verdicts, verdict)
            if error is None:
                error = _error_of_others(verdicts) or _error_of_differences(verdicts, made)
                told = verdicts[0][0] == "fine"
            else:
                told = verdicts[0] == verdict
            if isinstance(error, AutoparError):
                error.told_by_rank_0 = told and dist.get_rank() > 0
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _all_fine(verdict: tuple[str, str]) -> bool:
    """Return whether no rank has failed and all have the same facts: three numbers, however many ranks there are."""
    kind, text = verdict
    digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
    numbers = [kind != "fine", int.from_bytes(digest[:6], "little"), int.from_bytes(digest[6:], "little")]
    world = Axis.of(default_group(), "world")
    largest, smallest = extremes(numbers, world.group)
    return largest == smallest and not largest[0]


def _error_of_others(verdicts: list[tuple[str, str]]) -> AutoparError | None:
    for rank, (kind, text) in enumerate(verdicts):
        if kind == "checkpoint":
            return CheckpointError(f"rank {rank} cannot load the model, so no rank does:\n{text}")
        if kind == "error":
            return ConsistencyError(f"rank {rank} cannot initialize its model, so no rank does:\n{text}")
    return None


def _error_of_differences(verdicts: list[tuple[str, str]], facts: Any) -> AutoparError | None:
    different = [rank for rank, verdict in enumerate(verdicts) if verdict != verdicts[0]]
    if not different:
        return None
    mine = json.loads(json.dumps(facts, default=str))
    everyone = [mine] * len(verdicts)
    dist.all_gather_object(everyone, mine if dist.get_rank() in (0, different[0]) else None)
    found = list(islice(differences(everyone[0], everyone[different[0]]), _SHOWN + 1))
    lines = [f"  {name}: rank 0: {one}, rank {different[0]}: {other}" for name, one, other in found[:_SHOWN]]
    return ConsistencyError(
        f"ranks {different} call autopar.initialize differently than rank 0:\n"
        + "\n".join(lines)
        + ("\n  and more" if len(found) > _SHOWN else "")
        + "\n  Every rank gives it the same model (names, shapes, dtypes, devices, requires_grad), config and policy."
    )


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Find where two values of plain data differ: the name of the place, and both values as text."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            place = f"{name}.{key}" if name else str(key)
            if key not in one or key not in other:
                yield place, _entry(one, key), _entry(other, key)
            else:
                yield from differences(one[key], other[key], place)
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) == len(other):
            for number, (left, right) in enumerate(zip(one, other, strict=True)):
                yield from differences(left, right, f"{name}[{number}]")
        else:
            yield name, f"{len(one)} entries", f"{len(other)} entries"
    elif one != other:
        yield name, _show(one), _show(other)


def _entry(values: Mapping[str, Any], key: str) -> str:
    return _show(values[key]) if key in values else "missing"


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


# -- over gloo, noticing deaths ---------------------------------------------------------------------------------------


def all_ranks(
    peers: Ranks,
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


def rank_zero(peers: Ranks, work: Callable[[], T], note: Callable[[], str] = str) -> T:
    """Rank 0 does ``work``; every rank returns its result, which must be JSON, or raises the same error."""
    result: T = _round(peers, work if peers.rank == 0 else lambda: None, note, None, share=True)[0]
    return result


def _round(
    peers: Ranks,
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
            answer = {"error": _lost([0], peers.world_size, note()), "value": None, "lost": True}
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    if answer["error"] is not None:
        failure = CheckpointError(answer["error"])
        failure.told_by_rank_0 = peers.rank > 0 and "lost" not in answer
        raise failure from cause
    return answer["value"], values


def _collect(peers: Ranks, own: dict[str, Any]) -> tuple[list[dict[str, Any] | None], list[int]]:
    reports: list[dict[str, Any] | None] = [own]
    for rank in range(1, peers.world_size):
        reports.append(_try(partial(_receive, peers, rank)))
    return reports, [rank for rank, report in enumerate(reports) if report is None]


def _try(action: Callable[[], T]) -> T | None:
    """Return the result of ``action``; None if the connection to the peer is closed."""
    try:
        return action()
    except RuntimeError:
        return None


def _send(peers: Ranks, rank: int, value: Any) -> bool:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    for tensor in (torch.tensor([data.numel()], device="cpu"), data):
        _wait(peers.control.send([tensor], rank, _TAG))  # not dist.isend: see background.py
    return True


def _receive(peers: Ranks, rank: int) -> Any:
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
        text += f"\n  Reported by {name_ranks(failed)} of {len(reports)}."
    return text


def _lost(ranks: list[int], world_size: int, note: str) -> str:
    return f"{name_ranks(ranks)} of {world_size} died (the connection is closed)" + (f"\n  {note}" if note else "")

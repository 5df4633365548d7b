"""Let all ranks succeed or raise together.

[Note: agreement between ranks] A rank that fails or never calls must not leave the other ranks waiting. So ranks agree
before a long step: all continue, or all raise the same error. There are three ways. :func:`meet` and :func:`barrier`
wait through the key-value store of the default process group, where no rank can hang: a call on only some ranks raises
after the timeout, and a later call works again. :func:`same_on_every_rank` compares digests over the default group,
before there is a mesh. :func:`all_ranks`, :func:`deal` and :func:`rank_zero`, for saving and loading, send results in a
star around rank 0 over gloo. A failed process closes its connection to rank 0, which reports it to all ranks at once;
in a ring only its neighbors would notice. torch's ``_DistWrapper`` is similar, without the handling of failed
processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from autopar.call_site import place_of_user, warn_user
from autopar.compat.c10d import PrefixStore, default_group, default_store
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gathered
from autopar.distributed.digest import extremes, of_text
from autopar.distributed.failures import shorten_uncaught
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.distributed.process import start_process_group
from autopar.errors import AutoparError, CheckpointError, ConfigError, ConsistencyError, clip
from autopar.tensor_tracking import as_one

_PREFIX = "autopar/barrier"
_WARN_AFTER = 5.0  # seconds


def barrier(mpu: MPU, caller: str, timeout: float) -> None:
    """Wait until every rank of the world has called this ([Note: agreement between ranks]).

    Raises:
        CheckpointError: A rank did not call within ``timeout`` seconds; raised on all ranks that did.
    """
    if not dist.is_initialized():
        raise CheckpointError(f"{caller} needs the process group, but it was destroyed")
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
            "  Call it on every rank, including all data-parallel replicas; nothing was read or written.\n"
            "  If ranks may arrive later, pass a larger timeout=."
        )


def meet(axis: Axis, what: str, timeout: float, advice: str) -> None:
    """Wait for all ranks of an axis before a collective that user code may run on only some of them.

    A rank that waits for several seconds warns.

    Args:
        what: The text of what the ranks read; a text that differs between ranks raises.
        timeout: The seconds to wait.
        advice: The last lines of the error and the warning.

    Raises:
        ConsistencyError: A rank did not call in time, or with another text; raised on all ranks that called.
    """
    if axis.group is None:  # one rank
        return
    mine = axis.ranks[axis.rank]
    store = PrefixStore(f"{_PREFIX}/{axis.name} {axis.ranks}", default_store())
    said: dict[int, str] = {}

    def alone(arrived: list[int], end: str) -> str:
        missing = [rank for place, rank in enumerate(axis.ranks) if place not in arrived]
        file, line = place_of_user()
        return f"rank {mine} reads {what} in {file}:{line}, and {names_of(missing)} did not within {end}.\n  {advice}"

    def warn(arrived: list[int]) -> None:
        warn_user(alone(arrived, f"{_WARN_AFTER:g} s: after {timeout:g} s it raises"))

    with as_one("barrier", axis.group) as rehearsed:
        arrived = None if rehearsed else _arrive(store, axis.rank, axis.size, timeout, what, said, warn)
    if arrived is not None:
        raise ConsistencyError(alone(arrived, f"{timeout:g} s"))
    if len(set(said.values())) > 1:
        each = "; ".join(f"rank {axis.ranks[place]} reads {text}" for place, text in sorted(said.items()))
        raise ConsistencyError(f"the ranks read different values: {each}.\n  {advice}")


def _arrive(
    store: Any,
    rank: int,
    size: int,
    timeout: float,
    what: str = "here",
    said: dict[int, str] | None = None,
    warn: Callable[[list[int]], None] | None = None,
) -> list[int] | None:
    """Return None when all ranks have arrived, or after the timeout the ranks that have. ``said`` gets their texts.

    Meetings are numbered. Each ends with one atomic decision: ``go`` by the last rank to arrive, or the list of the
    present ranks by the first rank that times out. All ranks follow it, so none leaves while another continues.

    Args:
        warn: A function that is called once with the present ranks, after :data:`_WARN_AFTER` seconds.
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
        store.compare_set("number", str(number), str(number + 1))  # the next meeting
        if verdict == "go":
            if said is not None:
                said.update({other: store.get(f"{number}/{other}").decode() for other in range(size)})
            for key in ("count", "decision", *map(str, range(size))) if rank == 0 else ():
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    store.delete_key(f"{number - 1}/{key}")  # all ranks have left that meeting
            return None
        arrived: list[int] = json.loads(verdict)
        if rank in arrived:
            return arrived
        # This rank came after the other ranks had timed out; they may be calling again.


def _present(store: Any, number: int, size: int) -> list[int]:
    return [other for other in range(size) if store.check([f"{number}/{other}"])]


def names_of(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 1, 2``; at most the first sixteen."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


T = TypeVar("T")

_SHOWN = 4  # differences that an error lists
_LONGEST = 100  # characters of a value
_PATIENCE = timedelta(hours=2)  # the limit for a running rank that writes a large file
_TAG = 7001


def same_on_every_rank(step: Callable[[], T], facts: Callable[[T], Any]) -> T:
    """Run ``step`` on every rank of the world. If it fails on one rank, or its facts differ between ranks, all raise.

    Args:
        facts: A function that returns JSON from the result of ``step``. It must be identical on all ranks.

    Raises:
        ConsistencyError: Another rank failed (quoted), or the facts differ (with both values). CheckpointError if the
            other rank raised one. A rank that fails raises its error.
    """
    shorten_uncaught()
    result: T | None = None
    error: Exception | None = None
    made, kind = None, "fine"
    try:
        result = step()
        made = facts(result)
        text = json.dumps(made, default=str, sort_keys=True)  # buffers in the order of a set differ between processes
        text = str(of_text(text))
    except Exception as caught:  # of any kind: the other ranks must not wait for this rank
        error, kind = caught, "checkpoint" if isinstance(caught, CheckpointError) else "error"
        text = f"{type(caught).__name__}: {caught}"
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start_process_group()
        largest, smallest = extremes([kind != "fine", of_text(text)], default_group())  # one all-reduce
        if largest != smallest or largest[0]:
            verdicts = gathered((kind, text))
            told = verdicts[0] == (kind, text) if error is not None else verdicts[0][0] == "fine"
            error = error or _error_of_others(verdicts, made)
            if isinstance(error, AutoparError):
                error.told_by_rank_0 = told and dist.get_rank() > 0
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _error_of_others(verdicts: list[tuple[str, str]], facts: Any) -> AutoparError:
    """Return the error for the first rank that failed, otherwise for the first one whose facts differ from rank 0."""
    for rank, (kind, text) in enumerate(verdicts):
        if kind == "checkpoint":
            return CheckpointError(f"rank {rank} cannot load the model, so no rank does:\n{text}")
        if kind == "error":
            return ConsistencyError(f"rank {rank} cannot initialize its model, so no rank does:\n{text}")
    different = [rank for rank, verdict in enumerate(verdicts) if verdict != verdicts[0]]
    mine = json.loads(json.dumps(facts, default=str))
    everyone = gathered(mine if dist.get_rank() in (0, different[0]) else None)
    found = list(islice(differences(everyone[0], everyone[different[0]]), _SHOWN + 1))
    lines = [f"  {name}: rank 0: {one}, rank {different[0]}: {other}" for name, one, other in found[:_SHOWN]]
    return ConsistencyError(
        f"ranks {different} call autopar.initialize with other arguments than rank 0:\n"
        + "\n".join(lines)
        + ("\n  and more" if len(found) > _SHOWN else "")
        + "\n  Pass the same model (names, shapes, dtypes, devices, requires_grad), config and policy on every rank."
    )


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each difference of two values of plain data: the name of the place, and both values as text."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            place = f"{name}.{key}" if name else str(key)
            if key not in one or key not in other:
                found, due = (_show(each[key]) if key in each else "missing" for each in (one, other))
                yield place, found, due
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


def _show(value: Any) -> str:
    return clip(json.dumps(value), _LONGEST)


# -- in a star over gloo, which detects failed processes ---------------------------------------------------------------


class Ranks(Protocol):
    """The ranks of the world and the group for messages between them, such as an MPU."""

    rank: int
    world_size: int
    control: Any


def all_ranks(
    peers: Ranks,
    work: Callable[[], Any],
    note: Callable[[], str] = str,
    check: Callable[[list[Any]], object] | None = None,
) -> list[Any]:
    """Do ``work`` on every rank; then all continue or all raise the same error ([Note: agreement between ranks]).

    Args:
        work: A function whose result is JSON.
        note: A function that returns a line for the error if a rank has failed.
        check: A function that raises CheckpointError on rank 0 if the results of the ranks do not fit together.

    Returns:
        The results of all ranks on rank 0, an empty list on the other ranks.

    Raises:
        CheckpointError: ``work`` raised on a rank (the message of the lowest one), or a process failed.
    """
    return _round(peers, work, note, check)[1]


def deal(peers: Ranks, work: Callable[[], Any], share: Callable[[list[Any]], list[Any]]) -> Any:
    """Do ``work`` on every rank; return this rank's entry of the list that ``share`` makes from all results on rank 0.

    Results and entries must be JSON. If ``share`` raises CheckpointError, all ranks raise it.
    """
    return _round(peers, work, str, share)[0]


def rank_zero(peers: Ranks, work: Callable[[], T], note: Callable[[], str] = str) -> T:
    """Do ``work`` on rank 0; return its result, which must be JSON, on every rank, or raise the same error."""
    return _round(peers, work if peers.rank == 0 else lambda: None, note, None, share=True)[0]


def _round(
    peers: Ranks,
    work: Callable[[], Any],
    note: Callable[[], str],
    check: Callable[[list[Any]], Any] | None,
    share: bool = False,
) -> tuple[Any, list[Any]]:
    value, cause = None, None
    try:
        value = work()
    except BaseException as error:  # a keyboard interrupt on one rank must not leave the other ranks waiting
        cause = error
    report = {"error": None if cause is None else _describe(cause), "value": None if cause else value}
    values: list[Any] = []
    with as_one("agree", peers.control) as rehearsed:
        star = rehearsed or _Star(peers)
        if peers.rank == 0:
            reports = star.reports(report)
            values = [other and other["value"] for other in reports]
            text, dealt = _verdict(reports, note, check)
            same = [value if share and text is None else None] * len(reports)
            answers = [{"error": text, "value": each} for each in dealt or same]
            star.tell(answers)
            answer = answers[0]
        else:
            lost = {"error": _lost([0], peers.world_size, note), "value": None, "lost": True}
            answer = star.ask(report) or lost
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    if answer["error"] is not None:
        failure = CheckpointError(answer["error"])
        failure.told_by_rank_0 = peers.rank > 0 and "lost" not in answer
        raise failure from cause
    return answer["value"], values


def _verdict(
    reports: list[Any], note: Callable[[], str], check: Callable[[list[Any]], Any] | None
) -> tuple[str | None, Any]:
    """Return on rank 0 the error of all ranks, or None, and the result of ``check``. A failed rank's report is None."""
    lost = [rank for rank, report in enumerate(reports) if report is None]
    failed = [rank for rank, report in enumerate(reports) if report and report["error"]]
    if lost:
        return _lost(lost, len(reports), note), None
    if failed:
        many = f"\n  Reported by {names_of(failed)} of {len(reports)}." if len(reports) > 1 else ""
        return f"{reports[failed[0]]['error']}{many}", None
    try:
        return None, None if check is None else check([report["value"] for report in reports])
    except CheckpointError as error:
        return str(error), None


class _Star:
    """One round of messages between rank 0 and the other ranks, over gloo. A failed rank counts as sending None."""

    def __init__(self, peers: Ranks) -> None:
        self._size, self._control = peers.world_size, peers.control
        self._alive: list[int] = []

    def reports(self, own: Any) -> list[Any]:
        """Return the reports of all ranks, on rank 0."""
        found = [own, *map(self._receive, range(1, self._size))]
        self._alive = [rank for rank, report in enumerate(found) if rank and report is not None]
        return found

    def tell(self, answers: list[Any]) -> None:
        """Send each rank that has reported its entry of ``answers``."""
        for rank in self._alive:
            self._send(rank, answers[rank])

    def ask(self, report: Any) -> Any:
        """Send a report to rank 0; return the answer."""
        self._send(0, report)
        return self._receive(0)

    def _send(self, rank: int, value: Any) -> None:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            for tensor in (torch.tensor([data.numel()], device="cpu"), data):
                self._control.send([tensor], rank, _TAG).wait(_PATIENCE)  # not dist.isend: see async_save.py

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.long, device="cpu")
        try:
            self._control.recv([size], rank, _TAG).wait(_PATIENCE)
            data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
            self._control.recv([data], rank, _TAG).wait(_PATIENCE)
        except RuntimeError:
            return None
        return json.loads(data.numpy().tobytes())


def _describe(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _lost(ranks: list[int], world_size: int, note: Callable[[], str]) -> str:
    more = note()
    return f"{names_of(ranks)} of {world_size} failed (the connection is closed)" + (f"\n  {more}" if more else "")


# -- signals ----------------------------------------------------------------------------------------------------------
# torchrun and SLURM send SIGTERM before they kill a job. It reaches ranks at different times, and some not at all. So
# each rank records its signal, and all compare at the same place of the loop, as in Megatron-LM's
# dist_signal_handler.py.


class StopSignal(contextlib.AbstractContextManager["StopSignal"]):
    """Record signals that ask a job to stop, so that all ranks save at the same step and then end::

        with autopar.StopSignal(model.mpu) as stop:
            for step, batch in enumerate(loader):
                ...
                if stop.requested():
                    model.save_parallelized(f"run/step-{step}", optimizer=optimizer)
                    break

    A second signal of the same kind has its usual effect: it ends the process unless other code handles it.

    Args:
        mpu: The mesh, ``model.mpu``.
        signals: The signal numbers, by default ``signal.SIGTERM``. With ``--signal=USR1@120`` SLURM sends another
            signal before the end of a job.

    Raises:
        ConfigError: The thread is not the main thread, the only one in which Python handles signals.
    """

    def __init__(self, mpu: MPU, *signals: int) -> None:
        self._group = mpu.control if mpu.world_size > 1 else None
        self._got = 0
        self._before: dict[int, Any] = {}
        for number in signals or (signal.SIGTERM,):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError as error:
                self.close()
                raise ConfigError(f"StopSignal: {error}\n  Create it in the main thread.") from error

    def requested(self) -> bool:
        """Return whether any rank has received a signal. Every rank calls it once per step; the result is identical."""
        flag = torch.tensor([self._got])
        if self._group is not None:
            all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def close(self) -> None:
        """Restore the previous handlers of the signals."""
        while self._before:
            signal.signal(*self._before.popitem())

    def __exit__(self, *error: object) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._got = number
        signal.signal(number, self._before.pop(number))

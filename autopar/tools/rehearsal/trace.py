"""Record traces: the collectives and messages of a rank, in the order in which the rank issues them.

A dispatch mode sees every collective that passes torch's dispatcher, including collectives of FSDP2 and
``DistributedDataParallel``. With ``AUTOPAR_TRACE=folder`` each rank of a job writes a line to ``folder/rank-N.jsonl``
before each collective runs. After a hang, the last line is the call in which the rank waits.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.call_site import OURS
from autopar.errors import ConfigError
from autopar.registry import TRACE
from autopar.tensor_tracking import TensorTracking, tensors_in
from autopar.tools.compat.operators import Operator, group_of, in_parts, name_of_group, operator_of, reduction_of

_CARRIERS = (
    "agree.py",
    "trace.py",
    "storages.py",
    "c10d.py",
    "fake_world.py",
    "operators.py",
    "tensor_tracking.py",
    "autograd_functions.py",
    "gloo_collectives.py",
    "digest.py",
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LISTS = ("broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list")
_OBJECTS = ("all_gather_object", "gather_object", *_LISTS)


class Group(NamedTuple):
    """A process group: its axis or purpose, and its global ranks in order."""

    name: str
    ranks: tuple[int, ...]


class Call(NamedTuple):
    """A collective or message that one rank issues.

    Attributes:
        kind: The kind, for example ``all_reduce`` or ``send``.
        sizes: The shapes of this rank's input tensors.
        splits: The rows that an all-to-all sends to and receives from each rank; elements for lists of tensors.
        peer: The group rank of the root, or of the other end of a message; -1: none.
        where: The source line in this library, and the nearest line outside of this library and torch.
        control: A flag for CPU tensors and objects, as opposed to tensors of the model.
        reduction: The reduction, for example ``sum`` or ``max``.
        batched: A flag for a message of a batch without an order (``batch_isend_irecv``).
    """

    kind: str
    group: Group
    sizes: tuple[tuple[int, ...], ...]
    dtype: str
    splits: tuple[tuple[int, ...], ...] = ()
    peer: int = -1
    tag: int = 0
    where: str = ""
    control: bool = False
    reduction: str = ""
    batched: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of this rank's input tensors."""
        width = getattr(torch, self.dtype).itemsize if self.dtype else 0
        return sum(map(prod, self.sizes)) * width

    @property
    def carries_tensors(self) -> bool:
        """Whether the call sends tensors of the model, possibly as bytes; not integers, CPU tensors or objects."""
        if self.control or not self.dtype:
            return False
        as_bytes = self.dtype == "uint8" and self.kind not in ("send", "recv")  # a message of bytes is a header
        return as_bytes or bool(getattr(torch, self.dtype).is_floating_point)

    def __str__(self) -> str:
        sizes = ", ".join("x".join(map(str, size)) or "a number" for size in self.sizes)
        peer = "" if self.peer < 0 else f" {'from' if self.kind == 'recv' else 'to'} rank {self.group.ranks[self.peer]}"
        if self.kind == "broadcast":
            peer = f" from rank {self.group.ranks[self.peer]}"
        how = f" ({self.reduction})" if self.reduction not in ("", "sum") else ""
        carried = f" [{sizes}] {self.dtype}" if self.dtype else ""
        return f"{self.kind}{how}{peer} over {self.group.name}{carried}"


class Recorder(TensorTracking):
    """A context manager that records all collectives of this thread and its backward passes.

    Args:
        note: A callback for each call before it runs.
        answer: A function that replaces the backend. It gets the operator, the call and the arguments.
        read: A function that answers any other operator, or returns ``NotImplemented``.
    """

    def __init__(
        self,
        note: Callable[[Call], None],
        answer: Callable[[Operator, Call, tuple[Any, ...]], Any] | None = None,
        read: Callable[[Any, Any, Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self._note, self.answer, self._read = note, answer, read
        self._muted = 0  # depth of :meth:`as_one`
        self._groups: dict[Any, Group] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and in_parts(types):
            return NotImplemented  # the operator is decomposed, and its parts come here
        operator, kwargs = operator_of(function), kwargs or {}
        if operator is None:
            found = NotImplemented if self._read is None else self._read(function, args, kwargs)
            return function(*args, **kwargs) if found is NotImplemented else found
        call = self._call(operator, args)
        if not self._muted:
            self._note(call)
        if self.answer is None:
            return function(*args, **kwargs)
        if operator.out >= 0:
            return self.answer(operator, call, args)
        made = function(*args, **kwargs)
        self.answer(operator, call, (*args, made))
        return made

    @contextmanager
    def as_one(self, kind: str, group: dist.ProcessGroup) -> Iterator[None]:
        if not self._muted:
            self._note(Call(kind, self._group(group), (), "", where=where(sys._getframe(1)), control=True))
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def _call(self, operator: Operator, args: tuple[Any, ...]) -> Call:
        given, out = list(tensors_in(args[operator.given])), list[torch.Tensor]()
        if operator.out >= 0:
            out = list(tensors_in(args[operator.out]))
        if operator.kind == "scatter":
            given, out = out, given  # only the root has inputs, but each rank has an output
        first = (given or out)[:1]
        group = self._group(group_of(args[operator.group]))
        control, message = bool(first), operator.kind in ("send", "recv")
        if first and self.answer:
            control = not first[0].is_meta
        elif first:  # a pickled object, or its length
            control = first[0].dtype in (torch.uint8, torch.int64) and _issued_by(sys._getframe(2), *_OBJECTS)
        return Call(
            operator.kind,
            group,
            tuple(tuple(x.shape) for x in (given if operator.kind != "all_gather" else given[:1])),
            str(first[0].dtype).removeprefix("torch.") if first and operator.kind != "barrier" else "",
            _splits(operator, args, given, out, len(group.ranks)) if operator.kind == "all_to_all" else (),
            args[operator.peer] if operator.peer >= 0 else -1,
            args[operator.tag] if operator.tag >= 0 else 0,
            where(sys._getframe(2)),
            control,
            reduction_of(args[operator.reduction]) if operator.reduction >= 0 else "",
            message and _issued_by(sys._getframe(2), "batch_isend_irecv"),
        )

    def _group(self, group: dist.ProcessGroup) -> Group:
        if group not in self._groups:
            self._groups[group] = Group(name_of_group(group), tuple(dist.get_process_group_ranks(group)))
        return self._groups[group]


def _splits(
    operator: Operator, args: tuple[Any, ...], given: list[torch.Tensor], out: list[torch.Tensor], members: int
) -> tuple[tuple[int, ...], ...]:
    """Return the rows sent to each rank, and received from each rank; equal splits by default."""
    if len(given) > 1:
        return tuple(x.numel() for x in given), tuple(x.numel() for x in out)
    named = [tuple(args[place]) for place in reversed(operator.splits)]
    rows = [len(x) if x.ndim else 1 for x in (*given, *(out or given))]
    return tuple(own or (each // members,) * members for own, each in zip(named, rows, strict=False))


def _issued_by(frame: Any, *names: str) -> bool:
    """Return whether one of these torch functions issues the call in ``frame``."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_name in names:
            return True
        frame = frame.f_back
    return False


def where(frame: Any) -> str:
    """Return the nearest line of this library outside of the carriers, and the nearest line of user code."""
    ours = outside = ""
    while frame is not None and not outside:
        file, own = _file(frame.f_code.co_filename)
        if own and file.endswith("/collectives.py") and frame.f_code.co_name not in ("forward", "backward"):
            file = ""  # a collective without autograd, called by another
        if file and not own:
            outside = f"{file}:{frame.f_lineno}"
        elif file and not ours:
            name = frame.f_code.co_qualname
            ours = f"{file}:{frame.f_lineno}" + (f" {name}" if "backward" in name else "")
        frame = frame.f_back
    return " < ".join(filter(None, (ours, outside)))


@functools.cache
def _file(path: str) -> tuple[str, bool]:
    """Return the name of a file, "" for a carrier of calls, and whether the file belongs to this library."""
    if path.startswith(OURS):
        return ("" if os.path.basename(path) in _CARRIERS else f"autopar/{path[len(OURS) :]}"), True
    carries = path.startswith((_TORCH, "<")) or path.endswith(("contextlib.py", "typing_extensions.py"))
    return ("" if carries else os.path.basename(path)), False


# -- files of a job -----------------------------------------------------------------------------------------------


_running: list[Recorder] = []


def trace_from_environment() -> None:
    """Start to write this rank's trace to the folder of ``AUTOPAR_TRACE``, once per process.

    The first line names the job. Each restart of an elastic job has a separate folder.
    """
    named = os.environ.get(TRACE)
    if not named or _running:
        return
    started = dist.is_initialized()
    rank = dist.get_rank() if started else int(os.environ.get("RANK", "0"))
    world = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    folder = Path(named) / f"attempt-{attempt + 1}" if attempt else Path(named)
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"rank-{rank}.jsonl").open("w", buffering=1)
    file.write(json.dumps({"world": world, "job": os.environ.get("TORCHELASTIC_RUN_ID", "")}) + "\n")

    def note(call: Call) -> None:
        file.write(json.dumps(list(call)) + "\n")

    recorder = Recorder(note)
    _running.append(recorder)
    recorder.__enter__()


def read(folder: str | Path) -> dict[int, list[Call]]:
    """Read the traces of a job, by rank.

    Raises:
        ConfigError: If the folder has files of several jobs, or a line is malformed.
    """
    files = {int(path.stem[5:]): path for path in Path(folder).glob("rank-*.jsonl") if path.stem[5:].isdecimal()}
    found: dict[int, list[Call]] = {rank: [] for rank in sorted(files)}
    jobs: dict[int, dict[str, Any]] = {}
    for rank, calls in found.items():
        for number, line in enumerate(files[rank].read_text().splitlines(keepends=True), 1):
            if not line.endswith("\n"):
                break  # the rank was killed while it wrote
            try:
                loaded = json.loads(line)
                if isinstance(loaded, dict):
                    jobs[rank] = loaded
                    continue
                kind, (name, ranks), sizes, dtype, splits, *rest = loaded
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{files[rank]}:{number} is not a line of a trace: {line.strip()[:60]!r}") from error
            group = Group(name, tuple(ranks))
            calls.append(Call(kind, group, tuple(map(tuple, sizes)), dtype, tuple(map(tuple, splits)), *rest))
    shown = {rank: f"{job['world']} ranks" + f" (job {job['job']})" * bool(job["job"]) for rank, job in jobs.items()}
    for rank, job in jobs.items():
        first = next(iter(jobs))
        if job != jobs[first] or rank >= job["world"]:
            raise ConfigError(
                f"{folder} has traces of several jobs: rank-{first}.jsonl of {shown[first]}, rank-{rank}.jsonl of "
                f"{shown[rank]}.\n  Remove the files of one job, or use a separate folder for each job."
            )
    return found

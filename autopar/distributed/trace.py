"""Traces: the collectives and messages of a rank, in the order in which it issues them.

A dispatch mode sees each one as torch's dispatcher does (:mod:`autopar.foreign.c10d`), this library's, FSDP2's and
those of ``DistributedDataParallel``. ``AUTOPAR_TRACE=folder`` lets each rank of a job write its own into
``folder/rank-N.jsonl``, a line each, at once: after a hang the last line is what the rank waits in. A rehearsal
(:mod:`autopar.tools.rehearsal`) answers them instead, and compares them between ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.call_site import OURS
from autopar.foreign.c10d import Operator, TorchDispatchMode, group_of, in_parts, operator_of, tensors_in
from autopar.foreign.tensors import dispatch_modes

__all__ = ["VARIABLE", "Call", "Group", "Recorder", "as_one", "read", "trace_from_environment"]

VARIABLE = "AUTOPAR_TRACE"
_CARRIERS = (
    "agree.py",
    "barrier.py",
    "trace.py",
    "storages.py",
    "c10d.py",
    "tensor_tracking.py",
    "derivatives.py",
    "profiling.py",
    "gloo_collectives.py",
    "plain_collectives.py",
    "neighbours.py",
    "digest.py",
)
_TORCH = os.path.dirname(torch.__file__) + os.sep


class Group(NamedTuple):
    """A process group.

    Attributes:
        name: of its axis, or what else it is for.
        ranks: global ones, in the order of the group.
    """

    name: str
    ranks: tuple[int, ...]


class Call(NamedTuple):
    """A collective or message as one rank issues it.

    Attributes:
        kind: ``all_reduce``, ``send`` and the like.
        group: over which.
        sizes: shapes that are sent, and of what is received where that is another number of elements.
        dtype: of the tensors.
        splits: rows that each rank sends, and that come from each, of an all-to-all.
        peer: number in the group of the root, of the receiver of ``send``, of the sender of ``recv``; -1: none.
        tag: of a message.
        where: the line of this library, and the nearest one outside of it and of torch.
        control: whether numbers or objects of the CPU travel, and no tensors of the model.
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

    @property
    def bytes(self) -> int:
        """The bytes of the tensors that this rank gives."""
        width = getattr(torch, self.dtype).itemsize if self.dtype else 0
        return sum(_numel(size) for size in self.sizes) * width

    @property
    def carries_floats(self) -> bool:
        """Whether tensors of the model travel: no integers, and no numbers or objects of the CPU."""
        return bool(self.dtype) and getattr(torch, self.dtype).is_floating_point and not self.control

    def __str__(self) -> str:
        sizes = ", ".join("x".join(map(str, size)) or "a number" for size in self.sizes)
        peer = "" if self.peer < 0 else f" {'from' if self.kind == 'recv' else 'to'} rank {self.group.ranks[self.peer]}"
        if self.kind == "broadcast":
            peer = f" from rank {self.group.ranks[self.peer]}"
        return f"{self.kind}{peer} over {self.group.name} [{sizes}] {self.dtype}"


def _numel(size: Iterable[int]) -> int:
    product = 1
    for each in size:
        product *= each
    return product


class Recorder(TorchDispatchMode):
    """Note every collective that this thread, and the backward passes that it starts, issue inside of ``with``.

    Args:
        note: called with each call before it runs.
        answer: carries it out instead of its backend, given the operator, its call and its arguments.
        read: answers other operators, given the operator and its arguments; ``NotImplemented`` lets them run.
    """

    def __init__(
        self,
        note: Callable[[Call], None],
        answer: Callable[[Operator, Call, tuple[Any, ...]], Any] | None = None,
        read: Callable[[Any, Any, Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self._note, self.answer, self._read = note, answer, read
        self._muted = 0  # inside of a collective that is noted as one
        self._groups: dict[Any, Group] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and in_parts(types):
            return NotImplemented  # its own operators and collectives come here
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
    def one(self, kind: str, group: dist.ProcessGroup) -> Iterator[None]:
        """Note one call of that kind over a group, and none of those inside."""
        if not self._muted:
            self._note(Call(kind, self._group(group), (), "", where=_where(sys._getframe(1)), control=True))
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def _call(self, operator: Operator, args: tuple[Any, ...]) -> Call:
        given, out = tensors_in(args[operator.given]), tensors_in(args[operator.out]) if operator.out >= 0 else []
        first = (given or out)[:1]
        sizes = tuple(tuple(x.shape) for x in (given if operator.kind != "all_gather" else given[:1]))
        splits = tuple(tuple(args[place]) for place in reversed(operator.splits))
        return Call(
            operator.kind,
            self._group(group_of(args[operator.group])),
            sizes,
            str(first[0].dtype).removeprefix("torch.") if first and operator.kind != "barrier" else "",
            splits if any(splits) else (),
            args[operator.peer] if operator.peer >= 0 else -1,
            args[operator.tag] if operator.tag >= 0 else 0,
            _where(sys._getframe(2)),
            self.answer is not None and bool(first) and not first[0].is_meta,
        )

    def _group(self, group: dist.ProcessGroup) -> Group:
        found = self._groups.get(group)
        if found is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            name = group.group_desc if group.group_desc not in ("", "undefined", "default_pg") else "world"
            found = self._groups[group] = Group(name, ranks)
        return found


@contextmanager
def as_one(kind: str, group: dist.ProcessGroup) -> Iterator[Any]:
    """Note what ranks do inside as one collective: it takes messages, or goes through the store of the process group.

    Yields:
        The ``answer`` of a recorder, which stands in for the backends of collectives; None outside of a rehearsal.
    """
    with ExitStack() as stack:
        recorders = [mode for mode in dispatch_modes() if isinstance(mode, Recorder)]
        for recorder in recorders:
            stack.enter_context(recorder.one(kind, group))
        yield next((recorder.answer for recorder in recorders if recorder.answer is not None), None)


def _where(frame: Any) -> str:
    """Return the nearest line of this library behind the carriers, and the nearest one outside of it and of torch."""
    ours = outside = ""
    while frame is not None and not outside:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname if sys.version_info >= (3, 11) else ""
        if file.startswith(OURS):
            if not ours and os.path.basename(file) not in _CARRIERS:
                ours = f"autopar/{file[len(OURS) :]}:{frame.f_lineno}" + (f" {name}" if "backward" in name else "")
        elif not file.startswith(_TORCH) and not file.startswith("<") and "contextlib" not in file:
            outside = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return " < ".join(filter(None, (ours, outside)))


# -- files of a job -----------------------------------------------------------------------------------------------


_running: list[Recorder] = []


def trace_from_environment() -> None:
    """Begin to write this rank's trace if ``AUTOPAR_TRACE`` names a folder; once in a process, to its end."""
    folder = os.environ.get(VARIABLE)
    if not folder or _running:
        return
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = (Path(folder) / f"rank-{rank}.jsonl").open("w", buffering=1)

    def note(call: Call) -> None:
        file.write(json.dumps(list(call)) + "\n")

    recorder = Recorder(note)
    _running.append(recorder)
    recorder.__enter__()


def read(folder: str | Path) -> dict[int, list[Call]]:
    """Read the traces of a job by rank."""
    traces = {int(path.stem.partition("-")[2]): list(_lines(path)) for path in Path(folder).glob("rank-*.jsonl")}
    return dict(sorted(traces.items()))


def _lines(path: Path) -> Iterator[Call]:
    for line in path.read_text().splitlines():
        kind, (name, ranks), sizes, dtype, splits, *rest = json.loads(line)
        group = Group(name, tuple(ranks))
        yield Call(kind, group, tuple(map(tuple, sizes)), dtype, tuple(map(tuple, splits)), *rest)

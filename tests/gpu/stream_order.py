"""What has surely happened before what on streams: a log of the simulated device, and the waits that are missing.

The host and each stream have a clock, and know of each other's what an event, a wait or a launch has told them. An
operation that reads what another stream writes, or writes what it reads or writes, needs to know that it is done; so
does the host with memory of its own that a copy on the way uses, and an allocation with memory that was freed.

As on CUDA, collectives that are begun with ``async_op=True``, and messages, run on a stream of their own, which keeps
its tensors; ``Work.wait()`` makes the current stream wait, not the host. Copies to the host with ``non_blocking`` are
on the way until the host has waited; those from pinned memory read it until then. A backward runs on stream 0.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.tools.rehearsal.trace import Recorder
from tests.gpu.host_waits import stack_here, tensors_in

HOST = "the host"
_running: list["Orders"] = []
_Clock = dict[Any, int]


class Access(NamedTuple):
    """What an operation does with a part of some memory."""

    line: Any  # stream, process group or host
    turn: int  # by the clock of that
    start: int
    end: int
    writes: bool
    what: str
    kept: bool  # its memory is given to nobody before it is done

    def __str__(self) -> str:
        name = f"stream {self.line}" if isinstance(self.line, int) else self.line
        return f"{self.what} on {name}"


class Orders:
    """The log.

    Attributes:
        faults: uses of memory that no wait has put behind earlier ones.
        counted: operations on side streams, asynchronous copies and collectives, events and waits.
    """

    def __init__(self, forget: int) -> None:
        self.faults: list[str] = []
        self.counted: Counter[str] = Counter()
        self._known: defaultdict[Any, _Clock] = defaultdict(dict)
        self._accesses: defaultdict[int, list[Access]] = defaultdict(list)
        self._owners: dict[int, int] = {}  # streams that have allocated
        self._freed: defaultdict[int, list[Access]] = defaultdict(list)
        self._lent: defaultdict[int, set[int]] = defaultdict(set)  # streams of record_stream
        self._works: dict[int, tuple[Any, _Clock, str]] = {}
        self._copies: dict[int, tuple[Any, int, str]] = {}  # to memory of the host, that are on the way
        self._of_host: set[int] = set()  # memory that asynchronous copies have read or written
        self._forget, self._waits = forget, 0

    def issue(self, line: Any, what: str, uses: list[tuple[torch.Tensor, bool]], *, kept: bool = False) -> _Clock:
        """Put an operation on a stream; ``uses`` are tensors, and whether it writes them."""
        self._follow_memory()
        clock = self._known[line]
        _learn(clock, self._known[HOST])
        clock[line] = clock.get(line, 0) + 1
        if isinstance(line, int) and line:
            self.counted["operations on side streams"] += 1
        for x, writes in uses:
            self._use(line, x, writes, what, kept)
        return dict(clock)

    def collective(self, line: str, what: str, uses: list[tuple[torch.Tensor, bool]], work: Any) -> None:
        """Put an asynchronous collective on a stream of its own; ``work`` waits for it."""
        _learn(self._known[line], self._known[torch.ops.sim.stream()])
        self.counted["asynchronous collectives"] += 1
        self._works[id(work)] = (work, self.issue(line, what, uses, kept=True), f"{what} in {stack_here()[0]}")

    def copy(self, source: torch.Tensor, out: torch.Tensor, non_blocking: bool) -> None:
        """Put a copy on the current stream."""
        line, ends = torch.ops.sim.stream(), (source.is_cpu, out.is_cpu)
        uses = [(x, writes) for x, writes in ((source, False), (out, True)) if not x.is_cpu]
        what = f"copy from {source.device.type} to {out.device.type}"
        if non_blocking and True in ends:
            self.counted["asynchronous copies"] += 1
            if out.is_cpu or source.is_pinned():
                self._follow_memory()  # something else may have lain there
                uses.append((out, True) if out.is_cpu else (source, False))
                self._of_host.add(_base(uses[-1][0]))
        self.issue(line, what, uses)
        if non_blocking and out.is_cpu:
            self._copies[_base(out)] = line, self._known[line][line], f"{what} in {stack_here()[0]}"
        elif not non_blocking and True in ends:
            self.host_waits(line)

    def record(self, line: int) -> _Clock:
        """Return what an event tells that is recorded now."""
        self.counted["events"] += 1
        self._follow_memory()
        told = dict(self._known[line])
        _learn(told, self._known[HOST])
        return told

    def wait(self, line: Any, told: _Clock) -> None:
        """Let a stream, or the host, wait for what an event tells."""
        self.counted["waits of the host" if line == HOST else "waits of streams"] += 1
        if not self._forgets():
            _learn(self._known[line], told)

    def host_waits(self, line: Any = None) -> None:
        """Let the host wait for a stream, or for all."""
        for one in list(self._known) if line is None else [line]:
            _learn(self._known[HOST], self._known[one])

    def work_waited(self, work: Any) -> None:
        """Let the current stream wait for a collective."""
        if id(work) in self._works:
            self.counted["waits of streams"] += 1
            if not self._forgets():
                _learn(self._known[torch.ops.sim.stream()], self._works.pop(id(work))[1])

    def _forgets(self) -> bool:
        self._waits += 1
        return self._waits == self._forget

    def lend(self, x: torch.Tensor, line: int) -> None:
        """Keep the memory of ``x`` until what the stream has to do by then is done, as ``record_stream`` does."""
        self._lent[_base(x)].add(line)

    def on_host(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Look at an operation of the host; it runs in any case."""
        tensors = list(tensors_in((args, kwargs)))
        if self._of_host and tensors and all(x.is_cpu for x in tensors) and not is_view(function):
            device = kwargs.get("device")
            if device is None or torch.device(device).type == "cpu":
                for x, writes in uses_of(function, args, kwargs):
                    if _base(x) in self._of_host:
                        self._use(HOST, x, writes, str(function), False)
        return NotImplemented

    def end(self) -> None:
        """Note what nobody has waited for."""
        self._follow_memory()
        known = self._known[HOST]
        for line, turn, place in self._copies.values():
            if known.get(line, 0) < turn:
                self.faults.append(f"the host has not waited for a {place}")
        for place in (place for *_, place in self._works.values()):
            self.faults.append(f"nobody has waited for {place}")

    def _use(self, line: Any, x: torch.Tensor, writes: bool, what: str, kept: bool) -> None:
        if not x.numel():
            return
        clock, base = self._known[line], _base(x)
        start, end = _range(x)
        own = Access(line, clock.get(line, 0), start, end, writes, what, kept)
        others = self._accesses[base]
        for other in others:
            if (
                (writes or other.writes)
                and other.start < end
                and start < other.end
                and clock.get(other.line, 0) < other.turn
                and other.line != line
            ):
                does = ("writes" if other.writes else "reads", "writes" if writes else "reads")
                self.faults.append(f"{other} {does[0]} what {own} {does[1]} without a wait, in {stack_here()[:2]}")
        if line != HOST:
            form = own[:1] + own[2:5]
            others[:] = [one for one in others if one[:1] + one[2:5] != form] + [own]

    def _follow_memory(self) -> None:
        changes = torch.ops.sim.changes()
        for base, size, line in zip(*(changes[at::3] for at in range(3)), strict=True):
            if line < 0:
                held = self._accesses.pop(base, [])
                self._of_host.discard(base)
                self._copies.pop(base, None)  # the allocator waits for it before it gives the memory to another
                owner, safe = self._owners.pop(base, None), self._lent.pop(base, set())
                if owner is not None:
                    late = (one for one in held if one.line not in safe | {owner} and not one.kept)
                    self._freed[owner].extend(one for one in late if not self._done(one, owner))
            else:
                self._owners[base] = line
                self._accesses.pop(base, None)
                for one in self._freed.pop(line, []):
                    if not self._done(one, line):
                        self.faults.append(
                            f"memory that {one} uses was freed, and stream {line} may get it for {size} bytes, "
                            f"in {stack_here()[:2]}"
                        )

    def _done(self, access: Access, line: int) -> bool:
        return max(self._known[at].get(access.line, 0) for at in (line, HOST)) >= access.turn


def _learn(clock: _Clock, other: _Clock) -> None:
    for line, turn in other.items():
        clock[line] = max(clock.get(line, 0), turn)


def _base(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _range(x: torch.Tensor) -> tuple[int, int]:
    """Bytes from the first element to behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize


def is_view(function: Any) -> bool:
    """Return whether an operator only looks at memory in another form."""
    marks = [argument.alias_info for argument in function._schema.arguments if argument.alias_info is not None]
    return bool(marks) and not any(mark.is_write for mark in marks)


def uses_of(function: Any, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, bool]]:
    """Return the tensors among the arguments of an operator, and whether it writes them."""
    found = []
    for at, argument in enumerate(function._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        found += [(x, writes) for x in tensors_in(value)]
    return found


@contextmanager
def orders(forget: int = 0) -> Iterator[Orders]:
    """Log what streams do inside of ``with``, in all threads, and what this one and its backwards do on the host.

    Args:
        forget: a wait that is left out, by its number from 1, as if the program lacked it.
    """
    log = Orders(forget)
    torch.ops.sim.watch(True)
    _running.append(log)
    try:
        with Recorder(lambda call: None, read=log.on_host):
            yield log
        log.end()
    finally:
        _running.remove(log)
        torch.ops.sim.watch(False)


def running() -> Orders | None:
    """Return the log that runs."""
    return _running[-1] if _running else None


def watch_works() -> None:
    """Let ``Work.wait`` tell the log, in this process from now on."""
    plain = dist.Work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = plain(self, *args, **kwargs)
        log = running()
        if log is not None:
            log.work_waited(self)
        return done

    dist.Work.wait = wait

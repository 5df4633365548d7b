"""``torch.sim``: what torch asks of the module of a device, for the simulated one."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from tests.gpu.host_waits import note
from tests.gpu.stream_order import HOST, running


class Stream:
    """A stream: what is asked of it is done already, and the log (:mod:`tests.gpu.stream_order`) knows the order."""

    def __init__(self, *args: Any, number: int | None = None, **kwargs: Any) -> None:
        self.priority = 0
        self.number = next(_numbers) if number is None else number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return True


class Event:
    """An event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.told: dict[Any, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        log = running()
        self.told = {} if log is None else log.record((stream or current_stream()).number)

    def wait(self, stream: Stream | None = None) -> None:
        log = running()
        if log is not None:
            log.wait((stream or current_stream()).number, self.told)

    def synchronize(self) -> None:
        note("synchronize")
        log = running()
        if log is not None:
            log.wait(HOST, self.told)

    def query(self) -> bool:
        return True


_numbers = itertools.count(1)


def current_stream(device: Any = None) -> Stream:
    """Return this thread's stream."""
    return Stream(number=torch.ops.sim.stream())


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    before = torch.ops.sim.stream()
    torch.ops.sim.exchange_stream(before if stream is None else stream.number)
    try:
        yield
    finally:
        torch.ops.sim.exchange_stream(before)


def _synchronize(device: Any = None) -> None:
    note("synchronize")
    log = running()
    if log is not None:
        log.host_waits()


def make_module(name: str) -> ModuleType:
    """Make the module; the device is there already."""
    module = ModuleType(f"torch.{name}")
    generator = torch.ops.sim.default_generator()

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": _synchronize,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "stream": _on_stream,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "default_generators": (generator,),
    }
    vars(module).update(functions)
    return module

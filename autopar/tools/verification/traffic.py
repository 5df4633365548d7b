"""Traffic: the collectives and messages of a piece of work on this rank, recorded as they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from autopar.distributed.axis import Axis
from autopar.tensor_tracking import TensorTracking
from autopar.tools.verification.report import Traffic

__all__ = ["Collective", "counted", "record", "recording_of"]


class Collective(NamedTuple):
    """Name, elements that a rank gives, and dtype."""

    name: str
    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes that a rank contributes."""
        return self.elements * self.dtype.itemsize


class _Recorder(TensorTracking):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.note(function.__name__.partition(".")[0].strip("_"), (args,))
        return function(*args, **(kwargs or {}))

    def note(self, name: str, args: Any) -> None:
        """Note a call: what a rank gives is the smallest of its tensors."""
        tensors = [entry for entry in _flat(args) if isinstance(entry, torch.Tensor)]
        if tensors:
            own = min(tensors, key=lambda tensor: tensor.numel())
            self.found.append(Collective(name, own.numel(), own.dtype))


class _Transport:
    """A transport that notes each collective of an axis."""

    def __init__(self, transport: Any, recorder: _Recorder) -> None:
        self._transport, self._recorder = transport, recorder

    def run(self, name: str, *args: Any) -> bool:
        done: bool = self._transport.run(name, *args)
        if done:
            self._recorder.note(name, args)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def record(work: Callable[[], Any]) -> list[Collective]:
    """Return the collectives that ``work`` calls on torch's process groups, in order."""
    with _Recorder() as recorder:
        work()
    return recorder.found


@contextmanager
def recording_of(axis: Axis) -> Iterator[list[Collective]]:
    """Record inside what torch's process groups carry, and what memory that the ranks of ``axis`` share does."""
    transport = axis.transport
    with _Recorder() as recorder:
        if transport is not None:
            axis.transport = _Transport(transport, recorder)
        try:
            yield recorder.found
        finally:
            axis.transport = transport


_KINDS = {  # torch's and the transport's names -> the field's
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}


def counted(collectives: Sequence[Collective]) -> tuple[Traffic, ...]:
    """Add them up by kind, the largest first. What is received is left out: another rank has sent it."""
    calls, sizes = Counter[str](), Counter[str]()
    for each in collectives:
        kind = next((kind for name, kind in _KINDS.items() if each.name.startswith(name)), each.name)
        calls[kind] += 1
        sizes[kind] += each.bytes
    return tuple(Traffic(kind, calls[kind], size) for kind, size in sizes.most_common() if kind != "receive")


def _flat(value: Any) -> list[Any]:
    return [leaf for entry in value for leaf in _flat(entry)] if isinstance(value, list | tuple) else [value]

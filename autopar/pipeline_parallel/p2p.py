"""Nested values with tensors in them, from one stage to another.

A message is a header (its length, and what the value is made of, as bytes) and then its tensors one by one,
so shapes may change from one message to the next. Sends do not wait; a receive waits no longer than the timeout.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from autopar.distributed.axis import Axis
from autopar.distributed.failures import GRACE, FailureLog, first_line
from autopar.errors import PipelineError

__all__ = ["Post", "Slot", "map_tensors", "pack", "unpack"]


_LENGTH = 8  # bytes of a header's length
_HEADER = 2048  # bytes of a message's header, which is one message where that is enough: each costs a round trip


class Slot(NamedTuple):
    """Stands for a tensor in a packed value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _Local(NamedTuple):
    """Stands for a cache: every stage has its own."""


class _Failure(NamedTuple):
    """Comes instead of a value, from a stage that failed."""

    text: str


class _Record(NamedTuple):
    """Stands for a ``ModelOutput``."""

    kind: type
    fields: dict[str, Any]


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with ``function`` applied to each tensor in it, also inside tuples, lists, dicts, ``ModelOutput``."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, ModelOutput):
        return type(value)(**{name: map_tensors(entry, function) for name, entry in value.items()})
    if isinstance(value, dict):
        return {name: map_tensors(entry, function) for name, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(entry, function) for entry in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(entry, function) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: map_tensors(entry, function) for name, entry in _fields(value).items()})
    return value


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that its constructor takes."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def pack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with a :class:`Slot` in place of each tensor; the tensors are added to the list, in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Slot(tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, Cache):
        return _Local()
    if isinstance(value, ModelOutput):
        return _Record(type(value), {name: pack(entry, tensors) for name, entry in value.items()})
    if isinstance(value, dict):
        return {name: pack(entry, tensors) for name, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(pack(entry, tensors) for entry in value))
    if isinstance(value, list | tuple):
        return type(value)(pack(entry, tensors) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return _Record(type(value), {name: pack(entry, tensors) for name, entry in _fields(value).items()})
    return value


def unpack(packed: Any, tensor_of: Callable[[Slot], torch.Tensor], cache: Any = None) -> Any:
    """Inverse of :func:`pack`; ``cache`` is put where one was."""
    if isinstance(packed, Slot):
        return tensor_of(packed)
    if isinstance(packed, _Local):
        return cache
    if isinstance(packed, _Record):
        fields = {name: unpack(entry, tensor_of, cache) for name, entry in packed.fields.items()}
        return packed.kind(**fields)
    if isinstance(packed, dict):
        return {name: unpack(entry, tensor_of, cache) for name, entry in packed.items()}
    if isinstance(packed, tuple) and hasattr(packed, "_fields"):
        return type(packed)(*(unpack(entry, tensor_of, cache) for entry in packed))
    if isinstance(packed, list | tuple):
        return type(packed)(unpack(entry, tensor_of, cache) for entry in packed)
    return packed


class Post:
    """Sends and receives over one pipeline-parallel axis.

    Args:
        axis: the pipeline-parallel axis.
        groups: (way, whether the receiver comes after the sender on the axis) -> group of its ranks. What goes one way
            between two ranks never waits for what goes another (in a V outputs go both up and down).
        control: a gloo group of the axis for headers, which lie in CPU memory.
        failures: log of all ranks. A receive that gives up closes all connections of its group, so the reason of a
            failure is published there.
        device: where tensors live.
    """

    def __init__(
        self,
        axis: Axis,
        groups: Mapping[tuple[str, bool], Any],
        control: Any,
        failures: FailureLog,
        device: torch.device,
    ) -> None:
        self.axis, self.control, self.device = axis, control, device
        self.failures, self.timeout = failures, failures.timeout
        self._groups = groups
        self._sent: list[tuple[Any, torch.Tensor, str, Any]] = []
        self._label: Any = None
        self._pass = 0
        self._farewell: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Post:
        return self

    @property
    def passes(self) -> int:
        """How many have begun."""
        return self._pass

    def begin(self) -> None:
        """A new pass begins, on every rank: what a pass that failed left behind is thrown away from now on."""
        self._pass += 1
        self.failures.clear()

    def send(self, value: Any, to: int, *, way: str, tag: int, what: str, label: Any = None) -> None:
        """Send ``value`` to place ``to`` of the axis; returns at once.

        Args:
            way: ``forward`` or ``backward``.
            tag: the receiver's.
            what: for messages about failures.
            label: what :meth:`forget` knows it by.
        """
        self._label = label
        tensors: list[torch.Tensor] = []
        packed, peer = pack(value, tensors), self.axis.ranks[to]
        try:
            self._send_header(packed, peer, tag, what)
            group = self._groups[way, to > self.axis.rank]
            for tensor in tensors:
                if tensor.numel():
                    self._start(tensor.detach().contiguous(), peer, group, 2 * tag + 1, what)
        except RuntimeError as error:
            raise self._lost(what, peer, error, sending=True) from error

    def send_failure(self, error: Exception, receivers: list[tuple[int, int]], *, pause: bool = True) -> None:
        """Let others fail at once with this error instead of after the timeout; as far as they can be reached.

        Args:
            receivers: (place, tag that it waits for).
            pause: give them time to take it, before this process may end.
        """
        text = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        self.failures.publish(text)
        for place, tag in receivers:
            with contextlib.suppress(RuntimeError):  # its connection may be closed
                self._send_header(_Failure(text), self.axis.ranks[place], tag, "a failure")
        # Buffers live as long as this process may still be asked: the receiver throws them away in a later pass.
        self._farewell += self._sent
        self._sent = []
        if pause and receivers:
            time.sleep(min(self.timeout, GRACE) / 2)

    def _send_header(self, value: Any, peer: int, tag: int, what: str) -> None:
        packed = torch.frombuffer(bytearray(pickle.dumps((self._pass, value))), dtype=torch.uint8)
        first = torch.zeros(_HEADER, dtype=torch.uint8)
        first[:_LENGTH] = torch.tensor([packed.numel()]).view(torch.uint8)
        if packed.numel() <= _HEADER - _LENGTH:
            first[_LENGTH : _LENGTH + packed.numel()] = packed
        self._start(first, peer, self.control, 2 * tag, what)
        if packed.numel() > _HEADER - _LENGTH:
            self._start(packed, peer, self.control, 2 * tag, what)

    def _start(self, tensor: torch.Tensor, peer: int, group: Any, tag: int, what: str) -> None:
        work = dist.isend(tensor, peer, group=group, tag=tag)
        self._sent.append((work, tensor, what, self._label))

    def receive(self, origin: int, *, way: str, tag: int, what: str, cache: Any = None) -> Any:
        """What place ``origin`` of the axis sent with that tag.

        Raises:
            PipelineError: nothing came in time, or the other process ended.
        """
        peer = self.axis.ranks[origin]

        def tensor_of(slot: Slot) -> torch.Tensor:
            tensor = torch.empty(slot.shape, dtype=slot.dtype, device=self.device)
            if tensor.numel():
                self._wait(tensor, peer, self._groups[way, self.axis.rank > origin], 2 * tag + 1, what)
            return tensor.requires_grad_(slot.requires_grad)

        while True:
            header = torch.empty(_HEADER, dtype=torch.uint8)
            self._wait(header, peer, self.control, 2 * tag, what)
            length = int(header[:_LENGTH].view(torch.int64).item())
            header = header[_LENGTH:]
            if length > header.numel():
                header = torch.empty(length, dtype=torch.uint8)
                self._wait(header, peer, self.control, 2 * tag, what)
            sent_in, packed = pickle.loads(header.numpy().tobytes())
            if isinstance(packed, _Failure):
                if sent_in < self._pass:
                    continue
                raise PipelineError(f"rank {peer} could not send {what}, it failed:\n{packed.text}")
            value = unpack(packed, tensor_of, cache)
            if sent_in >= self._pass:
                return value

    def _wait(self, tensor: torch.Tensor, peer: int, group: Any, tag: int, what: str) -> None:
        try:
            work: Any = dist.irecv(tensor, peer, group=group, tag=tag)
            work.wait(timedelta(seconds=self.timeout + GRACE * self._behind(peer)))
        except RuntimeError as error:
            raise self._lost(what, peer, error) from error

    def _behind(self, peer: int) -> int:
        """How many places the peer may wait for in turn: who is nearest to the one that hangs shall notice first."""
        place = self.axis.ranks.index(peer)
        return place if place < self.axis.rank else self.axis.size - 1 - place

    def forget(self, arrived: Callable[[Any], bool]) -> None:
        """Let go of the buffers of messages that are known to have arrived. gloo does not tell by itself."""
        kept = []
        for entry in self._sent:
            if entry[3] is not None and arrived(entry[3]):
                entry[0].wait()
            else:
                kept.append(entry)
        self._sent = kept

    def settle(self) -> None:
        """Wait until everything that was sent has left."""
        deadline = time.monotonic() + self.timeout
        while self._sent:
            work, _, what, _ = self._sent.pop(0)
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise PipelineError(f"{what} was never taken: {first_line(error)}") from error

    def _lost(self, what: str, peer: int, error: Exception, *, sending: bool = False) -> PipelineError:
        place = self.axis.ranks.index(peer)
        doing = "could not send" if sending else f"waited up to {self.timeout:g} s (pipeline.timeout) for"
        text = (
            f"rank {self.axis.ranks[self.axis.rank]} (place {self.axis.rank} of the pipeline) {doing} {what} "
            f"{'to' if sending else 'from'} rank {peer} (place {place}): that process ended, failed or hangs."
        )
        return self.failures.failure(text, [peer], error)

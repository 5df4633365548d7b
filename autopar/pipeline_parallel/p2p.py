"""Send nested values with tensors between the ranks of a pipeline ([Note: state passing between stages]).

A value is sent as a header (pass, tag, pickled structure), followed by its tensors, so shapes may change between
messages. Sends do not wait. A receive waits at most for the timeout. Headers of a sender arrive in order, and early
ones are kept, so a failing rank ends the wait of every other rank with a single header.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from autopar.compat.c10d import in_fake_world
from autopar.distributed.axis import Axis
from autopar.distributed.failures import GRACE, FailureLog
from autopar.distributed.mesh import MPU, new_pipeline_group
from autopar.distributed.process import accelerator
from autopar.errors import PipelineError, first_line
from autopar.swap import NotCopied

_LENGTH = 8  # bytes of a header's length
_HEADER = 2048  # bytes of a header's first message; a longer header takes a second one, which costs a round trip
_OF_HEADERS = 0  # gloo's tag of all headers; tensors have the message's tag and 1
_WAYS = ("forward", "backward")
_ANY = -1  # tag of a header that ends every wait


class Message(NamedTuple):
    """The kind of a message.

    Attributes:
        name: The description for errors.
        tag: The number of a sequence of messages, which are received in the order in which they are sent.
        backward: True for a gradient.
    """

    name: str
    tag: int
    backward: bool = False


class Failure(NamedTuple):
    """Message of a failed rank in place of a value."""

    text: str


class UnexpectedReport(Exception):
    """Raised if another rank compares its arguments before the pass and this rank does not."""


REPORT = Message("its report on the batch", 1_000_000_000)
_END = Message("its report on the end of the step", 1_000_000_001)


class TensorMeta(NamedTuple):
    """Shape, dtype and requires_grad of a tensor, in its place in a pickled value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply ``function`` to each tensor in ``value``: in tuples, lists, dicts, dataclasses and ``ModelOutput``."""
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
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: map_tensors(getattr(value, name), function) for name in names})
    return value


class _Pickler(pickle.Pickler):
    """Pickler that collects tensors, and leaves out KV caches, since every rank has its own."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return TensorMeta(tuple(value.shape), value.dtype, value.requires_grad)
        return "cache" if isinstance(value, Cache) else None


class _Unpickler(pickle.Unpickler):
    """Undo :class:`_Pickler`, with tensors from ``tensor_of`` in the same order, and ``cache`` for caches."""

    def __init__(self, packed: bytes, tensor_of: Callable[[TensorMeta], torch.Tensor], cache: Any) -> None:
        super().__init__(io.BytesIO(packed))
        self._tensor_of, self._cache = tensor_of, cache

    def persistent_load(self, meta: Any) -> Any:
        return self._cache if meta == "cache" else self._tensor_of(meta)


class P2P(NotCopied):
    """Send and receive over the pipeline axis, in separate process groups.

    A failed step leaves messages, so receives drop messages of earlier passes. gloo separates messages by tags. nccl
    has no tags, and its sends wait for earlier sends, so each direction has a group (outputs or gradients, up or down,
    because outputs go both ways in a V). A receive that times out closes all connections of its group, so the reason of
    a failure is published in ``failures``.
    """

    def __init__(self, mpu: MPU, failures: FailureLog) -> None:
        self.axis: Axis = mpu.pp
        self.device, self.failures, self.timeout = mpu.device, failures, failures.timeout
        self.peers = [place for place in range(self.axis.size) if place != self.axis.rank]
        found = accelerator()
        backend = None if found is None else found.backend_of()
        self._control = new_pipeline_group(mpu, "pp control", backend=backend and "gloo")
        together = backend is None and not in_fake_world()  # a rehearsal has the groups of nccl
        self._groups: Mapping[tuple[bool, bool], Any] = {
            (backward, up): self._control
            if together
            else new_pipeline_group(mpu, f"pp {_WAYS[backward]} {'up' if up else 'down'}", backend=backend)
            for backward, up in itertools.product((False, True), repeat=2)
        }
        self._sent: list[tuple[Any, torch.Tensor, str, Any]] = []
        self._early: dict[int, list[tuple[int, int, Any]]] = {}  # headers by sender: pass, tag, pickled value
        self._pass, self._all_know = 0, False
        self._farewell: list[Any] = []

    # -- passes and failures ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Begin a pass on every rank; in the block, limit the waits of collectives, and send and publish errors."""
        self._pass += 1
        self._all_know = False
        self.failures.clear()
        try:
            with self.failures.deadline():
                yield
        except Exception as error:
            if not self._all_know:
                self._send_failure(error)
            raise

    @contextlib.contextmanager
    def raised_by_all(self) -> Iterator[None]:
        """Mark an error in the block as raised by all ranks, so that no failure is sent."""
        try:
            yield
        except Exception:
            self._all_know = True
            raise

    def end_actions(self) -> None:
        """Wait until all ranks have run their actions, so that none is in a collective of a failed stage."""
        self.exchange(None, _END)
        self.wait_sent()
        self._all_know = True  # no rank waits for a message later in this pass

    def _send_failure(self, error: Exception) -> None:
        """Send this error to all reachable ranks, so that they fail at once instead of after the timeout."""
        text = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        self.failures.publish(text)
        for place in self.peers:
            with contextlib.suppress(RuntimeError):  # its connection may be closed
                self._send_header(Failure(text), self.axis.ranks[place], Message("a failure", _ANY), None)
        # Buffers are kept, because a receiver may still read them, and drop them in a later pass.
        self._farewell += self._sent
        self._sent = []
        if self.peers:  # they may read the error before this process ends
            time.sleep(min(self.timeout, GRACE) / 2)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, value: Any, to: int, message: Message, label: tuple[int, int] | None = None) -> None:
        """Send ``value`` to place ``to`` of the axis, without waiting, with the ``label`` of :meth:`release`."""
        packed, peer = io.BytesIO(), self.axis.ranks[to]
        pickler = _Pickler(packed)
        pickler.dump(value)
        try:
            self._send_header(packed.getvalue(), peer, message, label)
            group = self._groups[message.backward, to > self.axis.rank]
            for tensor in pickler.tensors:
                if tensor.numel():
                    self._start(tensor.detach().contiguous(), peer, group, message.tag + 1, message.name, label)
        except RuntimeError as error:
            raise self._failure(message.name, peer, error) from error

    def send_to_others(self, value: Any, message: Message) -> None:
        """Send ``value`` to all other ranks."""
        for place in self.peers:
            self.send(value, place, message)

    def exchange(self, value: Any, message: Message) -> dict[int, Any]:
        """Return the values of all ranks, by rank in ascending order."""
        self.send_to_others(value, message)
        return {
            rank: value if place == self.axis.rank else self.receive(place, message)
            for place, rank in enumerate(self.axis.ranks)
        }

    def _send_header(self, packed: bytes | Failure, peer: int, message: Message, label: Any) -> None:
        header = torch.frombuffer(bytearray(pickle.dumps((self._pass, message.tag, packed))), dtype=torch.uint8)
        first = torch.zeros(_HEADER, dtype=torch.uint8)
        first[:_LENGTH] = torch.tensor([header.numel()]).view(torch.uint8)
        if header.numel() <= _HEADER - _LENGTH:
            first[_LENGTH : _LENGTH + header.numel()] = header
        self._start(first, peer, self._control, _OF_HEADERS, message.name, label)
        if header.numel() > _HEADER - _LENGTH:
            self._start(header, peer, self._control, _OF_HEADERS, message.name, label)

    def _start(self, tensor: torch.Tensor, peer: int, group: Any, tag: int, name: str, label: Any) -> None:
        self._sent.append((dist.isend(tensor, peer, group=group, tag=tag), tensor, name, label))

    def release(self, to: int, before: int) -> None:
        """Free the buffers that place ``to`` has received before turn ``before``, which gloo does not report."""
        sent, self._sent = self._sent, []
        for entry in sent:
            work, _, _, label = entry
            if label is not None and label[0] == to and label[1] < before:
                work.wait()
            else:
                self._sent.append(entry)

    def wait_sent(self) -> None:
        """Wait until all sends have completed."""
        deadline = time.monotonic() + self.timeout
        while self._sent:
            work, _, name, _ = self._sent.pop(0)
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise PipelineError(f"{name} was not received: {first_line(error)}") from error

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, origin: int, message: Message, cache: Any = None) -> Any:
        """Receive a value from place ``origin`` of the axis, with ``cache`` in place of the sender's KV cache.

        Raises:
            PipelineError: No message came in time, the sender failed, or its process ended.
            UnexpectedReport: The sender has begun this pass with a report that this rank does not expect.
        """
        peer = self.axis.ranks[origin]

        def tensor_of(meta: TensorMeta) -> torch.Tensor:
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            if tensor.numel():
                group = self._groups[message.backward, self.axis.rank > origin]
                self._wait(tensor, peer, group, message.tag + 1, message.name)
            return tensor.requires_grad_(meta.requires_grad)

        while True:
            sent_in, packed = self._next(peer, message)
            value = _Unpickler(packed, tensor_of, cache).load()
            if sent_in >= self._pass:
                return value

    def _next(self, peer: int, message: Message) -> tuple[int, Any]:
        """Return the pass and the pickled value of the next message of this kind."""
        early = self._early.setdefault(peer, [])
        for place, (sent_in, tag, packed) in enumerate(early):
            if tag == message.tag:
                del early[place]
                return sent_in, packed
        while True:
            sent_in, tag, packed = self._read_header(peer, message.name)
            if isinstance(packed, Failure):
                if sent_in >= self._pass:
                    raise PipelineError(f"rank {peer} could not send {message.name}, it failed:\n{packed.text}")
            elif tag == message.tag:
                return sent_in, packed
            else:
                early.append((sent_in, tag, packed))
                if tag == REPORT.tag and sent_in == self._pass:
                    raise UnexpectedReport

    def _read_header(self, peer: int, name: str) -> Any:
        header = torch.empty(_HEADER, dtype=torch.uint8)
        self._wait(header, peer, self._control, _OF_HEADERS, name)
        length = int(header[:_LENGTH].view(torch.int64).item())
        header = header[_LENGTH:]
        if length > header.numel():
            header = torch.empty(length, dtype=torch.uint8)
            self._wait(header, peer, self._control, _OF_HEADERS, name)
        return pickle.loads(header.numpy().tobytes())

    def _wait(self, tensor: torch.Tensor, peer: int, group: Any, tag: int, name: str) -> None:
        begin = time.monotonic()
        try:
            work: Any = dist.irecv(tensor, peer, group=group, tag=tag)
            work.wait(timedelta(seconds=self.timeout + GRACE * self._behind(peer)))
        except RuntimeError as error:
            raise self._failure(name, peer, error, waited=time.monotonic() - begin) from error

    def _behind(self, peer: int) -> int:
        """Count the ranks that the peer may wait for, so that the neighbor of a hanging rank times out first."""
        place = self.axis.ranks.index(peer)
        return place if place < self.axis.rank else self.axis.size - 1 - place

    def _failure(self, name: str, peer: int, error: Exception, *, waited: float | None = None) -> PipelineError:
        place = self.axis.ranks.index(peer)
        seconds = f"{waited or 0:.1f} s" if (waited or 0) < self.timeout else f"{self.timeout:g} s (pipeline.timeout)"
        doing = "could not send" if waited is None else f"waited {seconds} for"
        text = (
            f"rank {self.axis.ranks[self.axis.rank]} (place {self.axis.rank} of the pipeline) {doing} {name} "
            f"{'to' if waited is None else 'from'} rank {peer} (place {place}): that process ended, failed or hangs."
        )
        return self.failures.failure(text, [peer], error)

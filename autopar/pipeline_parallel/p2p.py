"""Send nested values with tensors between the ranks of a pipeline ([Note: state passing between stages]).

A value is sent as a frame (pass, tag, pickled structure), so shapes may change between messages. Over gloo the frame
contains its tensors; over nccl, and for large values, they follow one by one. Sends do not wait. A receive waits at
most for the timeout. Frames of a sender arrive in order, and early ones are kept, so a failing rank ends the wait of
every other rank with a single frame. Both sides use the size of the last frame for the next one, and a receive is
posted before the computation, so that a frame of the same size arrives meanwhile.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from autopar.pipeline_parallel.stage_weights import scalar_placeholder
from autopar.swap import NotCopied

_LENGTHS = 16  # bytes of two integers: the lengths of a frame and of its pickled header
_ALIGNED = 64  # bytes between which tensors in a frame begin
_FRAME, _SPARE = 2048, 256  # bytes of the first frame; bytes that a header may grow by before it takes a round trip
_INLINE = 4 << 20  # most bytes of tensors in a frame
_OF_FRAMES = 0  # gloo's tag of all frames; tensors that follow have the message's tag and 1
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


def _aligned(end: int) -> int:
    return -(-end // _ALIGNED) * _ALIGNED


class TensorMeta(NamedTuple):
    """Shape, dtype and requires_grad of a tensor, in its place in a pickled value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def is_output(value: Any) -> bool:
    """Return whether a value is an output of a model of transformers or diffusers: a mapping with attributes."""
    return isinstance(value, ModelOutput) or (isinstance(value, dict) and is_dataclass(value))


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply ``function`` to each tensor in ``value``: in tuples, lists, dicts, dataclasses and ``ModelOutput``."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if is_output(value):
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


def pack_shapes(value: Any) -> bytes:
    """Pickle a nested value without the values of its tensors."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def unpack_shapes(packed: bytes, device: torch.device) -> Any:
    """Undo :func:`pack_shapes`, with tensors of NaN without memory."""

    def empty(meta: TensorMeta) -> torch.Tensor:
        return scalar_placeholder(meta.dtype, device).expand(meta.shape)

    return _Unpickler(packed, empty, None).load()


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
        self._inline = backend is None and not in_fake_world()  # a rehearsal has the groups of nccl
        self._groups: Mapping[tuple[bool, bool], Any] = {
            (backward, up): self._control
            if self._inline
            else new_pipeline_group(mpu, f"pp {_WAYS[backward]} {'up' if up else 'down'}", backend=backend)
            for backward, up in itertools.product((False, True), repeat=2)
        }
        self._sent: list[tuple[Any, torch.Tensor, str, Any]] = []
        self._early: dict[int, list[tuple[int, int, Any, torch.Tensor]]] = {}  # by sender: pass, tag, value, tensors
        self._sizes: dict[tuple[int, bool], int] = {}  # rank, whether it receives -> bytes of the next frame
        self._posted: dict[int, tuple[Any, torch.Tensor]] = {}  # sender -> receive of its next frame
        self._ahead = False
        self._pass, self._all_know = 0, False
        self._farewell: list[Any] = []

    # -- passes and failures ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Begin a pass on every rank; in the block, limit the waits of collectives, and send and publish errors."""
        self._pass += 1
        self._all_know = self._ahead = False
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

    def begin_actions(self) -> None:
        """Post receives before they are awaited, until :meth:`end_actions`; each rank sends a frame at its end."""
        self._ahead = not in_fake_world()
        for place in self.peers:
            self._post_ahead(self.axis.ranks[place])

    def end_actions(self) -> None:
        """Wait until all ranks have run their actions, so that none is in a collective of a failed stage."""
        self._ahead = False
        self.exchange(None, _END)
        self.wait_sent()
        self._all_know = True  # no rank waits for a message later in this pass

    def _send_failure(self, error: Exception) -> None:
        """Send this error to all reachable ranks, so that they fail at once instead of after the timeout."""
        text = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        self.failures.publish(text)
        for place in self.peers:
            with contextlib.suppress(RuntimeError):  # its connection may be closed
                self._send_frame(Failure(text), self.axis.ranks[place], Message("a failure", _ANY))
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
        tensors = [tensor.detach().contiguous() for tensor in pickler.tensors if tensor.numel()]
        inline = self._inline and sum(tensor.nbytes for tensor in tensors) <= _INLINE
        try:
            self._send_frame(packed.getvalue(), peer, message, label, tensors if inline else ())
            group = self._groups[message.backward, to > self.axis.rank]
            for tensor in () if inline else tensors:
                self._start(tensor, peer, group, message.tag + 1, message.name, label)
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

    def _send_frame(
        self,
        packed: bytes | Failure,
        peer: int,
        message: Message,
        label: tuple[int, int] | None = None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        header = torch.frombuffer(bytearray(pickle.dumps((self._pass, message.tag, packed))), dtype=torch.uint8)
        parts, end = [(_LENGTHS, header)], _LENGTHS + header.numel()
        for tensor in tensors:
            parts.append((_aligned(end), tensor))
            end = _aligned(end) + tensor.nbytes
        expected = self._size(peer, end, received=False)
        frame = torch.empty(max(end, expected), dtype=torch.uint8)
        frame[:_LENGTHS] = torch.tensor([end, header.numel()]).view(torch.uint8)
        for begin, part in parts:
            frame[begin : begin + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
        self._start(frame[:expected], peer, self._control, _OF_FRAMES, message.name, label)
        if end > expected:
            self._start(frame[expected:], peer, self._control, _OF_FRAMES, message.name, label)

    def _size(self, peer: int, end: int, *, received: bool) -> int:
        """Return the bytes that the first message of this frame has on both sides; note the size of the next frame."""
        expected = self._sizes.get((peer, received), _FRAME)
        self._sizes[peer, received] = max(end + _SPARE, _FRAME)
        return expected

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
        peer, begin = self.axis.ranks[origin], 0

        def tensor_of(meta: TensorMeta) -> torch.Tensor:
            nonlocal begin
            count = math.prod(meta.shape)
            if count and len(inline):
                end = begin + count * meta.dtype.itemsize
                tensor, begin = inline[begin:end].view(meta.dtype).view(meta.shape), _aligned(end)
                # The leaf gives its memory back; any other tensor may be kept, and must not keep the frame.
                return tensor.requires_grad_() if meta.requires_grad else tensor.clone()
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            if count:
                group = self._groups[message.backward, self.axis.rank > origin]
                self._wait(tensor, peer, group, message.tag + 1, message.name)
            return tensor.requires_grad_(meta.requires_grad)

        while True:
            sent_in, packed, inline = self._next(peer, message)
            begin = 0
            value = _Unpickler(packed, tensor_of, cache).load()
            if sent_in >= self._pass:
                return value

    def _next(self, peer: int, message: Message) -> tuple[int, Any, torch.Tensor]:
        """Return the pass, the pickled value and the bytes of the tensors of the next message of this kind."""
        early = self._early.setdefault(peer, [])
        for place, (sent_in, tag, packed, inline) in enumerate(early):
            if tag == message.tag:
                del early[place]
                return sent_in, packed, inline
        while True:
            sent_in, tag, packed, inline = self._read_frame(peer, message.name)
            if isinstance(packed, Failure):
                if sent_in >= self._pass:
                    raise PipelineError(f"rank {peer} could not send {message.name}, it failed:\n{packed.text}")
            elif tag == message.tag:
                return sent_in, packed, inline
            else:
                early.append((sent_in, tag, packed, inline))
                if tag == REPORT.tag and sent_in == self._pass:
                    raise UnexpectedReport

    def _read_frame(self, peer: int, name: str) -> tuple[int, int, Any, torch.Tensor]:
        begin = time.monotonic()
        try:
            work, frame = self._posted.pop(peer) if peer in self._posted else self._post(peer)
            work.wait(self._patience(peer))
        except RuntimeError as error:
            raise self._failure(name, peer, error, waited=time.monotonic() - begin) from error
        end, header = frame[:_LENGTHS].view(torch.int64).tolist()
        self._size(peer, end, received=True)
        if end > len(frame):
            rest = torch.empty(end - len(frame), dtype=torch.uint8)
            self._wait(rest, peer, self._control, _OF_FRAMES, name)
            frame = torch.cat([frame, rest])
        self._post_ahead(peer)
        header += _LENGTHS
        return *pickle.loads(frame[_LENGTHS:header].numpy().tobytes()), frame[_aligned(header) : end]

    def _post(self, peer: int) -> tuple[Any, torch.Tensor]:
        frame = torch.empty(self._sizes.get((peer, True), _FRAME), dtype=torch.uint8)
        return dist.irecv(frame, peer, group=self._control, tag=_OF_FRAMES), frame

    def _post_ahead(self, peer: int) -> None:
        if self._ahead and peer not in self._posted:
            with contextlib.suppress(RuntimeError):  # the receive that waits for the frame raises it
                self._posted[peer] = self._post(peer)

    def _wait(self, tensor: torch.Tensor, peer: int, group: Any, tag: int, name: str) -> None:
        begin = time.monotonic()
        try:
            work: Any = dist.irecv(tensor, peer, group=group, tag=tag)
            work.wait(self._patience(peer))
        except RuntimeError as error:
            raise self._failure(name, peer, error, waited=time.monotonic() - begin) from error

    def _patience(self, peer: int) -> timedelta:
        return timedelta(seconds=self.timeout + GRACE * self._behind(peer))

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

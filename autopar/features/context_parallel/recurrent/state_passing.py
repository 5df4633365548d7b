"""State passing: recurrences and convolutions continue from the states of the previous rank.

The cache of a module holds what later rows need from earlier rows: the state of a recurrence, and the last rows of a
convolution. So each rank runs the module over its local rows, with a cache that holds the states of the previous rank,
and sends the states after its last row to the next rank. A trial has shown that the module then computes the same as
from the full sequence (:mod:`autopar.features.context_parallel.recurrent.plan`).

States go down the axis in the forward pass. Their gradients go up the axis in the backward pass, in the reverse order,
as autograd runs. All messages of a pass go in one direction, so ranks cannot deadlock: a rank sends without waiting,
and earlier ranks may be a few modules ahead. Shapes are sent once per kind of call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from autopar.compat.c10d import in_fake_world
from autopar.compat.tensors import (
    SequenceKey,
    after_backward,
    current_backward,
    keystr,
    tree_flatten,
    tree_unflatten,
)
from autopar.distributed.autograd_functions import named_collective, single_backward
from autopar.distributed.axis import Axis, device_of
from autopar.distributed.collectives import extremes_over, run
from autopar.distributed.gloo_collectives import finish
from autopar.layout import Layout
from autopar.swap import NotCopied, argument_names
from autopar.tensor_tracking import map_tensors

Key = tuple[str, int]
"""The kind of a state, ``conv`` or ``recurrent``, and its number in the module."""
_UNTOUCHED = object()
"""Placeholder for the rows before, for code that only checks whether rows exist."""


@dataclass(frozen=True)
class HandedStates(NotCopied):
    """The states that a module passes to the next rank.

    Attributes:
        argument: Name of the cache argument of its forward.
        spare: Number of unused rows at the front of a convolution's state.
        apart: True if the module uses the rows of a convolution only by concatenating them with new rows. Then they are
            exchanged at this point, and a rank can send its rows before it receives the earlier ones.
        others: Arguments without rows in the dry run.
    """

    argument: str
    spare: int = 0
    apart: bool = False
    others: tuple[str, ...] = ()


class States:
    """A stand-in for the cache in one forward of a module over local rows; ``first``: True without earlier rows."""

    def __init__(self, how: HandedStates, *, first: bool) -> None:
        self.how, self.first = how, first
        self._before: dict[Key, torch.Tensor] = {}

    def before(self, key: Key) -> torch.Tensor:
        """Return the state before the local rows; may be called several times."""
        if key not in self._before:
            self._before[key] = self.take(key)
        return self._before[key]

    def take(self, key: Key) -> torch.Tensor:
        """Return the state before the local rows; called once per key."""
        raise NotImplementedError

    def give(self, key: Key, state: torch.Tensor, through: torch.Tensor | None = None) -> Any:
        """Pass on the state after the last local row; return ``through``, of any shape, which the caller must use."""
        raise NotImplementedError

    # -- the interface of transformers' Cache --------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the rows before the local rows, ``[batch, channels, kernel]``, or None."""
        if self.first:
            return None
        return _UNTOUCHED if self.how.apart else self.before(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state before the local rows, or None."""
        return None if self.first else self.before(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there are earlier rows."""
        return not self.first

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states cannot be rolled back."""
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Return the earlier rows followed by ``conv_states``, ``[batch, channels, rows]``."""
        key, x = ("conv", state_idx), conv_states
        kept = x.shape[-1] if conv_kernel_size is None else conv_kernel_size - self.how.spare
        if kept <= 0:
            return x
        enough = x.shape[-1] >= kept
        if enough and self.how.apart:  # send before receiving, so that no rank waits for the previous one
            x = self.give(key, x[..., -kept:], x)
        full = x if self.first else torch.cat([self.before(key), x], -1)
        if enough and self.how.apart:
            return full
        last = full[..., -kept:] if full.shape[-1] >= kept else pad(full, (kept - full.shape[-1], 0))
        tied = self.give(key, last, full if self.how.apart else None)
        return full if tied is None else tied

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0) -> Any:
        """Pass on the state after the last row, of any shape, and return it."""
        self.give(("recurrent", state_idx), recurrent_states)
        return recurrent_states


def own_arguments(
    module: Any, values: Any, how: HandedStates, inputs: Mapping[str, int], layout: Layout, rank: int
) -> Any:
    """Return ``(args, kwargs)`` with the local rows of all arguments; None if an argument cannot be sharded.

    Args:
        inputs: Path of an argument -> dim of its rows.
    """
    names, missing = argument_names(module), []

    def own(path: Any, x: torch.Tensor) -> Any:
        place, dim = place_of(path, x), inputs.get(place_of(path, x))
        if dim is not None and x.shape[dim] == layout.local_size(rank):
            return x
        if dim is not None and x.shape[dim] == layout.size:
            return layout.shard(x, rank, dim)
        if x.ndim == 2 and x.shape[1] == layout.size and "mask" in argument_of(path, names):  # a padding mask
            return layout.shard(x, rank, 1)
        if place not in how.others:
            missing.append(place)  # such as document boundaries, at which kernels reset states
        return x

    made = map_tensors(own, values)
    return None if missing else made


def with_states(module: Any, values: Any, how: HandedStates, states: States) -> Any:
    """Return ``(args, kwargs)`` with ``states`` as the cache."""
    (args, kwargs), names = values, argument_names(module)
    place = names.index(how.argument)
    if place < len(args):
        return (*args[:place], states, *args[place + 1 :]), kwargs
    return args, {**kwargs, how.argument: states}


def place_of(path: Any, x: torch.Tensor, name: str = "") -> str:
    """Return the name of the tensor at ``path`` in ``(args, kwargs)``, or in the value called ``name``."""
    return f"{name}{keystr(path)} of {x.ndim} dims"


def argument_of(path: Any, names: Sequence[str]) -> str:
    """Return the name of the argument at the start of a path in ``(args, kwargs)``."""
    key = path[1]
    if isinstance(key, SequenceKey):
        return names[key.idx] if key.idx < len(names) else ""
    return str(key.key)


_KINDS = ("conv", "recurrent")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_HEADER = 16  # numbers in a header: kind and number of the state, dtype, shape


class _Message(NamedTuple):
    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype


_TAGS = 1 << 16
_BEGUN: Counter[tuple[int, ...]] = Counter()  # ranks -> number of forwards of all models, known to this rank
_AHEAD = 16  # sent messages without confirmation; with more of them a rank waits for the oldest


class Neighbours:
    """Send tensors to and receive tensors from the neighboring ranks on an axis, in order.

    Attributes:
        given: Kind of call of a module -> its messages to the next rank.
        taken: Kind of call of a module -> its messages from the previous rank.
        failed: True if the last forward failed on this rank, perhaps before another rank received all shapes.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis, self.failed = axis, False
        self.given: dict[Any, list[_Message]] = {}
        self.taken: dict[Any, list[_Message]] = {}
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._lost: list[tuple[Any, torch.Tensor]] = []
        self._tag, self._backward = 0, -1

    def begin(self) -> None:
        """Start a forward on every rank; after a failed forward all ranks send shapes again.

        On gloo, the ranks agree on a number of the forward as tag of its messages, so that messages of a failed
        forward are not received. NCCL has no tags.
        """
        self._lost, self._sent = self._sent, []  # keep the tensors, which another rank may still receive
        failed, ranks = int(self.failed), self.axis.ranks
        if device_of(self.axis).type == "cpu":
            (begun, failed), _ = extremes_over(self.axis, [_BEGUN[ranks], failed])
            _BEGUN[ranks] = begun + 1
            self._tag = _BEGUN[ranks] % _TAGS
        if failed:
            self.given.clear()
            self.taken.clear()
        self.failed = False

    def send(self, x: torch.Tensor, step: int) -> None:
        """Send ``x``, of any shape, to the rank ``step`` places along the axis (1 or -1), without waiting.

        The end of a backward pass waits for the messages sent in it, since gloo drops a message whose handle is freed.
        """
        backward = current_backward()
        if backward not in (-1, self._backward):
            after_backward(self.wait_sent)
        self._backward = backward
        run(self._start, self.axis, x.detach().contiguous(), self.axis.ranks[self.axis.rank + step], kept=False)
        self.wait_sent(_AHEAD)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, step: int) -> torch.Tensor:
        """Receive the next tensor from the rank ``step`` places along the axis."""
        x = torch.empty(shape, dtype=dtype, device=device)
        if x.numel():
            run(self._receive, self.axis, x, self.axis.ranks[self.axis.rank + step], kept=False)
        return x

    def wait_sent(self, left: int = 0) -> None:
        """Wait until all but the last ``left`` messages have been received, and free their memory."""
        while len(self._sent) > left:
            run(_finish, self.axis, *self._sent.pop(0), kept=False)

    def _start(self, x: torch.Tensor, peer: int, group: Any) -> None:
        if x.numel():
            self._sent.append((dist.isend(x, peer, group=group, tag=self._tag), x))

    def _receive(self, x: torch.Tensor, peer: int, group: Any) -> None:
        _finish(dist.irecv(x, peer, group=group, tag=self._tag), x, group)


def _finish(work: Any, x: torch.Tensor, group: Any) -> None:
    if x.is_cpu:
        finish(work)
    else:
        work.wait()


class StatesOfRank(States):
    """The states from the previous rank and for the next rank.

    Args:
        path: Path of the module.
        made_of: Tensors that the module computes with, hidden states first. If one of them requires a gradient, the
            states do too.
    """

    def __init__(self, how: HandedStates, links: Neighbours, path: str, made_of: Sequence[torch.Tensor]) -> None:
        super().__init__(how, first=links.axis.rank == 0)
        hidden, self.last, self.neighbours = made_of[0], links.axis.rank == links.axis.size - 1, links
        self.device = hidden.device
        autocast = not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type)
        call = (path, hidden.shape[0], hidden.dtype, autocast)
        self.given, self.taken = links.given.setdefault(call, []), links.taken.setdefault(call, [])
        self.anchors = [x for x in made_of if x.requires_grad] if torch.is_grad_enabled() else []
        self._given = self._taken = 0
        self._early: dict[Key, torch.Tensor] = {}
        self._untied: list[torch.Tensor] = []

    def take(self, key: Key) -> torch.Tensor:
        """Return a state of the previous rank; states that arrive earlier are kept."""
        while key not in self._early:
            if self._taken == len(self.taken):
                header = self.neighbours.receive((_HEADER,), torch.int64, _of_numbers(self.device), -1)
                kind, number, dtype, dims, *shape = header.tolist()
                self.taken.append(_Message((_KINDS[kind], number), tuple(shape[:dims]), _DTYPES[dtype]))
            message = self.taken[self._taken]
            self._taken += 1
            anchors = self.anchors if message.dtype.is_floating_point else []
            take = _Taken.apply if anchors else _receive
            self._early[message.key] = take(self.neighbours, message, self.device, *anchors)
        return self._early.pop(key)

    def give(self, key: Key, state: torch.Tensor, through: torch.Tensor | None = None) -> torch.Tensor | None:
        """Send a state to the next rank; its gradient arrives in the backward of ``through``, or of the module."""
        if self.last or (state.is_meta and not in_fake_world()):
            return through
        message = _Message(key, tuple(state.shape), state.dtype)
        if self._given == len(self.given):
            numbers = [_KINDS.index(key[0]), key[1], _DTYPES.index(state.dtype), state.ndim, *state.shape]
            header = torch.tensor(numbers + [0] * (_HEADER - len(numbers)), device=_of_numbers(self.device))
            self.neighbours.send(header, 1)
            self.given.append(message)
        assert self.given[self._given] == message, f"expected {self.given[self._given]}, got {message}"
        self._given += 1
        self.neighbours.send(state, 1)
        if not state.is_floating_point():  # token ids have no gradient
            return through
        if through is not None:
            return self._tie(through, [state])
        self._untied.append(state)
        return None

    def tie(self, out: Any) -> Any:
        """Return the module's result, whose backward receives the gradients of the passed states."""
        if not self._untied:
            return out
        leaves, structure = tree_flatten(out)
        place = next(at for at, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point())
        leaves[place] = self._tie(leaves[place], self._untied)
        return tree_unflatten(leaves, structure)

    def _tie(self, through: torch.Tensor, states: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self.anchors:
            return through
        return _Given.apply(self.neighbours, len(states), through, *states, *self.anchors)


class _Taken(torch.autograd.Function):
    """Receive a state of the previous rank; send its gradient there."""

    @staticmethod
    @named_collective("receive: state of the rank before")
    def forward(
        ctx: Any, neighbours: Neighbours, message: _Message, device: torch.device, *anchors: Any
    ) -> torch.Tensor:
        ctx.neighbours, ctx.anchors = neighbours, len(anchors)
        return _receive(neighbours, message, device)

    @staticmethod
    @named_collective("send: gradient of the state of the rank before")
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        ctx.neighbours.send(grad, -1)
        return (None,) * (3 + ctx.anchors)


class _Given(torch.autograd.Function):
    """Tie a tensor to the states sent to the next rank; receive their gradients, the last state's first."""

    @staticmethod
    def forward(ctx: Any, neighbours: Neighbours, number: int, through: torch.Tensor, *states: Any) -> torch.Tensor:
        ctx.neighbours, ctx.rest = neighbours, len(states) - number
        ctx.states = [(tuple(x.shape), x.dtype, x.device) for x in states[:number]]
        ctx.save_for_backward(through.new_empty(0))
        return through.view_as(through)

    @staticmethod
    @named_collective("receive: gradients of states of the next rank")
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (_,) = ctx.saved_tensors  # reading may recompute a block, for whose states the next rank waits
        received = [ctx.neighbours.receive(*state, 1) for state in reversed(ctx.states)]
        return (None, None, grad, *reversed(received), *(None,) * ctx.rest)


def _receive(neighbours: Neighbours, message: _Message, device: torch.device) -> torch.Tensor:
    return neighbours.receive(message.shape, message.dtype, device, -1)


def _of_numbers(device: torch.device) -> torch.device:
    """Return the device of headers; the CPU in a rehearsal, where tensors have no memory."""
    return torch.device("cpu") if device.type == "meta" else device

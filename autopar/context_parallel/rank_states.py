"""States of a module as they go from rank to rank, and their gradients back.

States go down the axis in the forward, their gradients up in the backward, message by message in one order: autograd
runs what it has recorded in the reverse order. A rank waits for nobody on the other side, so the ranks in front may be
some modules ahead. Shapes travel along once for each kind of call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autopar.context_parallel.handed_states import HandedStates, Key, States
from autopar.distributed.autograd_functions import named_collective, single_backward
from autopar.distributed.axis import Axis
from autopar.distributed.neighbours import Neighbours
from autopar.foreign.c10d import in_fake_world
from autopar.foreign.tensors import tree_flatten, tree_unflatten

_KINDS = ("conv", "recurrent")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_HEADER = 16  # numbers: which state, its dtype, its dims


class _Message(NamedTuple):
    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype


class Links:
    """The ranks before and behind on an axis, and what modules have sent them."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.neighbours = axis, Neighbours(axis)
        self.given: dict[Any, list[_Message]] = {}
        self.taken: dict[Any, list[_Message]] = {}

        self.failed = False  # the last forward, on this rank: perhaps before another was told of some shapes

    def begin(self) -> None:
        """Begin a forward, on every rank; after one that failed on any of them all tell shapes anew."""
        if self.neighbours.begin(self.failed):
            self.given.clear()
            self.taken.clear()
        self.failed = False


class StatesOfRank(States):
    """States from the rank before, and for the rank behind.

    Args:
        path: of the module.
        made_of: what it computes with, the hidden states first: if one needs a gradient, so do the states.
    """

    def __init__(self, how: HandedStates, links: Links, path: str, made_of: Sequence[torch.Tensor]) -> None:
        super().__init__(how, first=links.axis.rank == 0)
        hidden, self.last, self.neighbours = made_of[0], links.axis.rank == links.axis.size - 1, links.neighbours
        self.device = hidden.device
        call = (
            path,
            hidden.shape[0],
            hidden.dtype,
            not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type),
        )
        self.given, self.taken = links.given.setdefault(call, []), links.taken.setdefault(call, [])
        self.anchors = [x for x in made_of if x.requires_grad] if torch.is_grad_enabled() else []
        self._given = self._taken = 0
        self._early: dict[Key, torch.Tensor] = {}
        self._untied: list[torch.Tensor] = []

    def take(self, key: Key) -> torch.Tensor:
        """Return the state of the rank before; messages in front of it are kept."""
        while key not in self._early:
            if self._taken == len(self.taken):
                self.taken.append(_receive_header(self.neighbours, self.device))
            message = self.taken[self._taken]
            self._taken += 1
            anchors = self.anchors if message.dtype.is_floating_point else []
            take = _Taken.apply if anchors else _receive
            self._early[message.key] = take(self.neighbours, message, self.device, *anchors)
        return self._early.pop(key)

    def give(self, key: Key, state: torch.Tensor, through: torch.Tensor | None = None) -> torch.Tensor | None:
        """Send a state to the rank behind; its gradient comes in the backward of what is returned, or of the module."""
        if self.last or (state.is_meta and not in_fake_world()):
            return through
        message = _Message(key, tuple(state.shape), state.dtype)
        if self._given == len(self.given):
            _send_header(self.neighbours, message, self.device)
            self.given.append(message)
        assert self.given[self._given] == message, f"{message} is handed on, {self.given[self._given]} was before"
        self._given += 1
        self.neighbours.send(state, 1)
        if not state.is_floating_point():  # ids of tokens
            return through
        if through is not None:
            return self._tie(through, [state])
        self._untied.append(state)
        return None

    def behind(self, out: Any) -> Any:
        """Return what the module returns, behind which the gradients of its states come."""
        if not self._untied:
            return out
        leaves, structure = tree_flatten(out)
        place = next(at for at, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point())
        leaves[place] = self._tie(leaves[place], self._untied)
        return tree_unflatten(leaves, structure)

    def _tie(self, through: torch.Tensor, states: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self.anchors:
            return through
        tied: torch.Tensor = _Given.apply(self.neighbours, len(states), through, *states, *self.anchors)
        return tied


class _Taken(torch.autograd.Function):
    """A state of the rank before; its gradient is sent there."""

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
    """Tensors beside the states that the next rank got, ``[...]``; gradients are received, the last state's first."""

    @staticmethod
    def forward(ctx: Any, neighbours: Neighbours, number: int, through: torch.Tensor, *states: Any) -> torch.Tensor:
        ctx.neighbours, ctx.rest = neighbours, len(states) - number
        ctx.states = [(tuple(x.shape), x.dtype, x.device) for x in states[:number]]
        ctx.save_for_backward(through.new_empty(0))
        return through.view_as(through)

    @staticmethod
    @named_collective("receive: gradients of states of the rank behind")
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (_,) = ctx.saved_tensors  # read first: it recomputes a block, and a rank behind waits for its states
        received = [ctx.neighbours.receive(*state, 1) for state in reversed(ctx.states)]
        return (None, None, grad, *reversed(received), *(None,) * ctx.rest)


def _receive(neighbours: Neighbours, message: _Message, device: torch.device) -> torch.Tensor:
    return neighbours.receive(message.shape, message.dtype, device, -1)


def _send_header(neighbours: Neighbours, message: _Message, device: torch.device) -> None:
    kind, number = message.key
    numbers = [_KINDS.index(kind), number, _DTYPES.index(message.dtype), len(message.shape), *message.shape]
    neighbours.send(torch.tensor(numbers + [0] * (_HEADER - len(numbers)), device=_of_numbers(device)), 1)


def _receive_header(neighbours: Neighbours, device: torch.device) -> _Message:
    header = neighbours.receive((_HEADER,), torch.int64, _of_numbers(device), -1)
    kind, number, dtype, dims, *shape = header.tolist()
    return _Message((_KINDS[kind], number), tuple(shape[:dims]), _DTYPES[dtype])


def _of_numbers(device: torch.device) -> torch.device:
    """Return where numbers travel beside tensors on ``device``: in a rehearsal these have no memory."""
    return torch.device("cpu") if device.type == "meta" else device

"""Messages between neighbours on an axis: to the rank behind or the one in front, in the order in which they are sent.

Messages that go one way along an axis make no ring, so no two ranks wait for each other: a rank sends without waiting,
and a receive waits for nothing but the ranks on that side.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from autopar.compat.tensors import after_backward, current_backward
from autopar.distributed.axis import Axis, device_of
from autopar.distributed.collectives import run
from autopar.distributed.gloo_collectives import all_gather_into_tensor, finish

_TAGS = 1 << 16
_BEGUN: Counter[tuple[int, ...]] = Counter()  # passes of all models over these ranks, as far as this one knows
_AHEAD = 16  # messages that a rank has sent and does not know received; then it waits for the oldest


class Neighbours:
    """Sends to and receives from the ranks beside this one."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._lost: list[tuple[Any, torch.Tensor]] = []
        self._tag, self._backward = 0, -1

    def begin(self, forgets: bool) -> bool:
        """Begin a pass, on every rank: on gloo what a failed one has left is not taken for this one's.

        The ranks agree on its number, since one may have begun passes that others have not: an error came before.

        Returns:
            Whether any rank ``forgets`` what messages told before; on nccl, which knows no tags, this one's answer.
        """
        self._lost, self._sent = self._sent, []  # somebody may still ask for it
        if device_of(self.axis).type != "cpu":
            return forgets
        ranks, everyone = self.axis.ranks, torch.empty(2 * self.axis.size, dtype=torch.int64)
        run(all_gather_into_tensor, self.axis, everyone, torch.tensor([_BEGUN[ranks], forgets]), kept=False)
        begun, forgetting = everyone.view(-1, 2).amax(0).tolist()
        _BEGUN[ranks] = begun + 1
        self._tag = _BEGUN[ranks] % _TAGS
        return bool(forgetting)

    def send(self, x: torch.Tensor, step: int) -> None:
        """Send ``x``, of any shape, ``step`` places along the axis, 1 or -1; returns at once.

        A message sent in a backward has been received when the backward ends: gloo gives up a message whose sender
        forgets it.
        """
        backward = current_backward()
        if backward not in (-1, self._backward):
            after_backward(self.wait_sent)
        self._backward = backward
        run(self._start, self.axis, x.detach().contiguous(), self.axis.ranks[self.axis.rank + step], kept=False)
        if len(self._sent) > _AHEAD:
            self._wait(1)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, step: int) -> torch.Tensor:
        """Receive the next tensor from the rank ``step`` places along the axis."""
        x = torch.empty(shape, dtype=dtype, device=device)
        if x.numel():
            run(self._receive, self.axis, x, self.axis.ranks[self.axis.rank + step], kept=False)
        return x

    def wait_sent(self) -> None:
        """Wait until everything that was sent has been received: its memory is free then."""
        self._wait(len(self._sent))

    def _start(self, x: torch.Tensor, peer: int, group: Any) -> None:
        if x.numel():
            self._sent.append((dist.isend(x, peer, group=group, tag=self._tag), x))

    def _receive(self, x: torch.Tensor, peer: int, group: Any) -> None:
        _finish(dist.irecv(x, peer, group=group, tag=self._tag), x, group)

    def _wait(self, number: int) -> None:
        for _ in range(number):
            run(_finish, self.axis, *self._sent.pop(0), kept=False)


def _finish(work: Any, x: torch.Tensor, group: Any) -> None:
    if x.is_cpu:
        finish(work)
    else:
        work.wait()

"""Turns of the ranks of a tensor-parallel group in continuous batching: the numbers exchanged before each step.

transformers asks one object (``DistributedHelper``) for everything that must be identical on the ranks. Here each
question is a turn: one all-reduce of a few numbers over a gloo group, the same for every question. A rank that fails
between two questions takes part in the next question of the other ranks, which learn it. As in transformers, the
requests are those that the group's first rank was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers.generation.continuous_batching.distributed import DistributedHelper

from autopar.compat.c10d import backends_of, default_group, set_timeout
from autopar.distributed.axis import Axis
from autopar.distributed.digest import number_groups_alike, of_text
from autopar.distributed.failures import FailureLog
from autopar.errors import ConsistencyError, PipelineError

_FLUSH, _HARD = 1, 2  # how soon a rank wants to stop, in transformers' numbers
_LONG = 365 * 24 * 3600.0
_NONE = -(2**62)  # less than any number of a rank
_NUMBERS = 7  # of a turn: failed, payload, stop, -stop, pause, digest, -digest

Progress = dict[str, tuple[int, int]]
"""Id of a request that runs -> the number of its tokens, and the last one."""


class RankTurns(DistributedHelper):
    """transformers' helper over the ranks of a tensor-parallel axis. Collective over the axis.

    Args:
        seconds: Limit of a turn; None waits forever.
        progress: Function that returns the requests that run.
        own_error: Function that returns the error that ended this rank's loop; None while the loop runs.
    """

    def __init__(
        self,
        failures: FailureLog,
        seconds: float | None,
        progress: Callable[[], Progress],
        own_error: Callable[[], BaseException | None],
    ) -> None:
        super().__init__(None, seconds)
        self.failures, self.axis, self._over = failures, failures.mpu.tp, False
        self.tp_size, self.tp_group, self.tp_local_rank = self.axis.size, self.axis.group, self.axis.rank
        self.tp_root_global_rank, self.is_tp_driver = self.axis.ranks[0], self.axis.rank == 0
        self.dp_rank, self.dp_size = self.global_rank // self.tp_size, self.world_size // self.tp_size
        world = default_group()
        for key in [key for key in _groups if key[0] is not world]:
            del _groups[key]  # of a world that was destroyed
        self._groups = _groups.setdefault((world, self.axis.ranks), _Groups())
        self._place = self._groups.borrow(self.axis)
        self.cpu_comm_group = self._groups.made[self._place]
        for backend in backends_of(self.cpu_comm_group):
            set_timeout(backend, timedelta(seconds=_LONG if seconds is None else seconds))
        self.progress, self.own_error = progress, own_error
        self.asked_to_stop = 0  # turns of a session in which all ranks did

    def destroy_cpu_comm_group(self) -> None:
        """Return the group to the idle ones, unless a turn failed on it."""
        group, self.cpu_comm_group = self.cpu_comm_group, None
        if group is not None and not self._over:
            self._groups.idle.add(self._place)

    def __del__(self) -> None:
        if vars(self).get("cpu_comm_group") is not None:
            self.destroy_cpu_comm_group()

    def tp_all_reduce_state(
        self, payload_size: int, stop_status: int, pause_requested: int = 0
    ) -> tuple[int, int, int]:
        """Agree on whether there are requests, and whether to stop and to pause.

        A rank stops when all want to, in two consecutive turns: earlier requests are seen by then. Hard stops and
        pauses of any rank count.
        """
        if self._over:
            return 0, _HARD, 0
        error = self.own_error()
        if error is not None:
            payload_size, stop_status = 0, _HARD
        digest = of_text(repr(sorted(self.progress().items())))
        stop = min(stop_status, _HARD)
        told = self._turn([error is not None, payload_size, stop, -stop, pause_requested, digest, -digest], error)
        if told[5] != -told[6] and told[2] < _HARD:
            self._over = True
            raise self._apart()
        self.asked_to_stop = self.asked_to_stop + 1 if -told[3] >= _FLUSH else 0
        status = _HARD if told[2] >= _HARD else _FLUSH if self.asked_to_stop > 1 else 0
        return told[1], status, told[4]

    def tp_all_reduce_min(self, value: torch.Tensor, on_cpu: bool = False) -> torch.Tensor:
        """Overwrite ``value``, up to four integers, by the minimum over the ranks."""
        numbers = value.reshape(-1).tolist()
        told = self._turn([0, *(-int(number) for number in numbers)])
        smallest = torch.tensor([-number for number in told[1 : 1 + len(numbers)]])
        return value.copy_(smallest.view(value.shape))

    def tp_broadcast_from_rank_0(self, value: torch.Tensor) -> torch.Tensor:
        """Overwrite ``value``, one number, by the first rank's."""
        return value.fill_(self._turn([0, int(value.item()) if self.is_tp_driver else _NONE])[1])

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """Return the first rank's requests and cancellations."""
        self._turn([0])
        return super().tp_broadcast_object_from_rank_0(obj)

    def fail(self, error: BaseException) -> None:
        """Take part in the next turn of the other ranks, and let it fail there."""
        if not self._over:
            with contextlib.suppress(PipelineError):
                self._turn([1], error)

    def _turn(self, numbers: list[Any], error: BaseException | None = None) -> list[int]:
        """Return the largest of each number over the ranks, ``[_NUMBERS]``.

        Raises:
            PipelineError: another rank has failed, or did not come.
        """
        if error is not None:
            self.failures.publish_error(error)
        told = torch.tensor([*map(int, numbers), *[0] * (_NUMBERS - len(numbers))])
        told[0] *= self.axis.rank + 1
        try:
            with self.failures.blame("a turn of continuous batching", self.axis.ranks):
                dist.all_reduce(told, dist.ReduceOp.MAX, group=self.cpu_comm_group)
        except Exception:
            self._over = True
            raise
        failed = int(told[0])
        if failed:
            self._over = True
            text = [f"{type(error).__name__}: {error}"]
            dist.broadcast_object_list(text, self.axis.ranks[failed - 1], group=self.cpu_comm_group)
            if error is None:
                said = text[0].replace("\n", "\n    ")
                rank = self.axis.ranks[failed - 1]
                raise PipelineError(
                    f"continuous batching has ended on all ranks: rank {rank} failed.\n  rank {rank} said: {said}"
                )
        return [int(number) for number in told.tolist()]

    def _apart(self) -> ConsistencyError:
        """Return the error of ranks whose requests have different tokens. Collective."""
        everyone: list[Any] = [None] * self.axis.size
        dist.all_gather_object(everyone, self.progress(), group=self.cpu_comm_group)
        for name in sorted({name for running in everyone for name in running}):
            held = [_said(running.get(name)) for running in everyone]
            if len(set(held)) > 1:
                shown = " and ".join(f"{text} on rank {rank}" for rank, text in zip(self.axis.ranks, held, strict=True))
                return ConsistencyError(
                    f"continuous batching: the ranks chose different tokens. Request {name} has {shown}.\n"
                    "  While requests run, draw from torch's generators on all ranks or on none, and let logits "
                    "processors look at\n  nothing that differs between ranks."
                )
        return ConsistencyError("continuous batching: the ranks chose different tokens.")


class _Groups:
    """gloo groups over some ranks, each for one manager at a time. They are kept until the process ends.

    torch would give a second group the name of the first, and its ranks might read the addresses of the first.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.idle: set[int] = set()  # indices of ``made``

    def borrow(self, axis: Axis) -> int:
        """Return the index of a group that is idle on all ranks, or make one. Collective over the axis alone."""
        everyone: list[Any] = [self.idle] * axis.size
        dist.all_gather_object(everyone, self.idle, group=axis.group)
        idle = set.intersection(*everyone)
        if not idle:
            alone = axis.size < dist.get_world_size()
            number_groups_alike(axis.group)
            self.made.append(dist.new_group(axis.ranks, backend="gloo", use_local_synchronization=alone))
            return len(self.made) - 1
        self.idle.discard(min(idle))
        return min(idle)


_groups: dict[tuple[Any, tuple[int, ...]], _Groups] = {}  # by the default group and the ranks


def _said(progress: tuple[int, int] | None) -> str:
    return "no token" if progress is None else f"{progress[0]} tokens, the last {progress[1]},"

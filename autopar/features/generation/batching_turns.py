"""Turns of the tensor-parallel ranks in continuous batching: exchange a few numbers before each step.

transformers calls one object (``DistributedHelper``) for all values that must be identical on the ranks. Each call is a
turn here: one all-reduce of a few numbers over a gloo group, with the same layout for every call. A rank that fails
between two calls joins the next turn, so that the other ranks fail too. As in transformers, the requests of the group's
first rank count.
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
from autopar.distributed.collectives import gathered
from autopar.distributed.digest import number_groups_alike, of_text
from autopar.distributed.failures import FailureLog
from autopar.errors import ConsistencyError, PipelineError

_FLUSH, _HARD = 1, 2  # transformers' codes: stop after the running requests, stop at once
_LONG = 365 * 24 * 3600.0
_NONE = -(2**62)  # less than any number of a rank
_NUMBERS = 7  # numbers per turn: failed, payload, stop, -stop, pause, digest, -digest

Progress = dict[str, tuple[int, int]]
"""Id of a running request -> number of its tokens, and the last token."""


class RankTurns(DistributedHelper):
    """transformers' helper over the ranks of a tensor-parallel axis. Its methods are collectives of the axis.

    Args:
        failures: Log in which ranks publish their errors.
        seconds: Time limit of a turn; None waits forever.
        progress: Function that returns the running requests.
        own_error: Function that returns the error that ended this rank's loop, or None while the loop runs.
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
        self.tp_size, self.tp_group, self.tp_local_rank = self.axis.size, self.axis.group, self.axis.rank  # type: ignore[assignment]
        self.tp_root_global_rank, self.is_tp_driver = self.axis.ranks[0], self.axis.rank == 0
        self.dp_rank, self.dp_size = self.global_rank // self.tp_size, self.world_size // self.tp_size
        world = default_group()
        for key in [key for key in _groups if key[0] is not world]:
            del _groups[key]  # a destroyed world
        self._groups = _groups.setdefault((world, self.axis.ranks), _Groups())
        self._place = self._groups.borrow(self.axis)
        self.cpu_comm_group = self._groups.made[self._place]
        for backend in backends_of(self.cpu_comm_group):
            set_timeout(backend, timedelta(seconds=_LONG if seconds is None else seconds))
        self.progress, self.own_error = progress, own_error
        self.asked_to_stop = 0  # consecutive turns of a session in which all ranks wanted to stop

    def destroy_cpu_comm_group(self) -> None:
        """Mark the group as idle, unless a turn failed on it."""
        group, self.cpu_comm_group = self.cpu_comm_group, None
        if group is not None and not self._over:
            self._groups.idle.add(self._place)

    def __del__(self) -> None:
        if vars(self).get("cpu_comm_group") is not None:
            self.destroy_cpu_comm_group()

    def tp_all_reduce_state(
        self, payload_size: int, stop_status: int, pause_requested: int = 0
    ) -> tuple[int, int, int]:
        """Agree on whether there are requests, and whether to stop or pause.

        Ranks stop when all ranks want to in two consecutive turns, so that earlier requests are still processed. A hard
        stop or a pause of one rank applies to all.
        """
        if self._over:
            return 0, _HARD, 0
        error = self.own_error()
        if error is not None:
            payload_size, stop_status = 0, _HARD
        digest = of_text(repr(sorted(self.progress().items())))
        stop = min(stop_status, _HARD)
        found = self._turn([error is not None, payload_size, stop, -stop, pause_requested, digest, -digest], error)
        if found[5] != -found[6] and found[2] < _HARD:
            self._over = True
            raise self._apart()
        self.asked_to_stop = self.asked_to_stop + 1 if -found[3] >= _FLUSH else 0
        status = _HARD if found[2] >= _HARD else _FLUSH if self.asked_to_stop > 1 else 0
        return found[1], status, found[4]

    def tp_all_reduce_min(self, value: torch.Tensor, on_cpu: bool = False) -> torch.Tensor:
        """Overwrite ``value``, up to four integers, with the minimum over the ranks."""
        numbers = value.reshape(-1).tolist()
        found = self._turn([0, *(-int(number) for number in numbers)])
        smallest = torch.tensor([-number for number in found[1 : 1 + len(numbers)]])
        return value.copy_(smallest.view(value.shape))

    def tp_broadcast_from_rank_0(self, value: torch.Tensor) -> torch.Tensor:
        """Overwrite ``value``, one number, with the value of the first rank."""
        return value.fill_(self._turn([0, int(value.item()) if self.is_tp_driver else _NONE])[1])

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """Return the requests and cancellations of the first rank."""
        self._turn([0])
        return super().tp_broadcast_object_from_rank_0(obj)

    def fail(self, error: BaseException) -> None:
        """Join the next turn of the other ranks, and make it fail there."""
        if not self._over:
            with contextlib.suppress(PipelineError):
                self._turn([1], error)

    def _turn(self, numbers: list[Any], error: BaseException | None = None) -> list[int]:
        """Return the maximum of each number over the ranks, ``[_NUMBERS]``.

        Raises:
            PipelineError: Another rank failed or timed out.
        """
        if error is not None:
            self.failures.publish_error(error)
        largest = torch.tensor([*map(int, numbers), *[0] * (_NUMBERS - len(numbers))])
        largest[0] *= self.axis.rank + 1
        try:
            with self.failures.blame("a turn of continuous batching", self.axis.ranks):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.cpu_comm_group)
        except Exception:
            self._over = True
            raise
        failed = int(largest[0])
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
        return [int(number) for number in largest.tolist()]

    def _apart(self) -> ConsistencyError:
        """Return the error for ranks whose requests have different tokens. A collective of the axis."""
        everyone = gathered(self.progress(), self.cpu_comm_group)
        found = {name: [running.get(name) for running in everyone] for running in everyone for name in running}
        name, held = next((pair for pair in sorted(found.items()) if len({*pair[1]}) > 1), ("", []))
        return ConsistencyError(
            "continuous batching: the ranks chose different tokens. On the ranks "
            f"{list(self.axis.ranks)} request {name} has these numbers of tokens and last tokens: {held}\n"
            "  While requests run, draw from torch's generators on all ranks or on none. Logits processors must use "
            "only\n  values that are identical on all ranks."
        )


class _Groups:
    """gloo groups over some ranks, each used by one manager at a time, and kept until the process ends.

    They are reused, because torch would give a second group the name of the first, and ranks might then read the
    addresses of the first group.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.idle: set[int] = set()  # indices of ``made``

    def borrow(self, axis: Axis) -> int:
        """Return the index of a group that is idle on all ranks, or make one. A collective of the axis."""
        idle = set.intersection(*gathered(self.idle, axis.group))
        if not idle:
            alone = axis.size < dist.get_world_size()
            number_groups_alike(axis.group)
            self.made.append(dist.new_group(axis.ranks, backend="gloo", use_local_synchronization=alone))
            return len(self.made) - 1
        self.idle.discard(min(idle))
        return min(idle)


_groups: dict[tuple[Any, tuple[int, ...]], _Groups] = {}  # by the default group and the ranks

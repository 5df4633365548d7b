"""Turns of the ranks of a tensor-parallel group in continuous batching: what they tell each other before each step.

transformers asks one object (``DistributedHelper``) about all that must be alike on the ranks. Here each question is a
turn: one all-reduce of a few numbers over a gloo group of its own, the same for every question. So a rank that fails
between two questions takes part in whatever the others ask next, and they learn it.

The requests are those of the group's first rank. Where another rank was given some too, they are compared by their ids.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import OrderedDict
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
_KEPT = 10_000  # requests of the first rank that may still be given to another one
_LONG = 365 * 24 * 3600.0
_NONE = -(2**62)  # less than what a rank may tell
_NUMBERS = 7  # of a turn: failed, payload, stop, -stop, pause, digest, -digest

Progress = dict[str, tuple[int, int]]
"""Id of a request that runs -> how many tokens it has, and the last of them."""


class RankTurns(DistributedHelper):
    """transformers' helper over the ranks of a tensor-parallel axis. Collective over the axis.

    Args:
        seconds: that a turn waits for the other ranks; None: for ever.
        progress: returns the requests that run.
        own_error: returns what ended the loop of this rank; None while it goes on.
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
        self._groups = _groups_over(self.axis)
        self._place = self._groups.borrow(self.axis)
        self.cpu_comm_group = self._groups.made[self._place]
        for backend in backends_of(self.cpu_comm_group):
            set_timeout(backend, timedelta(seconds=_LONG if seconds is None else seconds))
        self.progress, self.own_error = progress, own_error
        self.begin()

    def begin(self) -> None:
        """Forget the requests and the stops of the session before."""
        self._asked_to_stop = 0  # turns in which all ranks did
        self._given: dict[str, str] = {}  # to this rank, which is not the first, and not to the first so far
        self._known: OrderedDict[str, str] = OrderedDict()  # to the first rank, and not to this one so far
        self._wrong: ConsistencyError | None = None  # about a request; raised in the next turn

    def destroy_cpu_comm_group(self) -> None:
        """Give the group back; one on which a turn failed is not used again."""
        group, self.cpu_comm_group = self.cpu_comm_group, None
        if group is not None and not self._over:
            self._groups.idle.add(self._place)

    def __del__(self) -> None:
        if vars(self).get("cpu_comm_group") is not None:
            self.destroy_cpu_comm_group()

    # -- what transformers asks ------------------------------------------------------------------------------------

    def are_kv_heads_tp_ed(self) -> bool:
        """Return that the number of heads in the config is this rank's already."""
        return False

    def tp_all_reduce_state(
        self, payload_size: int, stop_status: int, pause_requested: int = 0
    ) -> tuple[int, int, int]:
        """Agree on whether there are requests, and whether to stop and to pause.

        A rank stops when all want to, in two turns running: what a rank was given before is seen by then. Hard stops
        and pauses are those of any rank.
        """
        if self._over:
            return 0, _HARD, 0
        error = self.own_error() or self._wrong
        if error is not None:
            payload_size, stop_status = 0, _HARD
        digest = of_text(repr(sorted(self.progress().items())))
        stop = min(stop_status, _HARD)
        told = self._turn([error is not None, payload_size, stop, -stop, pause_requested, digest, -digest], error)
        if told[5] != -told[6] and told[2] < _HARD:
            self._over = True
            raise self._apart()
        self._asked_to_stop = self._asked_to_stop + 1 if -told[3] >= _FLUSH else 0
        status = _HARD if told[2] >= _HARD else _FLUSH if self._asked_to_stop > 1 else 0
        return told[1], status, told[4]

    def tp_all_reduce_min(self, value: torch.Tensor, on_cpu: bool = False) -> torch.Tensor:
        """Overwrite ``value``, up to four whole numbers, by the smallest of the ranks."""
        numbers = value.reshape(-1).tolist()
        told = self._turn([0, *(-int(number) for number in numbers)])
        smallest = torch.tensor([-number for number in told[1 : 1 + len(numbers)]])
        return value.copy_(smallest.view(value.shape))

    def tp_broadcast_from_rank_0(self, value: torch.Tensor) -> torch.Tensor:
        """Overwrite ``value``, one number, by that of the first rank."""
        return value.fill_(self._turn([0, int(value.item()) if self.is_tp_driver else _NONE])[1])

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """Return the first rank's requests and cancellations; those of this rank are compared with them."""
        data = pickle.dumps(obj) if self.is_tp_driver else b""
        size = self._turn([0, len(data)])[1]
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(sent, self.tp_root_global_rank, group=self.cpu_comm_group)
        if self.is_tp_driver:
            return obj
        received = pickle.loads(sent.numpy().tobytes())
        self._compare(obj[0], received[0])
        return received

    # -- turns -----------------------------------------------------------------------------------------------------

    def alike(self, what: str, value: str) -> None:
        """Check that a value is the same on all ranks. A turn.

        Raises:
            ConsistencyError: on every rank.
        """
        digest = of_text(value)
        told = self._turn([0, digest, -digest])
        if told[1] != -told[2]:
            texts: list[Any] = [None] * self.axis.size
            dist.all_gather_object(texts, value, group=self.cpu_comm_group)
            lines = [f"  rank {rank}: {text}" for rank, text in zip(self.axis.ranks, texts, strict=True)]
            self._over = True
            raise ConsistencyError(f"continuous batching: {what} differs between the ranks\n" + "\n".join(lines))

    def fail(self, error: BaseException) -> None:
        """Take part in what the other ranks ask next, and let it fail there."""
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
            if self._wrong is not None and error is self._wrong:
                raise self._wrong
        return [int(number) for number in told.tolist()]

    def _apart(self) -> ConsistencyError:
        """Return the error of ranks whose requests have different tokens. Collective."""
        everyone: list[Any] = [None] * self.axis.size
        dist.all_gather_object(everyone, self.progress(), group=self.cpu_comm_group)
        first = everyone[0]
        for rank, other in zip(self.axis.ranks, everyone, strict=True):
            for name in sorted({*first, *other}):
                mine, its = first.get(name), other.get(name)
                if mine != its:
                    here, there = (_said(of) for of in (mine, its))
                    return ConsistencyError(
                        f"continuous batching: the ranks chose different tokens. Request {name} has {here} on rank "
                        f"{self.axis.ranks[0]} and {there} on rank {rank}.\n  While requests run, draw from torch's "
                        "generators on all ranks or on none, and let logits processors look at\n  nothing that differs "
                        "between ranks."
                    )
        return ConsistencyError("continuous batching: the ranks chose different tokens.")

    # -- requests --------------------------------------------------------------------------------------------------

    def _compare(self, own: list[Any], decided: list[Any]) -> None:
        """Compare requests that this rank was given with those of the first one, as far as both have them."""
        self._given |= {state.request_id: _content(state) for state in own}
        for state in decided:
            self._known[state.request_id] = _content(state)
        for name in [name for name in self._given if name in self._known]:
            mine, its = self._given.pop(name), self._known.pop(name)
            if mine != its and self._wrong is None:
                first = self.axis.ranks[0]
                self._wrong = ConsistencyError(
                    f"continuous batching: the ranks were given different requests under one id. {name} is {its} on "
                    f"rank {first} and {mine} on rank {self.axis.ranks[self.axis.rank]}.\n"
                    "  Give all ranks of a replica the same requests in the same order, or each request a request_id "
                    f"of its own,\n  or give requests to rank {first} alone: the others compute them with it, and get "
                    "the results, too."
                )
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def left_over(self) -> ConsistencyError | None:
        """Return the error of requests that this rank was given and the first one was not."""
        if self._over or not self._given:
            return None
        names = ", ".join(list(self._given)[:5])
        return ConsistencyError(
            f"continuous batching: requests never ran, as the first rank of the group was not given them: {names} of "
            f"rank {self.axis.ranks[self.axis.rank]}, {len(self._given)} in all.\n"
            f"  Give requests to rank {self.axis.ranks[0]}, alone or on all ranks of a replica."
        )


class _Groups:
    """gloo groups over some ranks, for one manager at a time. They are kept until the process ends.

    torch would name a second group as the first, and its ranks might read the address of that.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.idle: set[int] = set()  # places among those

    def borrow(self, axis: Axis) -> int:
        """Return the place of a group that is idle on all ranks, or make one. Collective over the axis alone."""
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


_groups: dict[tuple[int, ...], _Groups] = {}
_world: list[Any] = []  # the default group that they were made in


def _groups_over(axis: Axis) -> _Groups:
    if _world[:1] != [default_group()]:
        _groups.clear()
        _world[:] = [default_group()]
    return _groups.setdefault(axis.ranks, _Groups())


def _content(state: Any) -> str:
    shown = [*map(str, state.initial_tokens[:3]), "..."] if len(state.initial_tokens) > 6 else state.initial_tokens
    tokens = f"[{', '.join(map(str, shown))}]"
    of = f"{len(state.initial_tokens)} tokens {tokens}, max_new_tokens {state.max_new_tokens}"
    return f"{of} ({of_text(repr((state.initial_tokens, state.get_request_config()))):x})"


def _said(progress: tuple[int, int] | None) -> str:
    return "no token" if progress is None else f"{progress[0]} tokens, the last {progress[1]},"

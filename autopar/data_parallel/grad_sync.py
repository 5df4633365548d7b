"""Sum gradients over replicas and over stages that share weights, with bitwise identical results on all ranks.

[Note: gradient buckets] A bucket copies scaled gradients into one buffer, starts an asynchronous all-reduce, and makes
each gradient a view of the buffer, so that nothing is copied back. A large gradient alone is its own buffer. In each
averaging the ranks agree on the parameters with a gradient. These parameters, in the order of a backward, form the
buckets that may start inside the next backward. A bucket starts when its last gradient has arrived and the bucket
before it has started, because all ranks must use the same order. The gradient of a parameter is None during the
all-reduce. A gradient that arrives later, or was not expected, is summed in another bucket at the end, and added.

[Note: one owner] With ``zero.reduce_scatter`` an all-to-all sends each owner its part of a bucket, which it adds in the
order of the ranks. Other ranks' gradients stay None. gloo's own reduce-scatter sends as much as its all-reduce.

[Note: shared memory] On an axis with a transport, buckets start at the end, and are small. A gradient of 128 KiB is its
own buffer. Such a sum waits for the other ranks, so that a start in a backward could wait for a later stage's, and it
uses the core of the backward, so that nothing would overlap.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.tensors import is_view, local_part, shares_memory
from autopar.distributed import gloo_collectives
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import extremes_over, run
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError
from autopar.plan.plan import Plan
from autopar.plan.stages import StagePlan

Alike = Mapping[int, tuple[int, ...]]
"""``id(parameter)`` -> the ranks of ``mpu.shards`` that hold the same shard of it."""
Owners = Mapping[torch.Tensor, int]
"""Parameter -> the only rank of its group that gets its average gradient."""

_AVERAGED = "autopar_averaged"  # attribute of a gradient that its owner has averaged
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_BUCKET = 25 * 1024 * 1024  # bytes; the C library maps and clears memory of more than 32 MiB again for each buffer
_PART = 128 * 1024  # elements that a transport sums at once, and bytes of a gradient that is its own buffer with it
_BROADCAST, _IN_FLIGHT = 8 * 1024 * 1024, 4  # bytes of a broadcast; broadcasts at the same time


def held_alike(model: nn.Module, plan: Plan, mpu: MPU) -> Alike:
    """Return ``id(parameter)`` -> the ranks of ``mpu.shards`` that hold the same shard, for all parameters."""
    rank, size = mpu.shards.rank, mpu.shards.size
    layouts = {name: tensor.layout for tensor in plan.tensors.values() for name in (tensor.name, *tensor.aliases)}

    def holders(name: str) -> tuple[int, ...]:
        if size == 1 or name not in layouts:  # added after initialize: counts as held by this rank only
            return (rank,)
        layout = layouts[name]
        return tuple(r for r in range(size) if layout is None or layout.ranges(r) == layout.ranges(rank))

    return {id(parameter): holders(name) for name, parameter in model.named_parameters()}


def runs_of(lists: list[list[nn.Parameter]], alike: Alike) -> list[list[nn.Parameter]]:
    """Split each list into runs of parameters that the same ranks hold; a run is identical on these ranks.

    An all-reduce over three or more ranks adds in an order that depends on the place in the buffer. With different
    places, ranks that hold the same shard would drift apart by rounding.
    """
    runs: dict[tuple[int, tuple[int, ...]], list[nn.Parameter]] = {}
    for number, parameters in enumerate(lists):
        for parameter in parameters:
            runs.setdefault((number, alike[id(parameter)]), []).append(parameter)
    return list(runs.values())


def buckets(tensors: Sequence[_Tensor], limit: int) -> Iterator[list[_Tensor]]:
    """Split tensors into runs of at most ``limit`` bytes; a tensor of a quarter of that is a run of one."""
    bucket: list[_Tensor] = []
    filled = 0
    for tensor in tensors:
        size = local_part(tensor).nbytes
        if 4 * size >= limit:
            yield [tensor]
            continue
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield bucket


class Bucket:
    """Gradients of one dtype that are summed over a group in one buffer; gradients of another dtype are left out.

    Args:
        parameters: The parameters, in an order that is identical on all ranks of the group.
        owners: The owners of the parameters, of all or of none ([Note: one owner]).
        scale: The factor of the gradients, applied before the sum to avoid an overflow in fp16.
        wide: The dtype of the buffer if it is wider than the gradients; by default the gradients' dtype.
        at_once: Sum at the start, over the axis's transport ([Note: shared memory]).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        owners: Owners,
        axis: Axis,
        scale: float,
        wide: torch.dtype | None = None,
        at_once: bool = False,
    ) -> None:
        self.parameters, self._kept, self._rank = parameters, len(parameters), 0
        self._given: list[int] = []  # with owners: the number of elements to send to each rank
        if parameters[0] in owners:
            self._rank, self._given = axis.rank, [0] * axis.size
            self.parameters = sorted(parameters, key=lambda p: (owners[p] != self._rank, owners[p]))
            self._kept = sum(owners[parameter] == self._rank for parameter in parameters)
            for parameter in self.parameters[self._kept :]:
                self._given[owners[parameter]] += local_part(parameter.detach()).numel()
        self.dtype, self._axis, self._scale, self._at_once = dtype, axis, scale, at_once
        self.missing, self.again = set(parameters), False  # again: an owner has averaged one of the gradients before
        self.is_wide = wide is not None and dtype.itemsize < wide.itemsize
        self._sum = wide if self.is_wide else dtype
        self.sent: list[nn.Parameter] = []  # the parameters that had a gradient when the bucket started
        self._gradients: list[torch.Tensor | None] = []
        self._rows: list[torch.Tensor] = []  # the gradients of this rank's parameters on the other ranks
        self._work: dist.Work | None = None

    @torch.no_grad()
    def start(self) -> Bucket:
        """Take the gradients from their parameters, and start the sum."""
        shards = [local_part(parameter.detach()) for parameter in self.parameters]
        sizes = [shard.numel() for shard in shards]
        self._gradients = [p.grad if p.requires_grad else None for p in self.parameters]
        own, flat = (self._buffer(shards[0], x) for x in (sizes[: self._kept], sizes[self._kept :]))
        self._own, self._parts = own, [*own.split(sizes[: self._kept]), *flat.split(sizes[self._kept :])]
        for place, (parameter, part) in enumerate(zip(self.parameters, self._parts, strict=True)):
            gradient = self._gradients[place]
            if gradient is None or gradient.dtype != self.dtype:
                part.zero_()
                self._gradients[place] = None
                continue
            source = local_part(gradient).reshape(-1)
            if self.is_wide or (self._at_once and source.data_ptr() != part.data_ptr()):
                part.copy_(source)
            if not self._at_once:
                torch.mul(part if self.is_wide else source, self._scale, out=part)
            if self._may_move(gradient):
                gradient.set_(part.view(gradient.shape))
            self.sent.append(parameter)
            self.again |= hasattr(gradient, _AVERAGED)
            parameter.grad = None
        if self._at_once:
            for each in own.split(_PART):  # stays in the processor's cache between the product and the sum
                run(gloo_collectives.all_reduce, self._axis, each.mul_(self._scale))
            return self
        if self._given and sum(sizes):
            due = [own.numel() * (rank != self._rank) for rank in range(len(self._given))]
            rows = own.new_empty(len(due) - 1, own.numel())
            self._rows, received = list(rows), rows.view(-1)
            self._work = dist.all_to_all_single(received, flat, due, self._given, group=self._axis.group, async_op=True)
        elif sum(sizes):
            self._work = dist.all_reduce(own, group=self._axis.group, async_op=True)
        return self

    def _buffer(self, like: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        if len(sizes) == len(self._gradients) == 1:
            gradient = self._gradients[0]
            if gradient is not None and self._may_move(gradient) and not shares_memory(gradient):
                return gradient.view(-1)
        return like.new_empty(sum(sizes), dtype=self._sum)

    def _may_move(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient may become a part of the buffer."""
        foreign = isinstance(gradient, DTensor) or gradient.requires_grad or is_view(gradient)
        return not foreign and gradient.dtype == self.dtype == self._sum and gradient.is_contiguous()

    @torch.no_grad()
    def land(self, *, wait: bool = True) -> None:
        """Add the received gradients and free the sent ones, if they have arrived or ``wait``."""
        if self._work is None or not (wait or self._work.is_completed()):
            return
        _wait(self._work, self._own)
        self._work, rows, self._rows = None, self._rows, []
        del self._parts[self._kept :], self._gradients[self._kept :]
        for row in rows[1 : self._rank]:
            rows[0].add_(row)
        for row in (*rows[:1], *rows[max(self._rank, 1) :]):
            self._own.add_(row)

    @torch.no_grad()
    def finish(self, found: Mapping[nn.Parameter, torch.dtype]) -> None:
        """Wait for the sum, and set the gradients of the parameters in ``found``."""
        self.land()
        for parameter, taken, part in zip(self.parameters[: self._kept], self._gradients, self._parts, strict=True):
            if parameter not in found:
                continue
            gradient = torch.zeros_like(parameter, dtype=self.dtype) if taken is None else taken
            local = local_part(gradient)
            if local.data_ptr() != part.data_ptr():
                local.copy_(part.view(local.shape))
            set_gradient(parameter, gradient if parameter.grad is None else gradient.add_(parameter.grad))
            if self._given:
                setattr(gradient, _AVERAGED, True)


@torch.no_grad()
def sum_gradients(
    runs: list[list[nn.Parameter]],
    axis: Axis,
    scale: float = 1.0,
    names: Mapping[nn.Parameter, str] = MappingProxyType({}),
    dtype: torch.dtype | None = None,
    early: Sequence[Bucket] = (),
    owners: Owners = MappingProxyType({}),
) -> dict[nn.Parameter, torch.dtype]:
    """Scale and all-reduce gradients; return parameter -> dtype for parameters with a gradient on some rank.

    A gradient that is fp32 on some rank becomes fp32 on all ranks. A parameter that is frozen on only some ranks raises
    ConsistencyError on all ranks.

    Args:
        runs: Lists of parameters, identical on all ranks; a buffer holds parameters of one list.
        scale: The factor of the gradients, applied before the sum to avoid an overflow in fp16.
        names: Parameter -> name, for the error.
        dtype: The dtype in which half-precision gradients are scaled and summed; by default their dtype.
        early: The buckets of the group that have started already.
        owners: The owners of parameters whose gradients only one rank gets. Gradients it has averaged before raise.
    """
    parameters = [parameter for run in runs for parameter in run]
    trained = [int(parameter.requires_grad) for parameter in parameters]
    kinds = [  # 0: no gradient; 1: in the parameter's dtype; 2: in fp32 instead
        0 if p.grad is None or not p.requires_grad else 1 + (p.grad.dtype != p.dtype) for p in parameters
    ]
    dtypes = {parameter: bucket.dtype for bucket in early for parameter in bucket.parameters}
    had = {parameter for bucket in early for parameter in bucket.sent}
    sent = [int(parameter in had) for parameter in parameters] if early else []
    again = any(b.again for b in early) or any(hasattr(p.grad, _AVERAGED) for p in parameters if p in owners)
    largest, smallest = extremes_over(axis, [*trained, *kinds, *sent, *([int(again)] if owners else ())])
    count = len(parameters)
    mixed = [p for p, high, low in zip(parameters, largest, smallest, strict=False) if high != low]
    if mixed:
        name = names.get(mixed[0], f"a parameter of shape {list(mixed[0].shape)}")
        raise ConsistencyError(
            f"{name} is frozen (requires_grad=False) on only some of the ranks {list(axis.ranks)} "
            f"({len(mixed)} such parameters).\n"
            "  Freeze and unfreeze the same weights on all data-parallel replicas."
        )
    if owners and largest[-1]:
        raise ConsistencyError(
            "gradients were averaged twice without zero_grad(); expected once per step with zero.reduce_scatter\n"
            "  Average in the last backward of a step. Call zero_grad(set_to_none=True), the default, after the step."
        )
    found = {p: dtypes[p] for p, some in zip(parameters, largest[2 * count :], strict=False) if some}
    late: dict[nn.Parameter, torch.dtype] = {}
    for parameter, kind in zip(parameters, largest[count : 2 * count], strict=True):
        if kind:
            late[parameter] = torch.float32 if kind == 2 else parameter.dtype
            if parameter.grad is not None and parameter.grad.dtype != late[parameter]:
                set_gradient(parameter, parameter.grad.to(late[parameter]))
    started: list[Bucket] = []
    for bucket in _in_buckets(runs, late, owners, axis, scale, dtype):
        started.append(bucket.start())
        if bucket.is_wide or (owners and len(started) == _IN_FLIGHT):
            started.pop(0).finish(late)  # because gradients stay in memory next to the buffer
    both = found | late
    for bucket in (*started, *early):
        bucket.finish(both)
    return both


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set the gradient of a parameter; the dtypes may differ."""
    parameter.grad = None
    if parameter.grad_dtype not in (None, gradient.dtype):
        parameter.grad_dtype = None
    parameter.grad = gradient


def _in_buckets(
    runs: list[list[nn.Parameter]],
    dtypes: Mapping[nn.Parameter, torch.dtype],
    owners: Owners,
    axis: Axis,
    scale: float,
    wide: torch.dtype | None,
) -> Iterator[Bucket]:
    """Yield buckets of the parameters in ``dtypes``, last parameters of each run first."""
    at_once = axis.transport is not None and not owners
    limit = 4 * _PART if at_once else _BUCKET
    for parameters in runs:
        kinds = {p: (dtypes[p], p in owners) for p in reversed(parameters) if p in dtypes}
        for kind in dict.fromkeys(reversed(kinds.values())):
            for bucket in buckets([p for p, its in kinds.items() if its == kind], limit):
                yield Bucket(bucket, kind[0], owners, axis, scale, wide, at_once)


def broadcast(tensors: Sequence[tuple[torch.Tensor, int]], axis: Axis) -> None:
    """Broadcast each tensor in place from its paired rank of the axis, several buckets at once."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor, source in tensors:
        kinds.setdefault((source, tensor.dtype, tensor.device), []).append(tensor)
    rows = [[(source, bucket) for bucket in buckets(same, _BROADCAST)] for (source, *_), same in kinds.items()]
    if axis.transport is not None:
        for tensor, source in tensors:
            flat = tensor.reshape(-1)
            run(gloo_collectives.broadcast, axis, flat, axis.ranks[source])
            _land(None, flat, [tensor])
        return
    travelling: deque[tuple[Any, torch.Tensor, list[torch.Tensor]]] = deque()
    for source, bucket in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*rows))):
        if len(travelling) == _IN_FLIGHT:
            _land(*travelling.popleft())
        flat = bucket[0].reshape(-1)
        if len(bucket) > 1:
            size = sum(tensor.numel() for tensor in bucket)
            flat = torch.cat([t.reshape(-1) for t in bucket]) if source == axis.rank else flat.new_empty(size)
        travelling.append((dist.broadcast(flat, axis.ranks[source], axis.group, async_op=True), flat, bucket))
    for each in travelling:
        _land(*each)


def _wait(work: Any, x: torch.Tensor) -> None:
    if work is not None:  # on an accelerator the stream waits, not the host
        gloo_collectives.finish(work) if x.is_cpu else work.wait()


def _land(work: Any, flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    _wait(work, flat)
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        if tensor.data_ptr() != part.data_ptr():
            tensor.copy_(part.view(tensor.shape))


class ReplicaGradients:
    """Average a model's gradients over its data-parallel replicas, after a backward or during one.

    Context-parallel ranks are included; each contributes cp times its gradient. DTensors are left out, because FSDP2
    averages them. Ranks of a replica that hold the same gradient get bitwise identical results.
    """

    def __init__(self, plan: Plan, stages: StagePlan, mpu: MPU, failures: FailureLog) -> None:
        self._plan, self._stages, self._mpu, self._failures = plan, stages, mpu, failures
        self._early: list[tuple[int, list[str], torch.dtype]] = []  # axis, parameters and dtype of each bucket
        self.owners: Callable[[], Owners] = dict  # with ``zero.reduce_scatter`` the method of the optimizer

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaGradients:
        return ReplicaGradients(self._plan, self._stages, self._mpu, self._failures)

    @contextmanager
    def averaged(self, model: nn.Module, *, early: bool) -> Iterator[Callable[[int | None], None]]:
        """Average the gradients at the end of the block. A collective of all replicas.

        Yields a function to call before the last backward of a stage (None: of the model). With ``early``, buckets
        start in that backward; ``early`` must be identical on all replicas.
        """
        own = {name: p for name, p in model.named_parameters() if not isinstance(p, DTensor)}
        names = {parameter: name for name, parameter in own.items()}
        started: list[tuple[int, Bucket]] = []
        owners = self.owners()
        for number, held, dtype in self._early if early else ():
            axis = self._axes[number]
            if own.keys() >= set(held) and len({own[name] in owners for name in held}) == 1:  # not of a new group
                started.append((number, Bucket([own[name] for name in held], dtype, owners, axis, 1 / axis.size)))
        self._early = []  # until the replicas have agreed again
        waiting = deque(bucket for _, bucket in started)
        bucket_of = {parameter: bucket for bucket in waiting for parameter in bucket.parameters}
        handles: list[Any] = []

        def start(when: Callable[[Bucket], bool]) -> None:
            while waiting and when(waiting[0]):
                with self._blame(), self._failures.deadline():
                    for _, bucket in started if owners else ():
                        bucket.land(wait=False)
                    waiting.popleft().start()

        def arrived(parameter: nn.Parameter) -> None:
            bucket_of[parameter].missing.discard(parameter)
            start(lambda bucket: not bucket.missing)

        def arm(stage: int | None = None) -> None:
            for parameter in bucket_of:
                its = stage is None or self._stages.tensors.get(names[parameter]) == (stage,)
                if its and parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(arrived))

        try:
            yield arm
        except Exception:
            with suppress(Exception):  # so that replicas that all skip this step have started the same buckets
                start(lambda _: True)
            raise
        finally:
            for handle in handles:
                handle.remove()
        start(lambda _: True)
        with self._blame(), self._failures.deadline():
            self._end(model, names, started)

    def _meets_in_a_backward(self, model: nn.Module, axis: Axis) -> bool:
        """Return whether a backward runs collectives of the axis's group, whose order must not depend on gradients."""
        mpu = self._mpu
        used = [other.group for other in (mpu.tp, mpu.cp, mpu.pp, mpu.ep) if other.size > 1]
        return axis.group in used or any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())

    @property
    def _axes(self) -> tuple[Axis, Axis]:
        return self._mpu.dp_cp, self._mpu.copies  # the second for experts that replicas share

    def _blame(self) -> Any:
        what = "averaging the gradients over the data-parallel replicas"
        return self._failures.blame(what, self._mpu.dp_cp.ranks)

    def _end(self, model: nn.Module, names: dict[nn.Parameter, str], started: list[tuple[int, Bucket]]) -> None:
        place = {parameter: number for number, parameter in enumerate(names)}
        alike = held_alike(model, self._plan, self._mpu)
        following, owners = list[tuple[int, Bucket]](), self.owners()
        for number, axis in enumerate(self._axes):
            if axis.size == 1 or (number == 1 and not self._plan.experts):
                continue
            alone, *shared = self._by_holders({name: p for p, name in names.items()}, experts=number == 1)
            runs, wide = runs_of([alone], alike), axis.reduce_dtype
            early = [bucket for at, bucket in started if at == number]
            both = [*runs, *runs_of(shared, alike)]
            found = sum_gradients(both, axis, 1 / axis.size, names, wide, early, owners)
            if (owners or axis.transport is None) and not self._meets_in_a_backward(model, axis):
                following += [(number, bucket) for bucket in _in_buckets(runs, found, owners, axis, 1.0, wide)]
        following.sort(key=lambda entry: -min(place[parameter] for parameter in entry[1].parameters))
        self._early = [(at, [names[p] for p in b.parameters], b.dtype) for at, b in following if not b.is_wide]

    def _by_holders(self, own: Mapping[str, nn.Parameter], *, experts: bool) -> list[list[nn.Parameter]]:
        """Return the parameters of this pipeline rank alone, then the parameters of each set of stages, in order."""
        found: dict[tuple[int, ...], list[nn.Parameter]] = {(): []}
        for name in [*self._stages.tensors, *(name for name in own if name not in self._stages.tensors)]:
            if name in own and (name in self._plan.experts) is experts:
                holders = self._stages.holders(name) if name in self._stages.tensors else ()
                found.setdefault(holders if len(holders) > 1 else (), []).append(own[name])
        return [found[holders] for holders in sorted(found)]

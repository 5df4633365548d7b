"""All-reduce gradients: of weights on several stages, and of data-parallel replicas, with the same bits everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.tensors import local_part
from autopar.distributed.digest import extremes, sum_of_bits
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU, new_pipeline_group
from autopar.errors import ConsistencyError
from autopar.plan.plan import Plan
from autopar.plan.stages import StagePlan

Alike = Mapping[int, tuple[int, ...]]
"""``id(parameter)`` -> those of the ranks that hold a stage's shards that hold the same one of it."""

_BUCKET = 32 * 1024 * 1024  # bytes that travel at once


def held_alike(model: nn.Module, plan: Plan, mpu: MPU) -> Alike:
    """Return ``id(parameter)`` -> the ranks of ``mpu.shards`` that hold the same shard, for all parameters."""
    rank, size = mpu.shards.rank, mpu.shards.size
    layouts = {name: tensor.layout for tensor in plan.tensors.values() for name in (tensor.name, *tensor.aliases)}
    alike: dict[int, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        if size == 1 or name not in layouts:  # added after initialize: of this rank alone, as far as is known
            alike[id(parameter)] = (rank,)
            continue
        layout = layouts[name]
        alike[id(parameter)] = tuple(
            other for other in range(size) if layout is None or layout.ranges(other) == layout.ranges(rank)
        )
    return alike


def runs_of(lists: list[list[nn.Parameter]], alike: Alike) -> list[list[nn.Parameter]]:
    """Group each list by the ranks that hold the same: such a run has the same content and order on all of these ranks.

    An all-reduce over three ranks or more adds in an order that depends on the place in the buffer. Ranks that hold the
    same would drift apart by rounding if it lay at another place there.
    """
    runs: dict[tuple[int, tuple[int, ...]], list[nn.Parameter]] = {}
    for number, parameters in enumerate(lists):
        for parameter in parameters:
            runs.setdefault((number, alike[id(parameter)]), []).append(parameter)
    return list(runs.values())


def average_over_replicas(model: nn.Module, plan: Plan, stages: StagePlan, mpu: MPU) -> None:
    """All-reduce the mean of all gradients over the data-parallel replicas, as ``DistributedDataParallel`` does.

    Ranks that share sequences (cp) are averaged over as well: each one's gradient is cp times its part.
    A parameter without gradient on one replica counts as zero there. DTensors (FSDP) are averaged already. A gradient
    that several ranks of a replica hold gets the same bits on all of them.
    """
    own = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in own.items()}
    for axis, experts in ((mpu.dp_cp, False), (mpu.copies, True)):
        if axis.size == 1 or (experts and not plan.experts):
            continue
        by_holders: dict[tuple[int, ...], list[nn.Parameter]] = {}  # in the stages' order on all holders
        for name in [*stages.tensors, *(name for name in own if name not in stages.tensors)]:
            if name in own and not isinstance(own[name], DTensor) and (name in plan.experts) is experts:
                holders = stages.holders(name) if name in stages.tensors else ()
                by_holders.setdefault(holders if len(holders) > 1 else (), []).append(own[name])
        runs = runs_of([by_holders[key] for key in sorted(by_holders)], held_alike(model, plan, mpu))
        sum_gradients(runs, axis.group, 1 / axis.size, names, axis.reduce_dtype)


@torch.no_grad()
def sum_gradients(
    runs: list[list[nn.Parameter]],
    group: Any,
    scale: float = 1.0,
    names: Mapping[int, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Scale gradients, then all-reduce them over a group. Every rank gives the same parameters in the same order.

    A parameter that has a gradient on no rank gets none; where it is fp32 on some rank, it becomes fp32 on all.

    Args:
        runs: what may travel together in one buffer.
        scale: before the sum, which might be too large for fp16.
        names: ``id(parameter)`` -> name, for the error.
        dtype: in which half-precision gradients are scaled and summed; None: their own.

    Raises:
        ConsistencyError: a parameter is frozen on some ranks and trained on others; on every rank.
    """
    parameters = [parameter for run in runs for parameter in run]
    if not parameters:
        return
    trained = [int(parameter.requires_grad) for parameter in parameters]
    found = [  # 0: no gradient; 1: in the parameter's dtype; 2: in fp32 instead
        0 if p.grad is None or not p.requires_grad else 1 + (p.grad.dtype != p.dtype) for p in parameters
    ]
    largest, smallest = extremes([*found, *trained], group)
    kinds = {id(parameter): kind for parameter, kind in zip(parameters, largest, strict=False)}
    count = len(parameters)
    mixed = [p for p, high, low in zip(parameters, largest[count:], smallest[count:], strict=True) if high != low]
    if mixed:
        name = (names or {}).get(id(mixed[0]), f"a parameter of shape {list(mixed[0].shape)}")
        raise ConsistencyError(
            f"{name} is frozen (requires_grad=False) on some of the ranks {dist.get_process_group_ranks(group)} and "
            f"trained on others ({len(mixed)} such parameters).\n"
            "  Freeze and unfreeze weights on all data-parallel replicas alike."
        )
    for run in runs:
        gradients: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in run:
            if kinds[id(parameter)]:
                gradient = _gradient_in(parameter, torch.float32 if kinds[id(parameter)] == 2 else parameter.dtype)
                gradients.setdefault(gradient.dtype, []).append(local_part(gradient))
        for flat in (flat for same in gradients.values() for flat in flattened(same, dtype)):
            if scale != 1.0:
                flat.mul_(scale)
            all_reduce(flat, group=group)


def _gradient_in(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Return the parameter's gradient in this dtype; zeros if it has none."""
    gradient = parameter.grad
    if gradient is None or gradient.dtype != dtype:
        gradient = torch.zeros_like(parameter, dtype=dtype) if gradient is None else gradient.to(dtype)
        parameter.grad = None
        if parameter.grad_dtype not in (None, dtype):
            parameter.grad_dtype = None
        parameter.grad = gradient
    return gradient


def buckets(tensors: Sequence[torch.Tensor], limit: int = _BUCKET) -> Iterator[list[torch.Tensor]]:
    """Yield runs of tensors of at most ``limit`` bytes together, or of one tensor: what travels in one flat buffer."""
    bucket: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield bucket


def flattened(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
    """Yield buckets of tensors in one flat buffer each, and copy it back when the next one is asked for.

    Args:
        dtype: of the buffers, where it is wider than that of the tensors.
    """
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        if dtype is not None and flat.itemsize < dtype.itemsize:
            flat = flat.to(dtype)
        yield flat
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


class TiedWeights:
    """Parameters that several ranks of the pipeline hold, by their holders.

    Their gradient is the sum over these ranks. It is summed apart from what earlier steps left there, so that gradients
    accumulate.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, mpu: MPU) -> None:
        self._sets: list[tuple[Any, list[nn.Parameter]]] = []
        by_holders: dict[tuple[int, ...], list[nn.Parameter]] = {}
        own = dict(model.named_parameters())
        names: dict[tuple[int, ...], None] = {}
        for name in plan.tensors:
            holders = plan.holders(name)
            if len(holders) > 1:
                names[holders] = None
                if name in own and mpu.pp.rank in holders:
                    by_holders.setdefault(holders, []).append(own[name])
        for holders in names:  # the same on every rank: all of them take part in the making of a group
            everywhere = len(holders) == mpu.pp.size
            group = mpu.pp.group if everywhere else new_pipeline_group(mpu, "tied weights", holders)
            if holders in by_holders:
                self._sets.append((group, by_holders[holders]))
        self._names = {id(parameter): name for name, parameter in own.items()}
        self._earlier: list[torch.Tensor | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TiedWeights:
        copied = TiedWeights.__new__(TiedWeights)
        memo[id(self)] = copied
        copied._sets = [(group, [memo.get(id(p), p) for p in parameters]) for group, parameters in self._sets]
        copied._earlier = []
        copied._names = {id(memo[key]) if key in memo else key: name for key, name in self._names.items()}
        return copied

    def rebind(self, model: nn.Module) -> None:
        """Take the parameters that the model has now, by name: ``fully_shard`` made new ones."""
        now = dict(model.named_parameters())
        self._sets = [(group, [now[self._names[id(p)]] for p in parameters]) for group, parameters in self._sets]
        self._names = {id(parameter): name for name, parameter in now.items()}

    def digests(self) -> dict[str, str]:
        """Digest each weight that other ranks hold, too."""
        sums = {
            self._names[id(p)]: int(sum_of_bits(local_part(p.detach()))) for p in self._parameters() if not p.is_meta
        }
        return {name: f"{value & (1 << 64) - 1:016x}"[:12] for name, value in sums.items()}

    def _parameters(self) -> Iterator[nn.Parameter]:
        for _, parameters in self._sets:
            yield from parameters

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep earlier gradients, which are summed already, apart from those of a step; restore them on an error."""
        self._earlier = [parameter.grad for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, earlier in zip(self._parameters(), self._earlier, strict=False):  # none: it is summed
                parameter.grad = earlier
            raise
        finally:
            self._earlier = []

    def sum(self, alike: Alike) -> None:
        """Sum the step's gradients over the holders, and add the earlier ones; at the end of :meth:`apart`."""
        for group, parameters in self._sets:
            sum_gradients(runs_of([parameters], alike), group)
        for parameter, earlier in zip(self._parameters(), self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = []

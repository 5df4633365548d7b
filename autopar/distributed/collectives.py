"""Collectives over one axis of the mesh, without and with autograd, for activations of tensor-parallel layers.

| function             | forward                    | backward                    | Megatron-LM (mappings.py)         |
|----------------------|----------------------------|-----------------------------|-----------------------------------|
| ``copy``             | identity                   | all-reduce                  | f, _CopyToModelParallelRegion     |
| ``reduce``           | all-reduce                 | identity                    | g, _ReduceFromModelParallelRegion |
| ``gather``           | all-gather along a dim     | keep own part               | _GatherFromModelParallelRegion    |
| ``scatter``          | keep own part              | all-gather along the dim    | _ScatterToModelParallelRegion     |
| ``gather_sum``       | all-gather along a dim     | reduce-scatter              | _GatherFromSequenceParallelRegion |
| ``reduce_scatter``   | reduce-scatter along a dim | all-gather                  | _ReduceScatterToSequenceParallel  |
| ``all_to_all``       | all-to-all along dim 0     | all-to-all, splits swapped  | _AllToAll                         |
| ``sum_replicas``     | identity on a weight       | sum over the ranks that hold the same units | -                 |

The convention follows Shoeybi et al., "Megatron-LM" (2019), section 3: after ``reduce`` or ``gather`` every rank
computes the same result from the same values, so the backward of ``reduce`` is the identity and not another sum
(``torch.distributed.nn`` sums, so its gradients are ``size`` times too large).

All of them are linear, and the backward of each is another one, so they support derivatives of any order. On the meta
device they compute shapes without communication, so a dry run needs no process group. Only ``reduce_`` mutates its
input, which must be a matmul output that nothing else uses.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autopar.compat.tensors import is_transformed
from autopar.distributed import gloo_collectives
from autopar.distributed.autograd_functions import (
    NoGraph,
    any_order,
    is_watched,
    keep_none,
    named_collective,
    refuse_transforms,
)
from autopar.distributed.axis import Axis, device_of
from autopar.distributed.digest import extremes
from autopar.layout import Block, Layout, even_shards


class _Running(threading.local):
    """The tape of this thread, on which a feature keeps results of collectives for recomputation.

    Attributes:
        tape: An object with ``note(name, x)``, which keeps a result, and ``plays(name, x)``, which writes an earlier
            result and returns True; None: nothing is kept.
    """

    tape: Any = None


running = _Running()


def note_on_meta(name: str, x: torch.Tensor, shape: Sequence[int] | None = None) -> None:
    """Keep ``x``, or a tensor of its kind with another shape, on a dry run's tape, as the collective would."""
    if running.tape is not None:
        running.tape.note(name, x if shape is None else x.new_empty(shape))


def run(collective: Callable[..., Any], axis: Axis, *args: Any, kept: bool = True) -> None:
    """Run one of ``gloo_collectives``, which writes ``args[0]``. If a rank failed, the error names it and its reason.

    The recomputation of a block that keeps its collectives reads the result from a tape. Messages between two ranks
    are not kept (``kept=False``) but sent again.
    """
    tape, name = running.tape if kept else None, getattr(collective, "__name__", "")
    if tape is not None and tape.plays(name, args[0]):
        return
    transport = axis.transport
    try:
        if transport is None or not transport.run(name, *args):
            collective(*args, group=axis.group)
    except RuntimeError as error:
        _explain(error, axis)
    if tape is not None:
        tape.note(name, args[0])


def _explain(error: RuntimeError, axis: Axis) -> NoReturn:
    failure = None if axis.explain is None else axis.explain(error, axis.name, axis.ranks)
    if failure is None:
        raise error
    raise failure from error


def even_layout(size: int, parts: int, dim: int = 0) -> Layout:
    """Return the layout of ``size`` single elements sharded evenly over ``parts`` ranks along ``dim``."""
    return Layout.of(dim, [Block("element", size, 1, even_shards(size, parts))])


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over the axis, out of place, because autograd may pass the same gradient to two branches."""
    x = x.clone(memory_format=torch.contiguous_format)
    sum_in_place(x, axis)
    return x


def sum_in_place(x: torch.Tensor, axis: Axis) -> None:
    """Sum a contiguous ``x`` over the axis in place."""
    wide = axis.widened(x)
    if axis.group is None:
        note_on_meta("all_reduce", wide)
        return
    run(gloo_collectives.all_reduce, axis, wide)
    if wide is not x:
        x.copy_(wide)


def start_all_reduce(x: torch.Tensor, axis: Axis) -> Callable[[], None]:
    """Start to sum a contiguous ``x`` over the axis in place; call the returned function to wait."""
    wide = axis.widened(x)
    try:
        work = dist.all_reduce(wide, group=axis.group, async_op=True)
    except RuntimeError as error:
        _explain(error, axis)

    def wait() -> None:
        try:
            gloo_collectives.finish(work) if x.is_cpu else work.wait()
        except RuntimeError as error:
            _explain(error, axis)
        if wide is not x:
            x.copy_(wide)

    return wait


def all_gather(x: torch.Tensor, axis: Axis, layout: Layout, dim: int | None = None) -> torch.Tensor:
    """All-gather shards along ``dim`` (default: the layout's), without autograd. Uneven shards are padded for gloo."""
    dim = layout.dim if dim is None else dim
    sizes = [layout.local_size(rank) for rank in range(axis.size)]
    if axis.group is None:
        note_on_meta("all_gather_into_tensor", x, [axis.size, *_resized(x, dim, max(sizes))])
        return x.new_empty(_resized(x, dim, layout.size))
    missing = max(sizes) - x.shape[dim]
    if missing > 0:
        x = torch.cat([x, x.new_zeros(_resized(x, dim, missing))], dim)
    x = x.contiguous()
    out = x.new_empty(axis.size * x.numel())
    run(gloo_collectives.all_gather_into_tensor, axis, out, x.view(-1))
    shards = out.view(axis.size, *x.shape).unbind(0)
    return layout.unshard([shard.narrow(dim, 0, size) for shard, size in zip(shards, sizes, strict=True)], dim)


def extremes_over(axis: Axis, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the largest and the smallest of each number over an axis, without autograd."""
    if axis.transport is None:
        try:
            return extremes(numbers, axis.group)
        except RuntimeError as error:
            _explain(error, axis)
    everyone = torch.empty(axis.size * len(numbers), dtype=torch.int64)
    run(gloo_collectives.all_gather_into_tensor, axis, everyone, torch.tensor(numbers))
    columns = list(zip(*everyone.view(axis.size, -1).tolist(), strict=True))
    return [max(column) for column in columns], [min(column) for column in columns]


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values, which are pickled, of all ranks of a group (default: the world), in order."""
    everyone = [value] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def exchange(sent: Sequence[Sequence[torch.Tensor]], due: Sequence[Sequence[torch.Tensor]], axis: Axis) -> None:
    """Send tensors to each rank, and fill the tensors that are due from each rank, in one all-to-all of bytes."""
    assert axis.group is not None
    device = device_of(axis)
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for tensors in sent for t in tensors]
    buffer = torch.cat(flat).to(device) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    sizes_in, sizes_out = ([sum(t.nbytes for t in tensors) for tensors in each] for each in (sent, due))
    received = torch.empty(sum(sizes_out), dtype=torch.uint8, device=device)
    gloo_collectives.all_to_all_single(received, buffer, sizes_out, sizes_in, group=axis.group)
    tensors = [tensor for each in due for tensor in each]
    for tensor, piece in zip(tensors, received.split([tensor.nbytes for tensor in tensors]), strict=True):
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def sum_shards(shard: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    """Add the shards of all ranks into a full tensor. Units that several ranks hold are summed."""
    full = shard.new_zeros(_resized(shard, dim, layout.size))
    layout.write(full, shard, axis.rank, dim)
    sum_in_place(full, axis)
    return full


def owned(part: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    """Return a gradient with zeros for units that a lower rank holds too, because they are summed later."""
    if not layout.replicated:
        return part
    mask = torch.zeros_like(part)
    for start, stop in layout.owned_local(axis.rank):
        mask.narrow(dim, start, stop - start).fill_(1)
    return part * mask


def _resized(x: torch.Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def reduce_scattered(x: torch.Tensor, axis: Axis, dim: int, layout: Layout | None = None) -> torch.Tensor:
    """Sum over the axis and keep this rank's shard along ``dim``, an even one or by ``layout`` (sent with padding)."""
    layout = layout or even_layout(x.shape[dim], axis.size)
    sizes = [layout.local_size(rank) for rank in range(axis.size)]
    wide = axis.widened(x[:0])
    if axis.group is None:
        note_on_meta("reduce_scatter_tensor", wide, _resized(x, dim, max(sizes)))
        return x.new_empty(_resized(x, dim, sizes[axis.rank]))
    make = wide.new_empty if min(sizes) == max(sizes) else wide.new_zeros
    parts = make(axis.size, *_resized(x, dim, max(sizes)))
    for rank in range(axis.size):
        offset = 0
        for start, stop in layout.ranges(rank):
            parts[rank].narrow(dim, offset, stop - start).copy_(x.narrow(dim, start, stop - start))
            offset += stop - start
    out = torch.empty_like(parts[0])
    run(gloo_collectives.reduce_scatter_tensor, axis, out.view(-1), parts.view(-1))
    out = out.to(x.dtype)
    return out if sizes[axis.rank] == max(sizes) else out.narrow(dim, 0, sizes[axis.rank]).contiguous()


def broadcast(x: torch.Tensor, axis: Axis, source: int = 0) -> None:
    """Broadcast a contiguous ``x`` from rank ``source`` of the axis in place, without autograd."""
    if axis.size > 1:
        run(gloo_collectives.broadcast, axis, x, axis.ranks[source])


def exchanged(
    x: torch.Tensor, axis: Axis, output_splits: list[int] | None, input_splits: list[int] | None
) -> torch.Tensor:
    """Exchange rows of dim 0, without autograd; see :func:`all_to_all`."""
    rows = x.shape[0] if output_splits is None else sum(output_splits)
    out = x.new_empty(rows, *x.shape[1:])
    if axis.group is None:
        note_on_meta("all_to_all_single", out)
    else:
        run(gloo_collectives.all_to_all_single, axis, out, x.contiguous(), output_splits, input_splits)
    return out


# -- autograd functions ------------------------------------------------------------------------------------------------


def linear(
    name: str,
    forward: Callable[..., torch.Tensor],
    backward: Callable[..., torch.Tensor],
    again: Callable[..., torch.Tensor],
    forward_name: str = "",
    backward_name: str = "",
) -> Any:
    """Make an autograd function from functions of a tensor, an axis and further arguments; names are for profilers.

    ``forward`` and ``backward`` run without autograd. ``again`` is the differentiable backward.
    """
    forward = named_collective(forward_name)(forward) if forward_name else forward
    backward = named_collective(backward_name)(backward) if backward_name else backward

    def run_forward(ctx: Any, x: torch.Tensor, axis: Axis, *args: Any) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.args = axis, args
        return forward(x, axis, *args)

    @any_order(lambda ctx, grad: (again(grad, ctx.axis, *ctx.args), None, *(None,) * len(ctx.args)))
    def run_backward(ctx: Any, grad: torch.Tensor) -> Any:
        return backward(grad, ctx.axis, *ctx.args), None, *(None,) * len(ctx.args)

    for method, kind in ((run_forward, "forward"), (inspect.unwrap(run_backward), "backward")):  # as traces name them
        method.__code__ = method.__code__.replace(co_name=kind, co_qualname=f"{name}.{kind}")
    members = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward), "__module__": __name__}
    return type(name, (torch.autograd.Function,), members)


def itself(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return ``x``."""
    return x


def as_view(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return a view of all of ``x``."""
    return x.view_as(x)


def _own_shard(x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    return layout.shard(x, axis.rank, dim)


def _joined(x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    """Join shards. For units that several ranks hold, each of them has a part of the sum."""
    return sum_shards(x, axis, layout, dim) if layout.replicated else all_gather(x, axis, layout, dim)


def _joined_again(x: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    return _apply(_SumOfShards, x, axis, layout, dim) if layout.replicated else gather(x, axis, layout, dim)


def _replicas_summed(x: torch.Tensor, axis: Axis, layout: Layout) -> torch.Tensor:
    return layout.shard(sum_shards(x, axis, layout, layout.dim), axis.rank)


def _apply(function: Any, x: torch.Tensor, axis: Axis, *args: Any) -> torch.Tensor:
    if axis.size == 1:
        return x
    if is_transformed():
        refuse_transforms(lambda: x)
    if x.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = function.apply(x, axis, *args)
    else:  # without the cost of autograd
        result = function.forward(NoGraph(), x, axis, *args)
    return result


def copy(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Enter a sharded region: identity in the forward, sum of all ranks' gradients in the backward. Any shape."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _apply(_Copy, x, axis)


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Leave a sharded region: sum over the axis in the forward, identity in the backward. Any shape, out of place."""
    return _apply(_Reduce, x, axis)


def reduce_(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Reduce like :func:`reduce`, but in place; ``x`` must be a contiguous matmul output that nothing has saved."""
    return _apply(_Reduce if torch.is_grad_enabled() and is_watched(x) else _ReduceInPlace, x, axis)


def gather(x: torch.Tensor, axis: Axis, layout: Layout, dim: int = -1) -> torch.Tensor:
    """All-gather ``[..., n/axis] -> [..., n]`` along ``dim`` by ``layout``; backward keeps this rank's shard."""
    return _apply(_Gather, x, axis, layout, dim)


def scatter(x: torch.Tensor, axis: Axis, layout: Layout, dim: int = -1) -> torch.Tensor:
    """Keep this rank's shard, ``[..., n] -> [..., n/axis]`` along ``dim`` by ``layout``; backward all-gathers."""
    return _apply(_Scatter, x, axis, layout, dim)


def gather_sum(
    x: torch.Tensor, axis: Axis, dim: int = 0, layout: Layout | None = None, gathered: torch.Tensor | None = None
) -> torch.Tensor:
    """All-gather ``[..., n/axis] -> [..., n]`` into a sharded region; backward is a reduce-scatter.

    Args:
        layout: The layout of ``n``; by default all shards have this rank's size.
        gathered: The result of the all-gather, if known already.
    """
    known = [] if gathered is None else [gathered.detach()]  # a list, so that the graph does not keep the tensor
    return _apply(_GatherSum, x, axis, dim, layout or even_layout(x.shape[dim] * axis.size, axis.size), known)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int = 0, layout: Layout | None = None) -> torch.Tensor:
    """Reduce-scatter ``[..., n] -> [..., n/axis]``, evenly or by ``layout``. Backward is an all-gather."""
    return _apply(_ReduceScatter, x, axis, dim, layout or even_layout(x.shape[dim], axis.size))


def all_to_all(
    x: torch.Tensor, axis: Axis, output_splits: list[int] | None = None, input_splits: list[int] | None = None
) -> torch.Tensor:
    """Exchange rows: ``input_splits[r]`` rows of dim 0 go to rank ``r``, ``output_splits[r]`` come from it."""
    return _apply(_AllToAll, x, axis, output_splits, input_splits)


def sum_replicas(weight: torch.Tensor, axis: Axis, layout: Layout) -> torch.Tensor:
    """Return a weight whose incoming gradient is summed over the ranks that hold the same units.

    The incoming gradient is summed, not the accumulated one: a sum after the second micro-batch would count the first
    one again.
    """
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    return _apply(_SumReplicas, weight, axis, layout)


# -- forward, backward, and backward of the backward -------------------------------------------------------------------

_EXIT, _ENTRY = "exit of a sharded region", "gradient at the entry of a sharded region"
_Copy = linear("_Copy", as_view, all_reduce, reduce, "", f"all-reduce: {_ENTRY}")
_Reduce = linear("_Reduce", all_reduce, itself, copy, f"all-reduce: {_EXIT}")
_Gather = linear(
    "_Gather",
    all_gather,
    lambda x, axis, layout, dim: owned(layout.shard(x, axis.rank, dim), axis, layout, dim),
    lambda x, axis, layout, dim: owned(scatter(x, axis, layout, dim), axis, layout, dim),
    f"all-gather: {_EXIT}",
)
_Scatter = linear("_Scatter", _own_shard, _joined, _joined_again, "", f"all-gather: {_ENTRY}")
_GatherSum = linear(
    "_GatherSum",
    lambda x, axis, dim, layout, known: known.pop() if known else all_gather(x, axis, layout, dim),
    lambda x, axis, dim, layout, known: reduce_scattered(x, axis, dim, layout),
    lambda x, axis, dim, layout, known: reduce_scatter(x, axis, dim, layout),
    "all-gather: entry of a sharded region",
    f"reduce-scatter: {_ENTRY}",
)
_ReduceScatter = linear(
    "_ReduceScatter",
    reduce_scattered,
    lambda x, axis, dim, layout: all_gather(x, axis, layout, dim),
    gather_sum,
    f"reduce-scatter: {_EXIT}",
    "all-gather: gradient at the exit of a sharded region",
)
_AllToAll = linear(
    "_AllToAll",
    exchanged,
    lambda x, axis, outwards, inwards: exchanged(x, axis, inwards, outwards),
    lambda x, axis, outwards, inwards: all_to_all(x, axis, inwards, outwards),
    "all-to-all: rows",
)
_OF_REPLICAS = "all-reduce: gradient of a weight with replicated units"
_SumOfReplicas = linear("_SumOfReplicas", _replicas_summed, itself, sum_replicas, _OF_REPLICAS)
_SumReplicas = linear(
    "_SumReplicas", as_view, _replicas_summed, lambda x, *of: _apply(_SumOfReplicas, x, *of), "", _OF_REPLICAS
)
_SumOfShards = linear("_SumOfShards", sum_shards, _own_shard, scatter, f"all-reduce: {_ENTRY}")


class _ReduceInPlace(_Reduce):  # type: ignore[misc, valid-type]
    @staticmethod
    @named_collective(f"all-reduce: {_EXIT}")
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis, ctx.args = axis, ()
        ctx.mark_dirty(x)
        sum_in_place(x, axis)
        return x

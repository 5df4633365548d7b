"""Collectives over one axis of the mesh without autograd; on the meta device they compute shapes and send nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autopar.distributed import gloo_collectives
from autopar.distributed.axis import Axis
from autopar.distributed.digest import extremes
from autopar.distributed.recompute_tape import note_on_meta, running
from autopar.layout import Block, Layout, even_shards


def run(collective: Callable[..., Any], axis: Axis, *args: Any, kept: bool = True) -> None:
    """Run one of ``gloo_collectives`` by what carries it; if a rank failed, the error names it and its reason.

    ``args[0]`` is written. The recomputation of a block that keeps its collectives reads it from a tape; not with
    ``kept=False``, of messages between two ranks, which a recomputation sends again.
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
    """Sum over the axis, out of place. Never in place: autograd may hand the same gradient to two branches."""
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
    """Begin to sum a contiguous ``x`` over the axis in place, by its process group; call the result to wait for it."""
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
    """All-gather shards along ``dim`` (the layout's), no autograd. Padded if uneven: gloo has no uneven all-gather."""
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
        return extremes(numbers, axis.group)
    everyone = torch.empty(axis.size * len(numbers), dtype=torch.int64)
    run(gloo_collectives.all_gather_into_tensor, axis, everyone, torch.tensor(numbers))
    columns = list(zip(*everyone.view(axis.size, -1).tolist(), strict=True))
    return [max(column) for column in columns], [min(column) for column in columns]


def sum_shards(shard: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    """Add the shards of all ranks into a full tensor; where several ranks hold the same units, they add up."""
    full = shard.new_zeros(_resized(shard, dim, layout.size))
    layout.write(full, shard, axis.rank, dim)
    sum_in_place(full, axis)
    return full


def owned(part: torch.Tensor, axis: Axis, layout: Layout, dim: int) -> torch.Tensor:
    """Return a gradient with zeros where a lower rank holds the same units: they are summed later."""
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


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int, layout: Layout | None = None) -> torch.Tensor:
    """Sum over the axis and keep this rank's part of ``dim``: an even one, or that of ``layout``, padded on the way."""
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
    """Overwrite a contiguous ``x`` by that of the axis's rank ``source``, no autograd."""
    if axis.size > 1:
        run(gloo_collectives.broadcast, axis, x, axis.ranks[source])

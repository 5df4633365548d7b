"""Collectives of CPU tensors over gloo, with short waits that do not sleep.

gloo works in another thread, and to sleep until it is done takes longer than the work. So the caller asks for a
while whether it is, giving the core to other processes, before it sleeps. Not where a machine has more ranks than
cores: there it would take them from ranks that compute. Tensors on GPUs, other backends, and graphs of torch.compile
get torch's own waits.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from autopar.compat.c10d import default_group, in_fake_world

_CROWDED = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > (os.cpu_count() or 1)
_POLL = 0.0 if _CROWDED else 1e-3  # seconds; who waits longer sleeps, and leaves the core to another rank


def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Reduce a contiguous ``x`` over the group in place. Any shape, equal on all ranks."""
    if x.numel():
        finish(dist.all_reduce(x.detach(), op, group=group, async_op=_is_gloo(x, group)))


def all_gather_into_tensor(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``x``, ``[n]``, of all ranks in their order into ``out``, ``[ranks * n]``; both contiguous."""
    if x.numel():
        finish(dist.all_gather_single(out.detach(), x.detach(), group=group, async_op=_is_gloo(x, group)))


def reduce_scatter_tensor(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``x``, ``[ranks * n]``, over the group; ``out``, ``[n]``, gets this rank's part of it. Both contiguous."""
    if out.numel():
        finish(dist.reduce_scatter_single(out.detach(), x.detach(), group=group, async_op=_is_gloo(x, group)))


def all_to_all_single(
    out: torch.Tensor,
    x: torch.Tensor,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
    *,
    group: dist.ProcessGroup,
) -> None:
    """Exchange rows of dim 0, as torch's does."""
    polled = _is_gloo(x, group)
    finish(dist.all_to_all_single(out, x, output_splits, input_splits, group=group, async_op=polled))


def broadcast(x: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrite a contiguous ``x`` by the global rank ``source``'s."""
    finish(dist.broadcast(x, source, group=group, async_op=_is_gloo(x, group)))


def finish(work: dist.Work | None) -> None:
    """Wait for a collective of gloo; None is one that is done."""
    if work is None or torch.compiler.is_compiling():  # a graph holds collectives that are done
        return
    if not work.is_completed() and not in_fake_world():
        end = time.perf_counter() + _POLL
        while not work.is_completed() and time.perf_counter() < end:
            os.sched_yield()
    work.wait()


def _is_gloo(x: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return whether gloo carries it, and this process waits for that."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return False
    return "cpu:gloo" in str(dist.get_backend_config(default_group() if group is None else group))

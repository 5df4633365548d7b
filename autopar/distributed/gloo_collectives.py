"""Collectives of CPU tensors over gloo, which poll for a short time before they sleep.

gloo works in another thread, and waking up from a sleep takes longer than a small collective. So the caller first polls
for a short time, and yields the core between polls. It does not poll if the machine has more ranks than cores, because
other ranks need the core. GPU tensors, other backends and graphs of torch.compile use torch's waits.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from autopar.compat.c10d import default_group, in_fake_world

_CROWDED = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > (os.cpu_count() or 1)
_POLL = 0.0 if _CROWDED else 1e-3  # seconds to poll before sleeping


def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Reduce a contiguous ``x`` over the group in place. Any shape, equal on all ranks."""
    if x.numel():
        finish(dist.all_reduce(x.detach(), op, group=group, async_op=_is_gloo(x, group)))


def all_gather_into_tensor(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``x``, ``[n]``, of all ranks in their order into ``out``, ``[ranks * n]``; both contiguous."""
    if x.numel():
        finish(dist.all_gather_single(out.detach(), x.detach(), group=group, async_op=_is_gloo(x, group)))


def reduce_scatter_tensor(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``x``, ``[ranks * n]``, over the group and write this rank's shard into ``out``, ``[n]``; both contiguous."""
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
    """Exchange rows of dim 0, as torch's function of the same name."""
    polled = _is_gloo(x, group)
    finish(dist.all_to_all_single(out, x, output_splits, input_splits, group=group, async_op=polled))


def broadcast(x: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Broadcast a contiguous ``x`` from the global rank ``source`` in place."""
    finish(dist.broadcast(x, source, group=group, async_op=_is_gloo(x, group)))


def finish(work: dist.Work | None) -> None:
    """Wait for a collective of gloo; None means that it is complete."""
    if work is None or torch.compiler.is_compiling():  # collectives in a graph are synchronous
        return
    if not work.is_completed() and not in_fake_world():
        end = time.perf_counter() + _POLL
        while not work.is_completed() and time.perf_counter() < end:
            os.sched_yield()
    work.wait()


def _is_gloo(x: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return whether gloo runs collectives of ``x`` in a background thread."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return False
    return "cpu:gloo" in str(dist.get_backend_config(default_group() if group is None else group))

"""Collectives of CPU tensors over gloo: small ones as one exchange, and short waits without sleep.

**Exchange.** gloo's all-reduce is a ring: 2 (ranks - 1) steps, each of which wakes threads on two ranks. A small tensor
costs nothing but these. So every rank sends it to all others at once (gloo's all-to-all, its fastest collective) and
adds up itself, in the order of ranks: the same bits everywhere, halves in fp32 and rounded once. A small all-gather is
the same without the sum, and a small reduce-scatter sends each rank only its part. What is sent decides, so all ranks
decide alike; ``benchmarks/collectives.py`` measures where it pays.

**Waiting.** gloo works in a thread of its own, and to sleep until it is done takes longer than the work. So the caller
asks for a while whether it is, giving the core to whoever wants it, before it sleeps. Not where a machine has more
ranks than cores: there it would take them from ranks that compute.

Tensors on GPUs, other backends, and graphs of torch.compile get torch's own collectives. So does, from then on, a group
that was in a graph: a rank may stop compiling before the others (``recompile_limit``), and must still do as they do.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.foreign.groups import default_group, group_named

__all__ = [
    "SUMMABLE",
    "add_in_order",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "exchanged_for",
    "finish",
    "reduce_scatter_tensor",
]

_SENT = 1 << 19  # bytes that a rank sends in an exchange
_RANKS = 16  # more of them have too many messages
_CROWDED = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > (os.cpu_count() or 1)
_POLL = 0.0 if _CROWDED else 1e-3  # seconds; who waits longer sleeps, and leaves the core to another rank
_HALF = (torch.float16, torch.bfloat16)
SUMMABLE = frozenset({*_HALF, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64})
_BETWEEN_TWO: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
_for: list[tuple[str, torch.Tensor]] = []
_IN_GRAPHS: weakref.WeakSet[Any] = weakref.WeakSet()  # groups

# torch 2.13 renamed the two and warns about the old names.
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_yield: Callable[[], Any] = getattr(os, "sched_yield", lambda: time.sleep(0))


def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Reduce a contiguous ``x`` over the group in place, as torch's does. Any shape, equal on all ranks."""
    group = default_group() if group is None else group
    if not _is_gloo(x, group):
        dist.all_reduce(x, op, group=group)
    elif op not in _BETWEEN_TWO or not _exchanges(x, x.nbytes, group):
        finish(dist.all_reduce(x, op, group=group, async_op=True))
    elif x.numel():
        x = x.detach()
        add_in_order(_from_all(x, group), x, _BETWEEN_TWO[op])


def all_gather_into_tensor(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``x``, ``[n]``, of all ranks in their order into ``out``, ``[ranks * n]``; both contiguous."""
    if not _is_gloo(x, group):
        _torch_all_gather(out, x, group=group)
    elif not _exchanges(x, x.nbytes, group):
        finish(_torch_all_gather(out, x, group=group, async_op=True))
    elif x.numel():
        rows = x.detach().expand(group.size(), -1).contiguous()
        _exchange("allgather_base", x, out.detach().view(rows.shape), rows, group)


def reduce_scatter_tensor(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``x``, ``[ranks * n]``, over the group; ``out``, ``[n]``, gets this rank's part of it. Both contiguous."""
    if not _is_gloo(x, group):
        _torch_reduce_scatter(out, x, group=group)
    elif not _exchanges(x, out.nbytes, group):
        finish(_torch_reduce_scatter(out, x, group=group, async_op=True))
    elif out.numel():
        rows = x.detach().view(group.size(), -1)
        parts = torch.empty_like(rows)
        _exchange("reduce_scatter_base", out, parts, rows, group)
        add_in_order(parts.unbind(0), out.detach())


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
    """Overwrite a contiguous ``x`` by that of the global rank ``source``."""
    finish(dist.broadcast(x, source, group=group, async_op=_is_gloo(x, group)))


def finish(work: dist.Work | None) -> None:
    """Wait for a collective of gloo; None is one that is done."""
    if work is None:
        return
    if not work.is_completed():
        end = time.perf_counter() + _POLL
        while not work.is_completed() and time.perf_counter() < end:
            _yield()
    work.wait()


def add_in_order(
    parts: Sequence[torch.Tensor], out: torch.Tensor, operation: Callable[..., torch.Tensor] = torch.add
) -> None:
    """Write the sum of the parts, in their order, into ``out``; halves are added up in fp32 and rounded once."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if out.dtype in _HALF and len(parts) > 2 and operation is torch.add:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    operation(parts[0], parts[1], out=out)
    for part in parts[2:]:
        operation(out, part, out=out)


def exchanged_for() -> tuple[str, torch.Tensor] | None:
    """Return what the exchange that is called now stands for: torch's name of it, and what a rank gives."""
    return _for[-1] if _for else None


def _exchange(
    name: str, own: torch.Tensor, received: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup
) -> None:
    _for.append((name, own))
    try:
        work = group.alltoall_base(received, rows, [], [])
    finally:
        _for.pop()
    finish(work)


def _from_all(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Exchange ``x``: that of every rank."""
    rows = x.expand(group.size(), *x.shape).contiguous()  # [ranks, *shape]
    received = torch.empty_like(rows)
    _exchange("allreduce", x, received, rows, group)
    return received.unbind(0)


def _note_graph(group_name: str) -> bool:
    _IN_GRAPHS.add(group_named(group_name))
    return True


_note_graph_once: Any = torch.compiler.assume_constant_result(_note_graph)
"""Note, while a graph is traced, that it has collectives of this group. Every rank traces its first call."""


def _is_gloo(x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether gloo carries it, and this process waits for that."""
    if not x.is_cpu:
        return False
    if torch.compiler.is_compiling():
        _note_graph_once(group.group_name)
        return False
    return "cpu:gloo" in str(dist.get_backend_config(group))


def _exchanges(x: torch.Tensor, nbytes: int, group: dist.ProcessGroup) -> bool:
    """Whether to exchange ``nbytes`` with each rank: it follows from what all ranks have alike."""
    size = group.size()
    return x.dtype in SUMMABLE and size <= _RANKS and nbytes * (size - 1) <= _SENT and group not in _IN_GRAPHS

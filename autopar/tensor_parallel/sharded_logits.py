"""Logits whose vocabulary is sharded, and which are whole for whoever reads them: gathered then, and only then.

A language model's head makes ``[..., vocab/tp]`` on each rank. Most training steps take a cross entropy of it, which
:mod:`~autopar.tensor_parallel.loss` computes from the shards, and read nothing else; gathering ``[..., vocab]`` would
move more bytes than all blocks together. :class:`ShardedLogits` is the tensor ``[..., vocab]`` that the model's own
code passes on. What a loss does to logits on the way (:func:`~autopar.tensor_parallel.logits_shards.after`) and
``F.cross_entropy`` itself are done to the shards; any other operation gathers them and goes on with a plain tensor, in
the same autograd graph, as do all views of them. So ``outputs.logits`` is what users know.

Gathering is a collective, so the ranks of the axis meet first: a rank that reads alone gets an error, not a hang.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.distributed.agree import meet
from autopar.distributed.collectives import all_gather
from autopar.distributed.derivatives import keep_none, single_backward
from autopar.foreign.tensors import tree_map_only, wrapper_subclass
from autopar.tensor_parallel.chunked_loss import sharded_cross_entropy
from autopar.tensor_parallel.logits_shards import Change, Shards, after
from autopar.tensor_parallel.whole_logits import REPEATED, WholeLogits, placed

__all__ = ["ShardedLogits", "sharded_logits"]


class ShardedLogits(WholeLogits):
    """The whole logits ``[..., vocab]``, of which this rank has a shard; made by :func:`sharded_logits`.

    Raises:
        ConsistencyError: on reading, if other ranks of the axis do not read the same within its ``read_timeout``.
    """

    shards: Shards

    @staticmethod
    def __new__(cls, shards: Shards) -> ShardedLogits:
        """Make a tensor that has the shape of the whole logits and no memory; no graph, no family yet."""
        made: ShardedLogits = wrapper_subclass(cls, shards.shape, dtype=shards.dtype, device=shards.rows.device)
        made.shards, made._whole = shards, None
        return made

    def held(self) -> str:
        """Return which columns this rank has."""
        axis, layout = self.shards.axis, self.shards.layout
        held = ", ".join(f"{start} to {stop - 1}" for start, stop in layout.ranges(axis.rank)) or "none"
        return f"{axis.name} rank {axis.rank} of {axis.size} has columns {held}"

    def parts(self) -> list[torch.Tensor]:
        """Return the shard, or what it is made of."""
        return self.shards.inputs

    def gathered(self) -> torch.Tensor:
        """Return a plain tensor of the same values. A collective of the axis."""
        _meet(self.shards)
        gathered: torch.Tensor = _Gather.apply(self)
        return gathered

    @classmethod
    def from_parts(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do to the shards what can be done to them."""
        result = _cat(*args, **kwargs) if name == "cat" else None
        return super().from_parts(func, name, args, kwargs) if result is None else result

    def after(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation makes of the shards, or None."""
        if name == "cross_entropy":
            return _cross_entropy(self, *args, **kwargs)
        shards = after(name, self.shards, args, kwargs)
        if shards is None:
            return None
        if name in REPEATED:
            copied = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            return sharded_logits(shards, self, lambda whole: func(whole, *copied[0], **copied[1]))
        return self if shards is self.shards and name != "clone" else sharded_logits(shards, self)


def sharded_logits(shards: Shards, source: ShardedLogits | None = None, step: Change | None = None) -> ShardedLogits:
    """Return the whole logits of which ``shards`` are this rank's, with gradients to what those are made of.

    Args:
        source: logits that they were made of, if not by the head.
        step: what made them, if they may share memory with ``source``.
    """
    if not torch.is_grad_enabled():
        shards = shards.detached()
    made: ShardedLogits = _Wrap.apply(shards, *shards.inputs)
    return placed(made, source, step)


def _cat(tensors: Any, dim: int = 0, **kwargs: Any) -> ShardedLogits | None:
    listed = list(tensors)
    if kwargs or not all(isinstance(x, ShardedLogits) and x.has_parts() for x in listed):
        return None
    parts = [x.shards.settled() for x in listed]
    first, dims = parts[0], len(parts[0].shape)
    same = all(x.axis is first.axis and x.layout == first.layout and len(x.shape) == dims for x in parts)
    if not same or dim % dims == dims - 1 or len({(x.dtype, x.rows.dtype) for x in parts}) > 1:
        return None
    return sharded_logits(replace(first, rows=torch.cat([x.rows for x in parts], dim)), listed[0])


def _cross_entropy(
    input: ShardedLogits,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """``F.cross_entropy`` with the classes in the last dim, ``[vocab]`` or ``[tokens, vocab]``."""
    shards = input.shards
    by_index = not target.is_floating_point() and target.shape == shards.shape[:-1]
    if len(shards.shape) > 2 or not by_index or any(x is not None for x in (weight, size_average, reduce)):
        return None
    loss = sharded_cross_entropy(shards, target, ignore_index, label_smoothing, reduction)
    input.lose()
    wide = not shards.rows.is_meta and torch.is_autocast_enabled(
        shards.rows.device.type
    )  # where torch computes losses in fp32
    return loss if wide else loss.to(shards.dtype)


def _meet(shards: Shards) -> None:
    """Raise unless all ranks of the axis are about to read the same."""
    what = f"logits {list(shards.shape)} of {shards.name}"
    meet(shards.axis, what, shards.axis.read_timeout, _ADVICE)


_ADVICE = (
    "Whole logits are gathered when they are read, which takes every tensor-parallel rank: read them on all of\n"
    "  them (if rank == 0: around the print, not around the reading: logits.argmax(-1), logits.cpu(), whatever needs\n"
    "  the vocabulary; logits + 0 does not), or have them gathered in the forward: under\n"
    "  torch.no_grad(), or always by loss: {gather_logits: always}. loss: {read_timeout: ...} waits longer."
)


class _Wrap(torch.autograd.Function):
    """From what the shards are made of to the whole logits: their place in the graph."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, *inputs: torch.Tensor) -> ShardedLogits:
        keep_none(ctx)
        ctx.shards = shards
        ctx.save_for_backward(*inputs)
        return ShardedLogits(shards)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        shards: Shards = ctx.shards
        inputs = ctx.saved_tensors
        part = shards.layout.shard(grad, shards.axis.rank, -1)  # [..., vocab/tp]
        if shards.head is None:
            return None, part.to(inputs[0].dtype)
        held = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad():
            local = shards.of_inputs(held).local()
        wanted = [x for x in held if x.requires_grad]
        found = iter(torch.autograd.grad(local, wanted, part.to(local.dtype)))
        return None, *(next(found) if x.requires_grad else None for x in held)


class _Gather(torch.autograd.Function):
    """From the whole logits to a plain tensor of the same values."""

    @staticmethod
    def forward(ctx: Any, logits: ShardedLogits) -> torch.Tensor:
        keep_none(ctx)
        shards = logits.shards
        if shards.head is not None:
            shards.head.check()
        return all_gather(shards.local(), shards.axis, shards.layout, -1).to(shards.dtype)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad

"""The cross entropy of sharded logits that a model's own loss asks for, and of logits that are never made as a whole.

With ``loss: {chunk: N}`` the head's product and the loss run over N tokens at a time, forward and again backward (Cut
Cross-Entropy, Wijmans et al. 2024, and Liger Kernel, Hsu et al. 2024, do so on one GPU; here each rank has its shard of
the vocabulary). What is kept for the backward pass is ``[tokens, hidden]``, not ``[tokens, vocab/tp]``.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.distributed.derivatives import keep_none, single_backward
from autopar.tensor_parallel.logits_shards import Shards
from autopar.tensor_parallel.loss import (
    Targets,
    VocabParallelCrossEntropy,
    check_options,
    gradient,
    losses_of,
    reduced,
    stats_of,
    wide,
)

__all__ = ["sharded_cross_entropy"]


def sharded_cross_entropy(
    shards: Shards, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> torch.Tensor:
    """Compute ``F.cross_entropy`` from this rank's part of logits ``[tokens, vocab]`` or ``[vocab]``.

    With a pending head the logits of ``shards.chunk`` tokens are the most that exist, forward and backward.

    Args:
        target: ``[tokens]`` Replicate, or a scalar.

    Returns:
        Replicate, as :func:`vocab_parallel_cross_entropy`.
    """
    axis, layout = shards.axis, shards.layout
    check_options(label_smoothing, reduction)
    widths = [layout.local_size(rank) for rank in range(axis.size)]
    rows = shards.rows.reshape(target.numel(), shards.rows.shape[-1])  # [tokens, hidden or vocab/tp]

    def losses(targets: Targets) -> torch.Tensor:
        made: torch.Tensor
        if shards.head is None:
            wide = rows.double() if shards.dtype == torch.float64 else rows
            made = VocabParallelCrossEntropy.apply(wide, targets, label_smoothing, widths, axis)
        else:
            inputs = [rows, *shards.inputs[1:]]
            made = ChunkedCrossEntropy.apply(shards, targets, label_smoothing, widths, *inputs)
        return made

    return reduced(losses, target, ignore_index, reduction, widths, widths[axis.rank], axis)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Losses ``[tokens]``, Replicate, of what logits are made of: a chunk of them at a time, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, shards: Shards, targets: Targets, smoothing: float, widths: list[int], *inputs: torch.Tensor
    ) -> torch.Tensor:
        keep_none(ctx)
        assert shards.head is not None
        shards.head.check()
        rows = inputs[0]  # [tokens, hidden]
        found = []
        for start in range(0, max(len(rows), 1), shards.chunk):
            some = slice(start, start + shards.chunk)
            local = shards.of_inputs([rows[some], *inputs[1:]]).local()  # [chunk, vocab/tp]
            found.append(stats_of(wide(local), targets.of(some), smoothing))
        loss, log_total = losses_of(torch.cat(found, 1), widths[shards.axis.rank], smoothing, widths, shards.axis)
        ctx.save_for_backward(log_total, targets.column, targets.mine, targets.ignored, *inputs)
        ctx.shards, ctx.smoothing, ctx.vocab_size = shards, smoothing, sum(widths)
        return loss.masked_fill(targets.ignored, 0.0)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_total, column, mine, ignored, *inputs = ctx.saved_tensors
        shards, targets = ctx.shards, Targets(column, mine, ignored)
        shards.head.seen.went_back = True
        # Sums over chunks are kept in fp32, as one product over all tokens would.
        sums = [torch.zeros_like(x, dtype=wide(x[:0]).dtype) if x.requires_grad else None for x in inputs[1:]]
        rows = torch.empty_like(inputs[0]) if ctx.needs_input_grad[4] else None
        for start in range(0, len(inputs[0]), shards.chunk):
            some = slice(start, start + shards.chunk)
            held = [inputs[0][some].detach(), *(x.detach() for x in inputs[1:])]
            for x, needed in zip(held, ctx.needs_input_grad[4:], strict=True):
                x.requires_grad_(needed)
            with torch.enable_grad():
                local = shards.of_inputs(held).local()  # [chunk, vocab/tp]
            found = gradient(
                local.detach(), log_total[some], targets.of(some), grad[some], ctx.smoothing, ctx.vocab_size
            )
            grads = iter(torch.autograd.grad(local, [x for x in held if x.requires_grad], found))
            if rows is not None:
                rows[some] = next(grads)
            for total in [total for total in sums if total is not None]:
                total.add_(next(grads))
        weights = [None if total is None else total.to(x.dtype) for total, x in zip(sums, inputs[1:], strict=True)]
        return None, None, None, None, rows, *weights

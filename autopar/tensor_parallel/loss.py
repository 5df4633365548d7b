"""Cross entropy of logits whose vocabulary is sharded.

The idea is from Shoeybi et al., "Megatron-LM" (2019), section 3, and
``megatron/core/tensor_parallel/cross_entropy.py``. For the logits ``x`` of a token and its target ``t``,

    loss = log(sum_c exp(x_c)) - (1 - eps) x_t - eps/V sum_c x_c

Each term is a sum or a maximum over ranks. So ranks exchange three numbers per token (four with label smoothing) in one
all-gather, where Megatron-LM needs three all-reduces. No rank has the full logits; the loss is bitwise identical on all
ranks.

With ``loss: {chunk: N}`` the product of the head and the loss run over N tokens at a time, in the forward and again in
the backward pass, which keeps ``[tokens, hidden]`` instead of ``[tokens, vocab/tp]``. Cut Cross-Entropy (Wijmans et al.
2024) and Liger Kernel (Hsu et al. 2024) do so on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autopar.compat.tensors import assert_soon
from autopar.distributed import collectives
from autopar.distributed.autograd_functions import any_order, keep_none
from autopar.distributed.axis import Axis
from autopar.errors import ConfigError

if TYPE_CHECKING:
    from autopar.tensor_parallel.sharded_logits import VocabShard


def reduced(
    losses: Callable[[Targets], torch.Tensor],
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    widths: list[int],
    width: int,
    axis: Axis,
) -> torch.Tensor:
    """Check the targets, and ``width`` against the rank's columns in ``widths``; return the reduced ``losses``."""
    flat = target.reshape(-1).long()  # [tokens]
    ignored = flat == ignore_index
    check_targets(flat, ignored, sum(widths))
    column = flat - sum(widths[: axis.rank])
    mine = (column >= 0) & (column < width)
    found = losses(Targets(column.masked_fill(~mine, 0), mine, ignored))  # [tokens]
    if reduction == "none":
        return found.view(target.shape)
    return found.sum() if reduction == "sum" else found.sum() / (~ignored).sum()


def check_options(label_smoothing: float, reduction: str) -> None:
    """Raise ConfigError for options that torch's cross entropy does not support either."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")


def check_targets(target: torch.Tensor, ignored: torch.Tensor, vocab_size: int) -> None:
    """Raise the same error on every rank, before any collective that depends on the targets."""
    fits = ((target >= 0) & (target < vocab_size)) | ignored
    if target.is_meta:
        return
    if not target.is_cpu:
        assert_soon(fits.all(), f"a target is outside the vocabulary of {vocab_size}")
    elif not fits.all():
        outside = target[~fits]
        raise ConfigError(
            f"target {int(outside[0])} is outside the vocabulary of {vocab_size} ({outside.numel()} such targets).\n"
            "  Set targets that the loss should skip to ignore_index."
        )


def _check_widths(found: torch.Tensor, widths: list[int]) -> None:
    """Check the widths that came with the all-gather, so that all ranks raise for a wrong one."""
    if found.is_meta:
        return
    if not found.is_cpu:
        expected = torch.tensor(widths, dtype=found.dtype).to(found.device, non_blocking=True)
        right = found == expected
        assert_soon(right.all(), f"the logits of the ranks must have {widths} columns")
    elif found.tolist() != widths:
        columns = [int(width) for width in found.tolist()]
        raise ConfigError(
            f"expected logits with {widths} columns on the ranks for vocab_size={sum(widths)}, got {columns}"
        )


class Targets(NamedTuple):
    """The targets of the tokens on this rank; each tensor is ``[tokens]``."""

    column: torch.Tensor  # local column of the target; 0 if another rank has it
    mine: torch.Tensor  # True if this rank has the target's column
    ignored: torch.Tensor

    def of(self, some: slice) -> Targets:
        """Return the targets of a slice of the tokens."""
        return Targets(self.column[some], self.mine[some], self.ignored[some])


def _stats_of(x: torch.Tensor, targets: Targets, label_smoothing: float) -> torch.Tensor:
    """Return local statistics, ``[3 or 4, tokens]``: maximum, sum of exponentials, logit of the target, sum."""
    tokens, width = x.shape  # [tokens, vocab/tp]
    if width:
        top = x.amax(1)  # [tokens]
        at_target = x.gather(1, targets.column.unsqueeze(1)).squeeze(1).masked_fill(~targets.mine, 0.0)
    else:  # the vocabulary has fewer entries than the group has ranks
        top = x.new_full((tokens,), -torch.inf)
        at_target = x.new_zeros(tokens)
    # A shard of -inf only (a masked vocabulary) must add 0 to the sum, not exp(-inf + inf).
    shift = top.masked_fill(top == -torch.inf, 0.0).unsqueeze(1)
    stats = [top, (x - shift).exp_().sum(1), at_target]
    return torch.stack([*stats, x.sum(1)] if label_smoothing else stats)


def _losses_of(
    stats: torch.Tensor, width: int, label_smoothing: float, widths: list[int], axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token and its log-sum-exp; both ``[tokens]`` and replicated."""
    kinds, tokens = stats.shape
    sent = torch.cat([stats.view(-1), stats.new_full((1,), width)])  # [kinds * tokens + 1]
    gathered = collectives.gather(sent.unsqueeze(0), axis, axis.one_each, 0)
    _check_widths(gathered[:, -1], widths)
    table = gathered[:, :-1].view(axis.size, kinds, tokens)
    tops, sums, at_targets, *rest = table.unbind(1)  # [axis.size, tokens] each

    top = tops.amax(0)  # [tokens]
    log_sum = (sums * (tops - top).exp()).sum(0).log()
    loss = top - at_targets.sum(0) + log_sum  # in this order exactly 0 if the target has probability 1
    if label_smoothing:
        smooth = top - rest[0].sum(0) / sum(widths) + log_sum
        loss = (1.0 - label_smoothing) * loss + label_smoothing * smooth
    return loss, top + log_sum


def _gradient(
    logits: torch.Tensor,
    log_total: torch.Tensor,
    targets: Targets,
    grad: torch.Tensor,
    label_smoothing: float,
    vocab_size: int,
) -> torch.Tensor:
    """Return the gradient of the logits, ``[tokens, vocab/tp]``, from the gradient of the losses, ``[tokens]``."""
    out = (_wide(logits) - log_total.unsqueeze(1)).exp_()  # softmax
    if logits.shape[1]:
        at_target = targets.mine.to(out.dtype).unsqueeze(1) * (label_smoothing - 1.0)
        out.scatter_add_(1, targets.column.unsqueeze(1), at_target)
    if label_smoothing:
        out -= label_smoothing / vocab_size
    out *= grad.unsqueeze(1)
    # Do not multiply by 0: the mean over zero tokens has an infinite gradient.
    out.masked_fill_(targets.ignored.unsqueeze(1), 0.0)
    return out.to(logits.dtype)


def _differentiable(
    logits: torch.Tensor,
    log_total: torch.Tensor,
    targets: Targets,
    grad: torch.Tensor,
    label_smoothing: float,
    vocab_size: int,
    axis: Axis,
) -> torch.Tensor:
    """Compute :func:`_gradient` differentiably in the logits of all ranks and in ``grad``."""
    x = _wide(logits)
    total = collectives.reduce((x - log_total.unsqueeze(1)).exp().sum(1), axis)  # 1 for each token
    log_sum = collectives.copy(log_total + total.log(), axis)  # each rank computes its columns from it
    out = (x - log_sum.unsqueeze(1)).exp()
    at_target = torch.zeros_like(x)
    if logits.shape[1]:
        at_target.scatter_(1, targets.column.unsqueeze(1), targets.mine.to(x.dtype).unsqueeze(1))
    out = out - (1.0 - label_smoothing) * at_target - label_smoothing / vocab_size
    out = out * collectives.copy(grad, axis).unsqueeze(1)
    return out.masked_fill(targets.ignored.unsqueeze(1), 0.0).to(logits.dtype)


def _again(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients for all tokens at once, since a graph of them is kept for second derivatives."""
    log_total, column, mine, ignored, *saved = ctx.saved_tensors
    facts = (log_total, Targets(column, mine, ignored), grad, ctx.smoothing, ctx.vocab_size, ctx.axis)
    if ctx.shards is None:
        return *(None,) * 5, _differentiable(saved[0], *facts)
    ctx.shards.head.seen.went_back = True
    return *(None,) * 5, *ctx.shards.through_head(saved, lambda local: _differentiable(local, *facts))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float32 or float64; the tensor itself if its dtype is one of them."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def sharded_cross_entropy(
    shards: VocabShard, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> torch.Tensor:
    """Compute ``F.cross_entropy`` from the local shard of logits ``[tokens, vocab]`` or ``[vocab]``.

    ``target`` is ``[tokens]`` or a scalar. The result is replicated: ``[tokens]`` for ``"none"``, else a scalar;
    float32, or float64 for float64 logits. With a pending head only ``shards.chunk`` tokens have logits at a time.
    """
    axis, layout = shards.axis, shards.layout
    check_options(label_smoothing, reduction)
    widths = [layout.local_size(rank) for rank in range(axis.size)]
    rows = shards.rows.reshape(target.numel(), shards.rows.shape[-1])  # [tokens, hidden or vocab/tp]

    def losses(targets: Targets) -> torch.Tensor:
        deep = rows.double() if shards.head is None and shards.dtype == torch.float64 else rows
        pending = None if shards.head is None else shards
        inputs = [deep, *shards.inputs[1:]]
        made: torch.Tensor = ShardedCrossEntropy.apply(pending, targets, label_smoothing, widths, axis, *inputs)
        return made

    return reduced(losses, target, ignore_index, reduction, widths, widths[axis.rank], axis)


class ShardedCrossEntropy(torch.autograd.Function):
    """Compute losses ``[tokens]``, Replicate, from logits ``[tokens, vocab/tp]``, Shard(1), without a copy of them.

    With ``shards`` the inputs are the inputs of its head, and one chunk of logits is computed at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shards: VocabShard | None,
        targets: Targets,
        smoothing: float,
        widths: list[int],
        axis: Axis,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        keep_none(ctx)
        rows = inputs[0]  # [tokens, hidden or vocab/tp]
        if shards is None:
            stats, width = _stats_of(_wide(rows), targets, smoothing), rows.shape[1]
        else:
            assert shards.head is not None
            shards.head.check()
            found, width = [], widths[axis.rank]
            for start in range(0, max(len(rows), 1), shards.chunk):
                some = slice(start, start + shards.chunk)
                local = shards.of_inputs([rows[some], *inputs[1:]]).local()  # [chunk, vocab/tp]
                found.append(_stats_of(_wide(local), targets.of(some), smoothing))
            stats = torch.cat(found, 1)
        loss, log_total = _losses_of(stats, width, smoothing, widths, axis)
        ctx.save_for_backward(log_total, targets.column, targets.mine, targets.ignored, *inputs)
        ctx.shards, ctx.smoothing, ctx.vocab_size, ctx.axis = shards, smoothing, sum(widths), axis
        return loss.masked_fill(targets.ignored, 0.0)

    @staticmethod
    @any_order(_again)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_total, column, mine, ignored, *inputs = ctx.saved_tensors
        shards, targets = ctx.shards, Targets(column, mine, ignored)
        if shards is None:
            return *(None,) * 5, _gradient(inputs[0], log_total, targets, grad, ctx.smoothing, ctx.vocab_size)
        shards.head.seen.went_back = True
        # fp32 sums over chunks, since one product over all tokens accumulates in fp32 too
        sums = [torch.zeros_like(x, dtype=_wide(x[:0]).dtype) if x.requires_grad else None for x in inputs[1:]]
        rows = torch.empty_like(inputs[0]) if ctx.needs_input_grad[5] else None
        for start in range(0, len(inputs[0]), shards.chunk):
            some = slice(start, start + shards.chunk)
            held = [inputs[0][some].detach(), *(x.detach() for x in inputs[1:])]
            for x, needed in zip(held, ctx.needs_input_grad[5:], strict=True):
                x.requires_grad_(needed)
            with torch.enable_grad():
                local = shards.of_inputs(held).local()  # [chunk, vocab/tp]
            found = _gradient(
                local.detach(), log_total[some], targets.of(some), grad[some], ctx.smoothing, ctx.vocab_size
            )
            grads = iter(torch.autograd.grad(local, [x for x in held if x.requires_grad], found))
            if rows is not None:
                rows[some] = next(grads)
            for total in [total for total in sums if total is not None]:
                total.add_(next(grads))
        weights = [None if total is None else total.to(x.dtype) for total, x in zip(sums, inputs[1:], strict=True)]
        return *(None,) * 5, rows, *weights

"""Cross entropy of logits whose vocabulary is sharded.

Shoeybi et al., "Megatron-LM" (2019), section 3, has the idea; upstream is
``megatron/core/tensor_parallel/cross_entropy.py``. With ``x`` a token's logits and ``t`` its target,

    loss = log(sum_c exp(x_c)) - (1 - eps) x_t - eps/V sum_c x_c

Each term is a sum (or a max) over ranks, so ranks exchange three numbers a token, four with label smoothing, in **one**
all-gather (Megatron: three all-reduces); no rank has the full logits. Every rank gets bitwise the same loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from autopar.distributed import collectives
from autopar.distributed.axis import Axis, Group, axis_of
from autopar.distributed.collectives import even_layout
from autopar.distributed.derivatives import keep_none, single_backward
from autopar.errors import ConfigError
from autopar.foreign.tensors import assert_soon
from autopar.layout import even_shards

__all__ = [
    "Targets",
    "VocabParallelCrossEntropy",
    "check_options",
    "gradient",
    "losses_of",
    "reduced",
    "stats_of",
    "vocab_parallel_cross_entropy",
    "wide",
]

Reduction = Literal["none", "mean", "sum"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    vocab_size: int | None = None,
    group: Group | None = None,
) -> torch.Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` from sharded logits: the same values and gradients.

    Args:
        logits: ``[..., vocab/tp]`` Shard(-1), this rank's columns; not changed. Ranks may hold different numbers of
            columns, some none at all. The vocabulary is the last dim, not dim 1 as in torch.
        target: ``[...]`` Replicate: class indices in the whole vocabulary.
        label_smoothing: share of the target probability that is spread evenly over the whole vocabulary.
        ignore_index: targets of this value have loss 0 and no gradient, and do not count in the mean.
        reduction: ``"none"`` (Megatron's), ``"mean"`` over the tokens that are not ignored (nan if all are, as in
            torch), or ``"sum"``.
        vocab_size: columns of all ranks together, sharded by :func:`autopar.layout.even_shards`. If None, ranks
            exchange their widths first: one more, tiny, all-gather (and, on a GPU, a wait for it).
        group: a process group or an MPU; required.

    Returns:
        Replicate; ``[...]`` for ``"none"``, else a scalar. float32, or float64 for float64 logits: half-precision
        logits are computed in float32.

    Raises:
        ConfigError: on every rank, if the shapes do not match, a target is outside the vocabulary, ``label_smoothing``
            or ``reduction`` is none of torch's, or the ranks' widths are not the shares of ``vocab_size``. On GPUs
            targets and widths are asserted on the device, as in torch, to spare a wait.
    """
    axis = axis_of(group)
    _check_arguments(logits, target, label_smoothing, reduction)
    if vocab_size is None:
        width = torch.tensor([logits.shape[-1]], device=logits.device)
        widths = collectives.gather(width, axis, even_layout(axis.size, axis.size), 0).tolist()
    else:
        widths = [stop - start for start, stop in even_shards(vocab_size, axis.size)]

    rows = logits.reshape(target.numel(), logits.shape[-1])  # [tokens, vocab/tp]

    def losses(targets: Targets) -> torch.Tensor:
        made: torch.Tensor = VocabParallelCrossEntropy.apply(rows, targets, label_smoothing, widths, axis)
        return made

    return reduced(losses, target, ignore_index, reduction, widths, logits.shape[-1], axis)


def reduced(
    losses: Callable[[Targets], torch.Tensor],
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    widths: list[int],
    width: int,
    axis: Axis,
) -> torch.Tensor:
    """Check the targets, compute their ``losses`` and reduce them; ``width``: columns that this rank really has."""
    flat = target.reshape(-1).long()  # [tokens]
    ignored = flat == ignore_index
    check_targets(flat, ignored, sum(widths))
    found = losses(_find(flat, ignored, sum(widths[: axis.rank]), width))  # [tokens]
    if reduction == "none":
        return found.view(target.shape)
    return found.sum() if reduction == "sum" else found.sum() / (~ignored).sum()


def _check_arguments(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduction: str) -> None:
    if not logits.is_floating_point() or logits.dim() == 0:
        raise ConfigError(
            f"logits must be floating point of shape [..., vocab/tp], not {logits.dtype} {list(logits.shape)}"
        )
    if target.shape != logits.shape[:-1]:
        raise ConfigError(f"target of shape {list(target.shape)} does not fit logits of shape {list(logits.shape)}")
    if target.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"target must hold class indices (int64 or int32), not {target.dtype}")
    check_options(label_smoothing, reduction)


def check_options(label_smoothing: float, reduction: str) -> None:
    """Raise ConfigError for what torch's cross entropy does not take either."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing must be between 0 and 1, not {label_smoothing}")
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"reduction must be 'none', 'mean' or 'sum', not {reduction!r}")


def check_targets(target: torch.Tensor, ignored: torch.Tensor, vocab_size: int) -> None:
    """Raise before any collective that depends on the targets, and the same on every rank."""
    fits = ((target >= 0) & (target < vocab_size)) | ignored
    if target.is_meta:
        return
    if not target.is_cpu:
        assert_soon(fits.all(), f"a target is outside the vocabulary of {vocab_size}")
    elif not fits.all():
        outside = target[~fits]
        raise ConfigError(
            f"target {int(outside[0])} is outside the vocabulary of {vocab_size} ({outside.numel()} such targets); "
            "targets to leave out must be ignore_index"
        )


def _check_widths(found: torch.Tensor, widths: list[int]) -> None:
    """Check the widths that came with the all-gather, so that all ranks know of a wrong one."""
    if found.is_meta:
        return
    if not found.is_cpu:
        expected = torch.tensor(widths, dtype=found.dtype).to(found.device, non_blocking=True)  # nobody waits for it
        right = found == expected
        assert_soon(right.all(), f"the ranks' logits are not {widths} columns wide")
    elif found.tolist() != widths:
        columns = [int(width) for width in found.tolist()]
        raise ConfigError(
            f"logits have {columns} columns on the ranks, the shares of vocab_size={sum(widths)} are {widths}"
        )


class Targets(NamedTuple):
    """Where this rank finds the tokens' targets; each ``[tokens]``."""

    column: torch.Tensor  # 0 where the target is another rank's
    mine: torch.Tensor
    ignored: torch.Tensor

    def of(self, some: slice) -> Targets:
        """Return those of some tokens."""
        return Targets(self.column[some], self.mine[some], self.ignored[some])


def _find(target: torch.Tensor, ignored: torch.Tensor, start: int, width: int) -> Targets:
    column = target - start
    mine = (column >= 0) & (column < width)
    return Targets(column.masked_fill(~mine, 0), mine, ignored)


def stats_of(x: torch.Tensor, targets: Targets, label_smoothing: float) -> torch.Tensor:
    """Return this rank's part, ``[3 or 4, tokens]``: maximum, sum of exponentials, logit of the target, sum."""
    tokens, width = x.shape  # [tokens, vocab/tp]
    if width:
        top = x.amax(1)  # [tokens]
        at_target = x.gather(1, targets.column.unsqueeze(1)).squeeze(1).masked_fill(~targets.mine, 0.0)
    else:  # the vocabulary has fewer entries than the group has ranks
        top = x.new_full((tokens,), -torch.inf)
        at_target = x.new_zeros(tokens)
    # A shard of nothing but -inf (a masked vocabulary) adds 0 to the sum, not exp(-inf + inf).
    shift = top.masked_fill(top == -torch.inf, 0.0).unsqueeze(1)
    stats = [top, (x - shift).exp_().sum(1), at_target]
    return torch.stack([*stats, x.sum(1)] if label_smoothing else stats)


def losses_of(
    stats: torch.Tensor, width: int, label_smoothing: float, widths: list[int], axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss, and the logarithm of its sum of exponentials; ``[tokens]``, the same on all ranks."""
    kinds, tokens = stats.shape
    sent = torch.cat([stats.view(-1), stats.new_full((1,), width)])  # [kinds * tokens + 1]
    gathered = collectives.gather(sent.unsqueeze(0), axis, even_layout(axis.size, axis.size), 0)
    _check_widths(gathered[:, -1], widths)
    table = gathered[:, :-1].view(axis.size, kinds, tokens)
    tops, sums, at_targets, *rest = table.unbind(1)  # [axis.size, tokens] each

    top = tops.amax(0)  # [tokens]
    log_sum = (sums * (tops - top).exp()).sum(0).log()
    loss = top - at_targets.sum(0) + log_sum  # this order: exactly 0 where the target is all of the probability
    if label_smoothing:
        smooth = top - rest[0].sum(0) / sum(widths) + log_sum
        loss = (1.0 - label_smoothing) * loss + label_smoothing * smooth
    return loss, top + log_sum


def gradient(
    logits: torch.Tensor,
    log_total: torch.Tensor,
    targets: Targets,
    grad: torch.Tensor,
    label_smoothing: float,
    vocab_size: int,
) -> torch.Tensor:
    """Return the gradient ``[tokens, vocab/tp]`` of the logits from that of the losses, ``[tokens]``."""
    out = (wide(logits) - log_total.unsqueeze(1)).exp_()  # softmax
    if logits.shape[1]:
        at_target = targets.mine.to(out.dtype).unsqueeze(1) * (label_smoothing - 1.0)
        out.scatter_add_(1, targets.column.unsqueeze(1), at_target)
    if label_smoothing:
        out -= label_smoothing / vocab_size
    out *= grad.unsqueeze(1)
    # Not by multiplication with 0: the mean over no token at all has an infinite gradient.
    out.masked_fill_(targets.ignored.unsqueeze(1), 0.0)
    return out.to(logits.dtype)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses ``[tokens]``, Replicate, of logits ``[tokens, vocab/tp]``, Shard(1). Keeps no copy of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: Targets, label_smoothing: float, widths: list[int], axis: Axis
    ) -> torch.Tensor:
        keep_none(ctx)
        stats = stats_of(wide(logits), targets, label_smoothing)
        loss, log_total = losses_of(stats, logits.shape[1], label_smoothing, widths, axis)
        ctx.save_for_backward(logits, log_total, targets.column, targets.mine, targets.ignored)
        ctx.label_smoothing, ctx.vocab_size = label_smoothing, sum(widths)
        return loss.masked_fill(targets.ignored, 0.0)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, log_total, *targets = ctx.saved_tensors
        found = gradient(logits, log_total, Targets(*targets), grad, ctx.label_smoothing, ctx.vocab_size)
        return found, None, None, None, None


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return at least float32; the tensor itself if it is that already."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()

"""Cross entropy of logits whose vocabulary is sharded, and the loss of Hugging Face language models by it.

Shoeybi et al., "Megatron-LM" (2019), section 3, has the idea; upstream is
``megatron/core/tensor_parallel/cross_entropy.py``. With ``x`` a token's logits and ``t`` its target,

    loss = log(sum_c exp(x_c)) - (1 - eps) x_t - eps/V sum_c x_c

Each term is a sum (or a max) over ranks, so ranks exchange three numbers a token, four with label smoothing, in **one**
all-gather (Megatron: three all-reduces); no rank has the full logits. Every rank gets bitwise the same loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from autopar.distributed import collectives
from autopar.distributed.axis import Axis, Group, axis_of
from autopar.distributed.collectives import even_layout
from autopar.errors import ConfigError
from autopar.layout import even_shards
from autopar.tensor_parallel.regions import Region

__all__ = ["CausalLoss", "attach_loss", "detach_loss", "vocab_parallel_cross_entropy"]

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

    flat_target = target.reshape(-1).long()  # [tokens]
    ignored = flat_target == ignore_index
    _check_targets(flat_target, ignored, sum(widths))
    losses: torch.Tensor = _VocabParallelCrossEntropy.apply(
        logits.reshape(target.numel(), logits.shape[-1]),  # [tokens, vocab/tp]
        flat_target,
        ignored,
        label_smoothing,
        widths,
        axis,
    )
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


def _check_arguments(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, reduction: str) -> None:
    if not logits.is_floating_point() or logits.dim() == 0:
        raise ConfigError(
            f"logits must be floating point of shape [..., vocab/tp], not {logits.dtype} {list(logits.shape)}"
        )
    if target.shape != logits.shape[:-1]:
        raise ConfigError(f"target of shape {list(target.shape)} does not fit logits of shape {list(logits.shape)}")
    if target.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"target must hold class indices (int64 or int32), not {target.dtype}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing must be between 0 and 1, not {label_smoothing}")
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"reduction must be 'none', 'mean' or 'sum', not {reduction!r}")


def _check_targets(target: torch.Tensor, ignored: torch.Tensor, vocab_size: int) -> None:
    """Raise before any collective that depends on the targets, and the same on every rank."""
    fits = ((target >= 0) & (target < vocab_size)) | ignored
    if target.is_cuda:
        torch._assert_async(fits.all(), f"a target is outside the vocabulary of {vocab_size}")
    elif not fits.all():
        outside = target[~fits]
        raise ConfigError(
            f"target {int(outside[0])} is outside the vocabulary of {vocab_size} ({outside.numel()} such targets); "
            "targets to leave out must be ignore_index"
        )


def _check_widths(found: torch.Tensor, widths: list[int]) -> None:
    """Check the widths that came with the all-gather, so that all ranks know of a wrong one."""
    if found.is_cuda:
        right = found == torch.tensor(widths, dtype=found.dtype, device=found.device)
        torch._assert_async(right.all(), f"the ranks' logits are not {widths} columns wide")
    elif found.tolist() != widths:
        columns = [int(width) for width in found.tolist()]
        raise ConfigError(
            f"logits have {columns} columns on the ranks, the shares of vocab_size={sum(widths)} are {widths}"
        )


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses ``[tokens]``, Replicate, of logits ``[tokens, vocab/tp]``, Shard(1). Keeps no copy of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignored: torch.Tensor,
        label_smoothing: float,
        widths: list[int],
        axis: Axis,
    ) -> torch.Tensor:
        tokens, width = logits.shape
        x = _wide(logits)  # [tokens, vocab/tp]
        start, vocab_size = sum(widths[: axis.rank]), sum(widths)
        column = target - start  # [tokens]
        mine = (column >= 0) & (column < width)
        column = column.masked_fill(~mine, 0).unsqueeze(1)  # [tokens, 1]
        if width:
            top = x.amax(1)  # [tokens]
            at_target = x.gather(1, column).squeeze(1).masked_fill(~mine, 0.0)
        else:  # the vocabulary has fewer entries than the group has ranks
            top = x.new_full((tokens,), -torch.inf)
            at_target = x.new_zeros(tokens)
        # A shard of nothing but -inf (a masked vocabulary) adds 0 to the sum, not exp(-inf + inf).
        shift = top.masked_fill(top == -torch.inf, 0.0).unsqueeze(1)
        stats = [top, (x - shift).exp_().sum(1), at_target]
        if label_smoothing:
            stats.append(x.sum(1))
        sent = torch.cat([*stats, x.new_full((1,), width)])  # [(3 or 4) * tokens + 1]

        gathered = collectives.gather(sent.unsqueeze(0), axis, even_layout(axis.size, axis.size), 0)
        _check_widths(gathered[:, -1], widths)
        table = gathered[:, :-1].view(axis.size, len(stats), tokens)
        tops, sums, at_targets, *rest = table.unbind(1)  # [axis.size, tokens] each

        top = tops.amax(0)  # [tokens]
        log_sum = (sums * (tops - top).exp()).sum(0).log()
        loss = top - at_targets.sum(0) + log_sum  # this order: exactly 0 where the target is all of the probability
        if label_smoothing:
            smooth = top - rest[0].sum(0) / vocab_size + log_sum
            loss = (1.0 - label_smoothing) * loss + label_smoothing * smooth
        ctx.save_for_backward(logits, top + log_sum, column, mine, ignored)
        ctx.label_smoothing, ctx.vocab_size = label_smoothing, vocab_size
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, log_total, column, mine, ignored = ctx.saved_tensors
        out = (_wide(logits) - log_total.unsqueeze(1)).exp_()  # [tokens, vocab/tp]: softmax
        if logits.shape[1]:
            out.scatter_add_(1, column, mine.to(out.dtype).unsqueeze(1) * (ctx.label_smoothing - 1.0))
        if ctx.label_smoothing:
            out -= ctx.label_smoothing / ctx.vocab_size
        out *= grad.unsqueeze(1)
        # Not by multiplication with 0: the mean over no token at all has an infinite gradient.
        out.masked_fill_(ignored.unsqueeze(1), 0.0)
        return out.to(logits.dtype), None, None, None, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32; the tensor itself if it is that already."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class CausalLoss:
    """``transformers.loss.loss_utils.ForCausalLMLoss``, from sharded logits where they are known.

    A head with ``gather_output`` gives every rank the full logits, and the model computes its loss from them: the same
    softmax over the whole vocabulary on every rank, in fp32. This loss recognises the tensor that the head gathered,
    and takes the loss from this rank's shard of it instead: 1/tp of the work and of the fp32 memory, the same value
    and gradients. Logits that were changed in between (soft-capping, scaling) are not recognised, and the plain loss is
    taken.

    Args:
        plain: the loss function that the model had.
        region: knows which local logits a gathered tensor was made from.
        axis: the tp axis.
    """

    def __init__(self, plain: Callable[..., torch.Tensor], region: Region, axis: Axis) -> None:
        self.plain, self.region, self.axis = plain, region, axis

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        local = self.region.local_of(logits)  # [batch, seq, vocab/tp]
        if local is None or vocab_size != logits.shape[-1]:
            return self.plain(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        if shift_labels is None:  # tokens < n predict n
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.to(local.device).reshape(-1)
        loss = vocab_parallel_cross_entropy(
            (local.float() if local.dtype == torch.float64 else local).reshape(target.numel(), local.shape[-1]),
            target,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            vocab_size=vocab_size,
            group=self.axis.group,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def attach_loss(model: PreTrainedModel, region: Region, axis: Axis) -> None:
    """Give ``model`` the loss from sharded logits, if it is a language model with transformers' standard loss."""
    head = model.get_output_embeddings()
    plan = getattr(head, "autopar", None)
    if not isinstance(head, nn.Module) or plan is None or not plan.gather_output or "_loss_function" in vars(model):
        return
    if getattr(model, "loss_function", None) is ForCausalLMLoss:
        model.loss_function = CausalLoss(ForCausalLMLoss, region, axis)
        head.keeps_local = True  # type: ignore[assignment]


def detach_loss(model: nn.Module) -> None:
    """Undo :func:`attach_loss`."""
    if isinstance(vars(model).get("_loss_function"), CausalLoss):
        del model._loss_function

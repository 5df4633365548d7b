"""The loss of a language model from logits that are still shared out.

A head with ``gather_output`` gives every rank the whole logits, and the model computes its loss from them: the same
softmax over the whole vocabulary on every rank, in fp32. Here the model's ``loss_function`` recognises the tensor that
the head gathered, and takes the loss from this rank's part of it instead: 1/tp of the work and of the fp32 memory, the
same value and gradients. Logits that went through anything in between (soft-capping, scaling) are not recognised and
take the plain way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from autopar.distributed.axis import Axis
from autopar.tensor_parallel.loss import vocab_parallel_cross_entropy
from autopar.tensor_parallel.regions import Region

__all__ = ["CausalLoss", "attach_loss", "detach_loss"]


class CausalLoss:
    """``transformers.loss.loss_utils.ForCausalLMLoss`` over shared-out logits where it can be.

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
    """Give ``model`` the loss over shared-out logits, if it is a language model with transformers' standard loss."""
    head = model.get_output_embeddings()
    plan = getattr(head, "autopar", None)
    if not isinstance(head, nn.Module) or plan is None or not plan.gather_output or "_loss_function" in vars(model):
        return
    if getattr(model, "loss_function", None) is ForCausalLMLoss:
        model.loss_function = CausalLoss(ForCausalLMLoss, region, axis)
        head.keeps_local = True  # type: ignore[assignment]


def detach_loss(model: nn.Module) -> None:
    """Inverse of :func:`attach_loss`."""
    if isinstance(vars(model).get("_loss_function"), CausalLoss):
        del model._loss_function

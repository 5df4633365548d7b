"""Evaluation of a parallelized model: every sample once, in the order of the dataset, with the loss of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.trainer_utils import has_length

from autopar.errors import ConfigError
from autopar.integrations.trainer.base import ParallelBase
from autopar.integrations.trainer.steps import rows_of

__all__ = ["EvaluationMixin"]


class EvaluationMixin(ParallelBase):
    """Loops without gradients."""

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on all ranks; what is gathered leaves out the samples that fill the last batch up."""
        replicas = self.model.mpu.dp.size
        if replicas > 1 and not has_length(getattr(dataloader, "dataset", None)):
            raise ConfigError(
                f"evaluation of a dataset without a length over {replicas} replicas: its last samples would be counted "
                "twice, since nobody knows how many there are\n  Give a dataset that has __len__."
            )
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **others: Any
    ) -> Any:
        """Evaluate a batch of this replica; samples that only fill it up do not count in the loss."""
        own = self._own_rows(inputs)
        if own is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **others)
        total = rows_of(inputs)
        divided = self._get_num_items_in_batch([inputs], self.args.device) is not None
        if divided:
            labels = inputs["labels"].clone()
            labels[own:] = -100
            inputs = {**inputs, "labels": labels}
        elif own:
            inputs = _first_rows(inputs, own, total)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **others)
        if loss is not None:
            weight = 1.0 if divided else float(own)
            loss = self._mean_over_replicas(loss if own or divided else torch.zeros_like(loss), weight)
        if not divided and own:
            logits, labels = _refill(logits, own, total), _refill(labels, own, total)
        return loss, logits, labels

    def _own_rows(self, inputs: Any) -> int | None:
        """Return how many samples of this replica's batch belong to the dataset; None if all do, on every replica."""
        state, dp = self.accelerator.gradient_state, self.model.mpu.dp
        if dp.size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return None
        rows = rows_of(inputs)
        return max(0, min(rows, state.remainder - dp.rank * rows))

    def _mean_over_replicas(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        dp = self.model.mpu.dp
        both = torch.stack([loss.double() * weight, torch.tensor(weight, dtype=torch.float64, device=loss.device)])
        dist.all_reduce(both, group=dp.group)
        return (both[0] / both[1]).to(loss.dtype)


def _first_rows(value: Any, count: int, rows: int) -> Any:
    """Take the first ``count`` of ``rows`` samples of every tensor."""
    if isinstance(value, Mapping):
        return {name: _first_rows(entry, count, rows) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_first_rows(entry, count, rows) for entry in value)
    is_batch = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == rows
    return value[:count] if is_batch else value


def _refill(value: Any, count: int, rows: int) -> Any:
    """Repeat the last sample, so that every replica has as many; they are left out of what is gathered."""
    if isinstance(value, Mapping):
        return {name: _refill(entry, count, rows) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_refill(entry, count, rows) for entry in value)
    if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != count:
        return value
    return torch.cat([value, value[-1:].expand(rows - count, *value.shape[1:])])

"""Evaluation of a parallelized model: every sample once, in the order of the dataset, with the loss of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import has_length

from autopar.distributed.failures import waiting
from autopar.distributed.gloo_collectives import all_reduce
from autopar.errors import ConfigError
from autopar.integrations.trainer.steps import ParallelBase, rows_of


class EvaluationMixin(ParallelBase):
    """Loops without gradients."""

    _items_weight: float | None = None  # of the number of items, while a batch is evaluated

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
        """Evaluate a batch of this replica; the loss is that of the batch of all replicas, on each of them.

        Samples that only fill a batch up do not count in it.
        """
        if self.model.mpu.dp.size == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **others)
        own, rows = self._own_rows(inputs), rows_of(inputs)
        batch = self._own_samples(inputs, own, rows)
        counted = _first_rows(inputs, own, rows) if 0 < own < rows else inputs
        self._items_weight, self.autopar_evaluates = self._weight_of(counted, own), True
        try:
            loss, logits, labels = super().prediction_step(model, batch, prediction_loss_only, ignore_keys, **others)
        finally:
            weight, self._items_weight, self.autopar_evaluates = self._items_weight, None, False
        if loss is not None:
            loss = self._mean_over_replicas(loss, weight)
        if rows_of(batch) < rows:
            logits, labels = _refill(logits, own, rows), _refill(labels, own, rows)
        return loss, logits, labels

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Count the items to divide by; in evaluation such that a loss is a mean over this replica's labels.

        A loss that was to be divided by the items of all replicas is to be multiplied by their number, too.
        """
        items = super()._get_num_items_in_batch(*args, **kwargs)
        if items is None or not self._items_weight or not self.args.average_tokens_across_devices:
            return items
        return items * self._items_weight

    def _own_samples(self, inputs: Any, own: int, rows: int) -> Any:
        """Return the first ``own`` of ``rows`` samples, or all, of which the labels of these alone count."""
        if own == rows:
            return inputs
        gathers = self.has_own_loss()  # perhaps over the replicas
        if own and not gathers:
            return _first_rows(inputs, own, rows)
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or (gathers and labels.ndim < 2):
            return inputs
        return {**inputs, "labels": labels.index_fill(0, torch.arange(own, rows, device=labels.device), -100)}

    def _own_rows(self, inputs: Any) -> int:
        """Return how many samples of this replica's batch belong to the dataset."""
        state, rows = self.accelerator.gradient_state, rows_of(inputs)
        if not state.end_of_dataloader or state.remainder <= 0:
            return rows
        return int(max(0, min(rows, state.remainder - self.model.mpu.dp.rank * rows)))

    def _mean_over_replicas(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        dp = self.model.mpu.dp
        share = loss.double() * weight if weight else torch.zeros_like(loss, dtype=torch.float64)
        with waiting(self.model.mpu, "the loss of an evaluation", dp.ranks):
            all_reduce(share, group=dp.group)
        return (share / dp.size).to(loss.dtype)


def _first_rows(value: Any, count: int, rows: int) -> Any:
    """Take the first ``count`` of ``rows`` samples of every tensor."""
    return _changed(value, lambda x: x[:count] if x.shape[0] == rows else x)


def _refill(value: Any, count: int, rows: int) -> Any:
    """Repeat the last sample, so that every replica has as many; they are left out of what is gathered."""
    return _changed(
        value, lambda x: torch.cat([x, x[-1:].expand(rows - count, *x.shape[1:])]) if x.shape[0] == count else x
    )


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the tensors in mappings, which become dicts, tuples and lists, but for those that are one number."""
    if isinstance(value, Mapping):
        return {name: _changed(entry, change) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_changed(entry, change) for entry in value)
    return change(value) if isinstance(value, torch.Tensor) and value.ndim else value

"""Micro-batches: cutting a batch into some, how much the loss of each counts, and putting their outputs together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.utils.generic import ModelOutput

from autopar.errors import ConfigError
from autopar.pipeline_parallel.messages import map_tensors

__all__ = ["batch_size", "merge_outputs", "next_batch", "shifts_labels", "split", "weights_of"]


def next_batch(data: Any) -> dict[str, Any]:
    """The batch in ``data``: itself if it is a mapping, else the next one of an iterator.

    Raises:
        ConfigError: it is neither, or what the iterator gives is no mapping.
        StopIteration: the iterator has ended.
    """
    if isinstance(data, Mapping):
        return dict(data)
    if not isinstance(data, Iterator):
        raise ConfigError(
            f"execute_pipeline takes one batch (a dict of tensors) or an iterator over batches, not a "
            f"{type(data).__name__}; of a DataLoader give iter(loader)"
        )
    batch = next(data)
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"execute_pipeline: the iterator gives a {type(batch).__name__}, not a dict of the model's arguments"
        )
    return dict(batch)


def batch_size(batch: Mapping[str, Any], main_input: str) -> int:
    """Samples in a batch: the length of dim 0 of the model's main input, or of the first tensor that has one.

    Raises:
        ConfigError: there is no tensor.
    """
    names = [main_input, "input_ids", "inputs_embeds", *batch]
    for name in names:
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.ndim:
            return value.shape[0]
    raise ConfigError(f"execute_pipeline: no tensor in the batch, only {', '.join(batch) or 'nothing'}")


def split(batch: Mapping[str, Any], samples: int, size: int | None, count: int | None) -> list[dict[str, Any]]:
    """Micro-batches of ``size`` samples (the last one may be smaller), or ``count`` of them as even as can be.

    Every tensor whose dim 0 is ``samples`` long is cut, also inside tuples, lists and dicts; everything else goes into
    each micro-batch whole. A batch of fewer samples than ``count`` gives that many micro-batches of one.
    """
    if count is not None:
        count = max(min(count, samples), 1)
        bounds = [samples * place // count for place in range(count + 1)]
    else:
        size = size or max(samples, 1)
        bounds = [*range(0, max(samples, 1), size), samples]

    def part(start: int, stop: int) -> dict[str, Any]:
        def narrow(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[start:stop] if tensor.ndim and tensor.shape[0] == samples else tensor

        return {name: map_tensors(value, narrow) for name, value in batch.items()}

    return [part(start, stop) for start, stop in pairwise(bounds)]


def weights_of(microbatches: list[dict[str, Any]], main_input: str, reduction: str, shifted: bool) -> list[float]:
    """How much the mean loss of each micro-batch counts in that of the batch; they add up to 1.

    Args:
        reduction: ``tokens``: by the labels that count (those that are not -100; without labels, by samples), which
            makes the sum the batch's own mean. ``microbatch``: alike.
        shifted: the first label of each sequence does not count, as in causal language models.
    """
    if reduction == "microbatch":
        return [1 / len(microbatches)] * len(microbatches)
    counts = [_labels(microbatch, main_input, shifted) for microbatch in microbatches]
    total = sum(counts)
    return [count / total for count in counts] if total else [0.0] * len(counts)


def _labels(microbatch: Mapping[str, Any], main_input: str, shifted: bool) -> int:
    labels = microbatch.get("shift_labels", microbatch.get("labels"))
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim == 0:
        return batch_size(microbatch, main_input)
    if shifted and labels.ndim > 1 and microbatch.get("shift_labels") is None:
        labels = labels[..., 1:]
    return int((labels != -100).sum())


def merge_outputs(outputs: list[Any], sizes: list[int], weights: list[float]) -> Any:
    """One output from those of the micro-batches: tensors with one row per sample are put together, others averaged.

    Args:
        sizes: samples of each micro-batch.
        weights: how much each counts in an average (of losses).
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        parts = [output.detach() for output in outputs]
        if all(part.ndim and part.shape[0] == size for part, size in zip(parts, sizes, strict=True)):
            return torch.cat(parts)
        if first.is_floating_point() and all(part.shape == first.shape for part in parts):
            return sum(_counted(part, weight) for part, weight in zip(parts, weights, strict=True))
        return torch.cat(parts) if first.ndim else first.detach()
    if isinstance(first, Cache):
        return None
    if isinstance(first, ModelOutput):
        return type(first)(**{name: merge_outputs([o[name] for o in outputs], sizes, weights) for name in first})
    if isinstance(first, dict):
        return {name: merge_outputs([o[name] for o in outputs], sizes, weights) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(merge_outputs(list(entries), sizes, weights) for entries in zip(*outputs, strict=True))
    return first


def _counted(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """The loss of a micro-batch without labels is not a number; it does not count."""
    return loss * weight if weight else torch.zeros_like(loss)


def shifts_labels(model: Any) -> bool:
    """Whether the model's own loss leaves out the first label of each sequence, as those of causal models do."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None:
        return False
    if "loss_function" in code.co_names:
        own = vars(model).get("_loss_function")
        function = getattr(own, "plain", own) or LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss)
        return function is ForCausalLMLoss
    return "shift_labels" in code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]

"""Micro-batches: split a batch, weigh their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from autopar.errors import ConfigError
from autopar.pipeline_parallel.p2p import map_tensors
from autopar.pipeline_parallel.sample_rows import sample_rows

__all__ = [
    "batch_size",
    "label_count",
    "next_batch",
    "split",
    "weights_of",
    "weights_over_replicas",
]


def next_batch(data: Any) -> dict[str, Any]:
    """Return the batch in ``data``: itself if it is a mapping, else the next one of an iterator.

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
    """Count the samples in a batch: the length of dim 0 of the model's main input, or of the first tensor that has one.

    Raises:
        ConfigError: there is no tensor.
    """
    names = [main_input, "input_ids", "inputs_embeds", *batch]
    for name in names:
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.ndim:
            return value.shape[0]
    raise ConfigError(f"execute_pipeline: no tensor in the batch, only {', '.join(batch) or 'nothing'}")


def split(
    batch: Mapping[str, Any], samples: int, size: int | None, count: int | None, config: Any = None
) -> list[dict[str, Any]]:
    """Split a batch into micro-batches of ``size`` samples (the last may be smaller), or ``count`` as even as can be.

    Every tensor whose dim 0 is ``samples`` long is split, also inside tuples, lists and dicts; everything else goes
    into each micro-batch whole. ``position_ids`` of several kinds, ``[kinds, batch, seq]``, are split in dim 1. A batch
    of fewer samples than ``count`` gives that many micro-batches of one. Images, and targets in several rows of each
    sample, go with their samples (:func:`~autopar.pipeline_parallel.sample_rows.sample_rows`); a micro-batch without
    images has no argument for them.

    Args:
        config: of the model, which says what stands for an image in the text.

    Raises:
        ConfigError: it cannot be told to which samples images belong.
    """
    if count is not None:
        count = max(min(count, samples), 1)
        bounds = [samples * place // count for place in range(count + 1)]
    else:
        size = size or max(samples, 1)
        bounds = [*range(0, max(samples, 1), size), samples]

    rows = sample_rows(batch, samples, config) if len(bounds) > 2 else {}

    def part(start: int, stop: int) -> dict[str, Any]:
        def narrow(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
            if tensor.ndim <= dim or tensor.shape[dim] != samples:
                return tensor
            return _apart(tensor.narrow(dim, start, stop - start))

        own = {name: (starts[start], starts[stop]) for name, starts in rows.items()}
        return {
            name: _apart(value[slice(*own[name])])
            if name in own
            else narrow(value, 1)
            if _of_several_kinds(name, value)
            else map_tensors(value, narrow)
            for name, value in batch.items()
            if name not in own or own[name][0] < own[name][1]
        }

    return [part(start, stop) for start, stop in pairwise(bounds)]


def _apart(part: Any) -> Any:
    """A part of a tensor, of its own where a model may write: some do into their labels. Lists are apart."""
    return part.clone() if isinstance(part, torch.Tensor) and not part.is_floating_point() else part


def _of_several_kinds(name: str, value: Any) -> bool:
    """Multimodal rotary positions: of time, height and width."""
    return name == "position_ids" and isinstance(value, torch.Tensor) and value.ndim == 3


def weights_of(
    microbatches: list[dict[str, Any]],
    main_input: str,
    reduction: str,
    shifted: bool,
    count: Callable[[dict[str, Any]], Any] | None = None,
) -> list[float]:
    """Return how much the loss of each micro-batch counts in that of the batch; weights of means add up to 1.

    Args:
        reduction: ``tokens``: by the labels that count (those that are not -100; without labels, by samples), which
            makes the sum the batch's own mean. ``microbatch``: alike. ``sum``: the losses are shares, which add up.
        shifted: the first label of each sequence does not count, as in causal language models.
        count: what the loss of a micro-batch is a mean over, instead of the labels.
    """
    if reduction == "sum":
        return [1.0] * len(microbatches)
    if reduction == "microbatch":
        return [1 / len(microbatches)] * len(microbatches)
    found = [_labels_in(m, main_input, shifted) if count is None else count(m) for m in microbatches]
    tensors = [count for count in found if isinstance(count, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())  # one wait for a GPU, not one of each micro-batch
    counts = [next(numbers) if isinstance(count, torch.Tensor) else count for count in found]
    total = sum(counts)
    return [count / total for count in counts] if total else [0.0] * len(counts)


def weights_over_replicas(weights: list[float], counts: list[float], replica: int) -> list[float]:
    """Return weights that make the mean of the replicas' gradients that of the global batch.

    Args:
        weights: of the micro-batches within this replica.
        counts: of every replica; each counts by its own.
        replica: place of this one.
    """
    total = sum(counts)
    factor = counts[replica] * len(counts) / total if total else 1.0
    return [weight * factor for weight in weights]


def label_count(microbatch: Mapping[str, Any], main_input: str, shifted: bool) -> int:
    """Count the labels of a batch that count in its loss; its samples, if it has none."""
    return int(_labels_in(microbatch, main_input, shifted))


def _labels_in(microbatch: Mapping[str, Any], main_input: str, shifted: bool) -> torch.Tensor | int:
    labels = microbatch.get("shift_labels", microbatch.get("labels"))
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim == 0:
        return batch_size(microbatch, main_input)
    if shifted and labels.ndim > 1 and microbatch.get("shift_labels") is None:
        labels = labels[..., 1:]
    return (labels != -100).sum()

"""Micro-batches: split a batch, weigh their losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import (
    LOSS_MAPPING,
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)

from autopar.checks.router_loss import adds_router_loss
from autopar.errors import ConfigError
from autopar.foreign.transformers import set_loss_function
from autopar.pipeline_parallel.p2p import map_tensors
from autopar.pipeline_parallel.sample_rows import sample_rows

__all__ = [
    "batch_size",
    "default_reduction",
    "divides_by_items",
    "label_count",
    "next_batch",
    "own_loss",
    "shifts_labels",
    "split",
    "weights_of",
    "weights_over_replicas",
]

_MEANS = (ForCausalLMLoss, ForMaskedLMLoss, ForSequenceClassificationLoss, ForTokenClassification)
_LABELS = ("labels", "shift_labels")
_LOSSES = frozenset(("CrossEntropyLoss", "cross_entropy", "loss_fct", "loss_function"))
_OTHER_TARGETS = ("label", "target", "_positions", "masked_pos", "mask_time_indices", "observed_mask")  # parts of names


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


def own_loss(outputs: Any) -> Any:
    """Return the loss of a model's outputs: ``outputs.loss``, ``outputs["loss"]``, or the only number; or None.

    A plain module often returns ``(logits, loss)``, or its loss alone.
    """
    if hasattr(outputs, "loss"):
        return outputs.loss
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    entries = outputs if isinstance(outputs, list | tuple) else [outputs]
    numbers = [x for x in entries if isinstance(x, torch.Tensor) and x.ndim == 0 and x.is_floating_point()]
    return numbers[0] if len(numbers) == 1 else None


def default_reduction(model: Any, batch: Mapping[str, Any], microbatches: int) -> str:
    """Return how the model's own losses of micro-batches make up that of the batch: see :func:`weights_of`.

    ``tokens`` where they are means over the labels that are not -100; ``sum`` where the model divides them by
    ``num_items_in_batch``. What is neither cannot be put together, and is one micro-batch's mean.

    Raises:
        ConfigError: it is neither, and there are several micro-batches. From the model and the batch's names only, so
            the same on every rank.
    """
    reason = _no_mean_over_labels(model, batch)
    if reason is None:
        return "sum" if divides_by_items(model, batch) else "tokens"
    if microbatches > 1:
        raise ConfigError(
            f"execute_pipeline: the loss of {type(model).__name__} over {microbatches} micro-batches is not the mean "
            f"of theirs by labels: {reason}.\n"
            "  Give criterion=lambda outputs, inputs: ... (a mean over the labels of one micro-batch), or one "
            "micro-batch\n  (pipeline.microbatch_size = the batch's samples); pipeline.loss_reduction: microbatch "
            "takes the mean of their losses."
        )
    return "microbatch"


def _no_mean_over_labels(model: Any, batch: Mapping[str, Any]) -> str | None:
    """Why the model's own loss is no mean over ``labels``; None if it is one, as far as can be seen."""
    if not isinstance(model, PreTrainedModel):
        return "it is a module of your own, which does not say over what its loss is a mean"
    given = {name: value for name, value in batch.items() if value is not None}
    others = [name for name in given if name not in _LABELS and any(part in name for part in _OTHER_TARGETS)]
    if others:
        return f"the batch has targets besides labels ({', '.join(others)})"
    if not isinstance(given.get("labels", torch.empty(0)), torch.Tensor):
        return f"labels is a {type(given['labels']).__name__}, not a tensor"
    if "ctc_loss_reduction" in _names_in_forward(model):
        return f"it is a CTC loss (config.ctc_loss_reduction: {getattr(model.config, 'ctc_loss_reduction', None)})"
    function = _loss_function(model)
    if function in LOSS_MAPPING.values() and function not in _MEANS:
        return f"it is transformers' {getattr(function, '__name__', function)}"
    return "it has the routers' auxiliary loss (output_router_logits)" if adds_router_loss(model, given) else None


def divides_by_items(model: Any, batch: Mapping[str, Any]) -> bool:
    """Whether the model takes a sum over labels and divides it by the batch's ``num_items_in_batch``."""
    labels = batch.get("shift_labels", batch.get("labels"))
    if batch.get("num_items_in_batch") is None or not getattr(model, "accepts_loss_kwargs", True):
        return False
    if isinstance(labels, torch.Tensor) and labels.is_floating_point():
        return False
    return not {"loss_function", "num_items_in_batch"}.isdisjoint(_names_in_forward(model))


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


def shifts_labels(model: Any) -> bool:
    """Check whether the model's own loss leaves out the first label of each sequence, as those of causal models do."""
    code = _code_of_forward(model)
    if code is None:
        return False
    if _is_encoder_decoder(model) and _names_an_argument(code, "shift_labels"):
        return False  # they give their labels as those of a shift that has been done
    function = _loss_function(model)
    if function is not None:
        return function is ForCausalLMLoss
    if "shift_labels" in code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]:
        return True
    if not _LOSSES.isdisjoint(_names_in_forward(model)):
        return False
    inside = [module for name, module in model.named_children() if name in code.co_names]  # which get the labels
    return any(
        isinstance(module, PreTrainedModel) and shifts_labels(module)
        for module in inside
        if "labels" in inspect.signature(module.forward).parameters
    )


def _is_encoder_decoder(model: Any) -> bool:
    config = getattr(model, "config", None)
    configs = (config, getattr(config, "text_config", None))
    return any(getattr(each, "is_encoder_decoder", False) for each in configs)


def _names_an_argument(code: Any, name: str) -> bool:
    """Whether a forward calls something with ``name=``."""
    return any(isinstance(names, tuple) and name in names for names in code.co_consts)


def _loss_function(model: Any) -> Any:
    """Return the function that the model's forward calls as ``self.loss_function``; None if it calls none."""
    if not isinstance(model, PreTrainedModel) or "loss_function" not in _names_in_forward(model):
        return None
    own = set_loss_function(model)
    return getattr(own, "plain", own) or LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss)


def _names_in_forward(model: Any) -> set[str]:
    """Attributes, globals and variables that the model's forward names."""
    code = _code_of_forward(model)
    return set() if code is None else {*code.co_names, *code.co_varnames}


def _code_of_forward(model: Any) -> Any:
    return getattr(inspect.unwrap(type(model).forward), "__code__", None)

"""Batches for any Hugging Face model: arguments at random, with ragged padding and labels; and parts for replicas."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar.config import ParallelConfig
from autopar.errors import ConfigError, clip
from autopar.foreign.modules import BatchNorm
from autopar.pipeline_parallel.losses import OwnLoss
from autopar.policy.schema import Policy
from autopar.tools.verification.closeness import measure, tolerance_of
from autopar.tools.verification.inputs import candidates
from autopar.tools.verification.outputs import named, reseed

__all__ = ["Batch", "fit", "halves_agree", "make_batches", "part_of"]


_FIRST = 3  # ids below are padding, begin and end of sequences in many configs
_PADDED = 2  # columns at the end of the last sample
_CLASSES = 2


def make_batches(model: PreTrainedModel, *, count: int, rows: int, length: int, seed: int = 1) -> list[dict[str, Any]]:
    """Make batches that the model's forward takes.

    Args:
        count: how many; ``rows``: samples of each; ``length``: tokens of a sample.

    Raises:
        ConfigError: no inputs are known that the model runs with.
    """
    generator = torch.Generator().manual_seed(seed)
    problems: list[tuple[str, str]] = []
    try:
        for empty in candidates(model, rows, length):
            made = [_filled(model, empty, generator) for _ in range(count)]
            problem: str | None = None
            for labels in _labels(model, made, generator):
                batches = [{**inputs, **targets} for inputs, targets in zip(made, labels, strict=True)]
                problem = _why_not(model, batches[0], has_labels=bool(labels[0]))
                if problem is None:
                    return batches
            shown = ", ".join(f"{name} {list(value.shape)}" for name, value in made[0].items())
            problems.append((str(problem), shown))
    except ValueError as error:
        raise ConfigError(f"no inputs can be made for {type(model).__name__}: {error}. Give batches=[...]") from error
    problem, shown = problems[0]  # of the likeliest
    raise ConfigError(
        f"{type(model).__name__} does not run with the inputs that were made for it: {clip(problem, 300)}\n"
        f"  They were {shown}.\n"
        "  Give batches=[...] of your own to autopar.verify."
    )


def _filled(model: PreTrainedModel, candidate: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, Any]:
    vocabulary = _vocabulary(model)
    taken = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    for name, empty in candidate.items():
        if not empty.is_meta:
            inputs[name] = empty.clone()
        elif empty.is_floating_point():
            inputs[name] = torch.randn(empty.shape, generator=generator).to(empty.dtype)
        elif name == "bbox":
            inputs[name] = torch.randint(0, 8, empty.shape, generator=generator).sort(-1).values
        else:
            inputs[name] = torch.randint(min(_FIRST, vocabulary - 1), vocabulary, empty.shape, generator=generator)
    if "attention_mask" in taken and "input_ids" in inputs:
        mask = torch.ones_like(inputs["input_ids"])
        mask[-1, ..., max(1, mask.shape[-1] - _PADDED) :] = 0
        inputs["attention_mask"] = mask
    return inputs


def _vocabulary(model: PreTrainedModel) -> int:
    try:
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # towers without words
        rows = None
    try:
        config: Any = model.config.get_text_config()
    except ValueError:  # it has several
        config = model.config
    return int(rows or getattr(config, "vocab_size", None) or 16)


def _labels(
    model: PreTrainedModel, made: list[dict[str, Any]], generator: torch.Generator
) -> Iterator[list[dict[str, Any]]]:
    """Targets that a head may want, the likeliest first; at last none."""
    taken = inspect.signature(model.forward).parameters
    rows = len(next(iter(made[0].values())))
    classes = int(getattr(model.config, "num_labels", _CLASSES))
    ids = [each for inputs in made if (each := inputs.get("decoder_input_ids", inputs.get("input_ids"))) is not None]
    if "labels" in taken and ids:
        words = [{"labels": _where_real(each, inputs)} for each, inputs in zip(ids, made, strict=True)]
        if "decoder_input_ids" in made[0]:
            for inputs in made:
                inputs.pop("decoder_input_ids")  # made of the labels
            yield words
            for inputs, each in zip(made, ids, strict=True):
                inputs["decoder_input_ids"] = each
        yield words
        yield [
            {"labels": _where_real(_draw(generator, classes, each.shape), i)} for each, i in zip(ids, made, strict=True)
        ]
    if "labels" in taken:
        yield [{"labels": _draw(generator, classes, (rows,))} for _ in made]
    if "start_positions" in taken and ids:
        last = ids[0].shape[-1] - _PADDED
        yield [{name: _draw(generator, last, (rows,)) for name in ("start_positions", "end_positions")} for _ in made]
    if "return_loss" in taken:
        yield [{"return_loss": True} for _ in made]
    yield [{} for _ in made]


def _draw(generator: torch.Generator, below: int, shape: Any) -> torch.Tensor:
    return torch.randint(0, max(1, below), tuple(shape), generator=generator)


def _where_real(values: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """Labels that do not count where there is padding."""
    mask = inputs.get("attention_mask")
    return values.clone() if mask is None or mask.shape != values.shape else values.masked_fill(mask == 0, -100)


@torch.no_grad()
def _why_not(model: PreTrainedModel, batch: dict[str, Any], *, has_labels: bool) -> str | None:
    """Why a batch cannot be taken; None if it can: with labels there is a loss, which is a number."""
    training = model.training
    model.eval()
    try:
        output = named(model(**copy.deepcopy(_on(model, batch))))
    except Exception as error:  # whatever a forward stumbles over
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        model.train(training)
    loss = dict(output.items()).get("loss")
    if has_labels and loss is None:
        return "it returns no loss for labels"
    if loss is not None and not (loss.ndim == 0 and torch.isfinite(loss)):
        return f"its loss is {loss}"
    return None


def _on(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


Batch = Mapping[str, Any]


def part_of(batch: Batch, number: int, parts: int) -> dict[str, Any]:
    """The samples of one of ``parts`` replicas."""
    return {
        name: value.tensor_split(parts)[number] if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in batch.items()
    }


def fit(
    plain: nn.Module, config: ParallelConfig, batches: Sequence[Batch], given: Policy | None
) -> tuple[int, ParallelConfig]:
    """Return in how many parts the plain model takes a batch, and the config with micro-batches that it can take.

    A loss that is no mean over labels (but over pairs in a batch, or behind a norm over the batch) is not that of its
    micro-batches put together, nor is that of a model whose samples depend on each other: then there is one
    micro-batch, and the plain model's is the mean of the replicas'.
    """
    apart = any(isinstance(module, BatchNorm) for module in plain.modules())
    replicas = config.data_parallel_size(dist.get_world_size())
    try:
        if apart or "labels" not in batches[0]:
            raise ConfigError("one micro-batch")
        inner = next((module for module in plain.modules() if isinstance(module, PreTrainedModel)), plain)
        OwnLoss.of(inner, given).reduction(batches[0], 2)
        if config.pipeline_parallel_size * replicas > 1 and not _has_samples_apart(plain, batches):
            raise ConfigError("one micro-batch")
        return 1, config
    except ConfigError:
        rows = max(
            (len(value) for value in batches[0].values() if isinstance(value, torch.Tensor) and value.ndim), default=1
        )
        pipeline = replace(config.pipeline, microbatch_size=rows, num_microbatches=None)
        return replicas, replace(config, pipeline=pipeline)


def _has_samples_apart(plain: nn.Module, batches: Sequence[Batch]) -> bool:
    """Return whether the plain model's logits of the two halves of a batch are those of the whole; rank 0 tries."""
    found = [True]
    if dist.get_rank() == 0:
        training = plain.training
        plain.train()
        try:
            with torch.no_grad():
                found = [all(halves_agree(plain, batch) for batch in batches)]
        except Exception:  # what does not run in parts, or at all, is found out where it is compared
            found = [True]
        finally:
            plain.train(training)
    dist.broadcast_object_list(found)
    return found[0]


def halves_agree(plain: nn.Module, batch: Batch) -> bool:
    def logits(part: Mapping[str, Any]) -> Any:
        reseed(0)
        return dict(named(plain(**copy.deepcopy(dict(part)))).items()).get("logits")

    whole, halves = logits(batch), [logits(part_of(batch, number, 2)) for number in range(2)]
    if not isinstance(whole, torch.Tensor) or whole.shape[:1] != (sum(len(half) for half in halves),):
        return True
    return measure(torch.cat(halves), whole).relative <= tolerance_of(whole.dtype)

"""Make batches for any Hugging Face model: random arguments with ragged padding and labels. Split them for replicas.

Some models need more than the inputs of the dry run, for example images with text. This module tries one candidate
after another until the model accepts one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autopar.compat.tensors import BatchNorm
from autopar.config import ParallelConfig
from autopar.dry_run.inputs import pixel_shape, sample_inputs
from autopar.errors import ConfigError, clip, type_and_text
from autopar.pipeline_parallel.microbatch import OwnLoss
from autopar.policy.schema import Policy
from autopar.tools.verification.outputs import measure, named, of_first, reseed, tolerance_of

_FIRST = 3  # in many configs, smaller ids are special tokens
_PADDED = 2  # padding tokens of the last sample
_CLASSES = 2
_SIDE = 4  # patches per side of an image


def make_batches(model: PreTrainedModel, *, count: int, rows: int, length: int) -> list[dict[str, Any]]:
    """Make batches that the model's forward accepts.

    Args:
        count, rows, length: The numbers of batches, of samples per batch, and of tokens per sample.

    Raises:
        ConfigError: If the model does not run with any candidate.
    """
    generator = torch.Generator().manual_seed(1)
    problems: list[tuple[str, str]] = []
    try:
        for empty in _candidates(model, rows, length):
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
        name = type(model).__name__
        raise ConfigError(f"verify cannot make inputs for {name}: {error}.\n  Pass batches=[...].") from error
    problem, shown = problems[0]  # of the most likely inputs
    raise ConfigError(
        f"{type(model).__name__} does not run with generated inputs: {clip(problem, 300)}\n"
        f"  The inputs were {shown}.\n"
        "  Pass batches=[...] to autopar.verify."
    )


def _filled(model: PreTrainedModel, candidate: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, Any]:
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:  # a tower without word embeddings
        table = None
    words = getattr(table, "num_embeddings", None) or getattr(_text_config(model), "vocab_size", None)
    vocabulary = int(words or 16)
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


def _text_config(model: PreTrainedModel) -> Any:
    try:
        return model.config.get_text_config()
    except ValueError:  # several text configs
        return model.config


def _labels(
    model: PreTrainedModel, made: list[dict[str, Any]], generator: torch.Generator
) -> Iterator[list[dict[str, Any]]]:
    """Yield labels that a head may need, the most likely first, and at last no labels."""
    taken = inspect.signature(model.forward).parameters
    rows = len(next(iter(made[0].values())))
    classes = int(getattr(model.config, "num_labels", _CLASSES))
    ids = [each for inputs in made if (each := inputs.get("decoder_input_ids", inputs.get("input_ids"))) is not None]
    if "labels" in taken and ids:
        drawn = list(zip(ids, made, strict=True))
        words = [{"labels": _where_real(each, inputs)} for each, inputs in drawn]
        if "decoder_input_ids" in made[0]:
            for inputs in made:
                inputs.pop("decoder_input_ids")  # the model derives them from the labels
            yield words
            for each, inputs in drawn:
                inputs["decoder_input_ids"] = each
        yield words
        yield [{"labels": _where_real(_draw(generator, classes, each.shape), inputs)} for each, inputs in drawn]
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
    """Return labels with -100 at padding."""
    mask = inputs.get("attention_mask")
    return values.clone() if mask is None or mask.shape != values.shape else values.masked_fill(mask == 0, -100)


@torch.no_grad()
def _why_not(model: PreTrainedModel, batch: dict[str, Any], *, has_labels: bool) -> str | None:
    """Return why a model rejects a batch; None if the model runs, with a finite loss if there are labels."""
    training = model.training
    model.eval()
    try:
        output = named(model(**copy.deepcopy(on_device(batch, model.device))))
    except Exception as error:  # a forward may raise anything
        return type_and_text(error)
    finally:
        model.train(training)
    loss = dict(output.items()).get("loss")
    if has_labels and loss is None:
        return "the forward returns no loss for labels"
    if loss is not None and not (loss.ndim == 0 and torch.isfinite(loss)):
        return f"the loss is {loss}"
    return None


def on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a batch with all tensors on a device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


Batch = Mapping[str, Any]


def part_of(batch: Batch, number: int, parts: int) -> dict[str, Any]:
    """Return the samples of one of ``parts`` replicas."""
    return {
        name: value.tensor_split(parts)[number] if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in batch.items()
    }


def fit(
    plain: nn.Module, config: ParallelConfig, batches: Sequence[Batch], given: Policy | None
) -> tuple[int, ParallelConfig]:
    """Return the number of parts into which the reference model splits a batch, and the config with its micro-batches.

    Some losses are not a sum over micro-batches: contrastive losses, and losses of models with batch norm or other
    dependencies between samples. Then there is a single micro-batch, and the reference model averages over replicas.
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
    """Return whether the samples of each batch are independent. Rank 0 compares logits of half batches."""
    found = True
    if dist.get_rank() == 0:
        training = plain.training
        plain.train()
        with suppress(Exception), torch.no_grad():  # a failing model is reported later, in the comparison
            found = all(halves_agree(plain, batch) for batch in batches)
        plain.train(training)
    return bool(of_first(found))


def halves_agree(plain: nn.Module, batch: Batch) -> bool:
    def logits(part: Mapping[str, Any]) -> Any:
        reseed(0)
        return dict(named(plain(**copy.deepcopy(dict(part)))).items()).get("logits")

    expected, halves = logits(batch), [logits(part_of(batch, number, 2)) for number in range(2)]
    if not isinstance(expected, torch.Tensor) or expected.shape[:1] != (sum(len(half) for half in halves),):
        return True
    return measure(torch.cat(halves), expected).relative <= tolerance_of(expected.dtype)


def _candidates(model: PreTrainedModel, rows: int, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield possible inputs of a model, the most likely first. They are on the meta device, except image grids.

    Raises:
        ValueError: If there are no known inputs.
    """
    taken = inspect.signature(model.forward).parameters
    inputs = sample_inputs(model, rows, length)
    width = int(getattr(_text_config(model), "hidden_size", 0) or 1)
    first = _required(inputs, taken, rows, length, width)
    yield first
    if "pixel_values" in taken and "pixel_values" not in inputs and "input_ids" in inputs:
        pixels = {"pixel_values": torch.empty(pixel_shape(model.config, rows), device="meta", dtype=model.dtype)}
        yield {**first, **pixels}
        if "decoder_input_ids" in inputs:
            yield {**pixels, "decoder_input_ids": inputs["decoder_input_ids"]}
    yield from _patches(model.config, rows, taken)
    if "inputs_embeds" in taken and "input_ids" in inputs:
        embedded = torch.empty(rows, length, width, device="meta", dtype=model.dtype)
        yield {**{name: value for name, value in first.items() if name != "input_ids"}, "inputs_embeds": embedded}


def _required(
    inputs: dict[str, torch.Tensor], taken: Any, rows: int, length: int, width: int
) -> dict[str, torch.Tensor]:
    """Add the required arguments of the forward: more token ids, or sequences of vectors."""
    found = dict(inputs)
    needed = [name for name, each in taken.items() if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    for name in (name for name in needed if name not in inputs):
        if name.endswith("input_ids"):
            found[name] = torch.zeros(rows, length, dtype=torch.long, device="meta")
        elif name.endswith(("embeds", "states", "context")):
            found[name] = torch.empty(rows, length, width, device="meta")
    return found


def _patches(config: PretrainedConfig, rows: int, taken: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield patches of all images in one tensor, as vectors or as small images, with the image sizes."""
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in taken), None)
    main = next((name for name in ("hidden_states", "pixel_values") if name in taken), None)
    side = getattr(config, "patch_size", None)
    channels = int(getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3)
    if grid is None or main is None or type(side) is not int or "input_ids" in taken:
        return
    more = {"merge_sizes": torch.full((rows,), 2)} if "merge_sizes" in taken else {}
    sizes = torch.tensor([[1, _SIDE, _SIDE]] * rows)
    count, frames = rows * _SIDE * _SIDE, int(getattr(config, "temporal_patch_size", 1))
    merge = int(getattr(config, "spatial_merge_size", 1) or 1)
    flat = [(count, channels * frames * side * side), (count, channels * side * side)]
    pictures = [(count, channels, side, side), (1, count, channels, side, side)]
    for shape in dict.fromkeys((*flat, *pictures, (count, side * merge, side * merge, channels))):
        yield {main: torch.empty(shape, device="meta"), grid: sizes, **more}

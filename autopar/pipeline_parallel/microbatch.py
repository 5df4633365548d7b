"""Micro-batches: split a batch, weigh their losses.

[Note: rows of samples] A tensor of the batch has one row of each sample, mostly. Targets may have several (channels of
sound: ``labels [samples * channels, seq]``). Images, videos and sounds beside text are listed for the whole batch, a
sample has some of them or none: ``pixel_values [images, ...]``, or patches of all of them in a row, ``pixel_values
[patches, width]`` with ``image_grid_thw [images, 3]``. Whose they are is told by the tokens that stand for them in
``input_ids``: what cannot be told is not split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from transformers.utils.generic import ModelOutput

from autopar.errors import ConfigError
from autopar.pipeline_parallel.p2p import map_tensors


def next_batch(data: Any) -> dict[str, Any]:
    """Return the batch in ``data``: itself if it is a mapping, else the next one of an iterator.

    Raises:
        ConfigError: it is neither, or what the iterator gives is not a mapping.
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

    Every tensor whose dim 0 is ``samples`` long is split, also inside tuples, lists and dicts; so are lists and tuples
    with an entry for each sample (:func:`_cut`). Everything else goes into each micro-batch whole. ``position_ids`` of
    several kinds, ``[kinds, batch, seq]``, are split in dim 1. A batch of fewer samples than ``count`` gives that many
    micro-batches of one. Images, and targets in several rows of each sample, go with their samples
    (:func:`sample_rows`); a micro-batch without images has no argument for them.

    Args:
        config: of the model, which says what stands for an image in the text.

    Raises:
        ConfigError: it cannot be told to which samples images, or the entries of a list, belong.
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
            if name == "position_ids" and isinstance(value, torch.Tensor) and value.ndim == 3  # time, height, width
            else _cut(name, value, samples, slice(start, stop), narrow)
            for name, value in batch.items()
            if name not in own or own[name][0] < own[name][1]
        }

    return [part(start, stop) for start, stop in pairwise(bounds)]


def _apart(part: Any) -> Any:
    """A part of a tensor, of its own where a model may write: some do into their labels. Lists are apart."""
    return part.clone() if isinstance(part, torch.Tensor) and not part.is_floating_point() else part


def _cut(name: str, value: Any, samples: int, part: slice, narrow: Callable[[torch.Tensor], Any]) -> Any:
    """Return the part of a value: entries of a list that has one for each sample, or rows of the tensors in it.

    Raises:
        ConfigError: a list of ``samples`` entries may be either.
    """
    if len(range(samples)[part]) == samples or isinstance(value, ModelOutput):
        return map_tensors(value, narrow)
    if isinstance(value, dict):
        return {key: _cut(f"{name}[{key!r}]", entry, samples, part, narrow) for key, entry in value.items()}
    if not isinstance(value, list | tuple) or hasattr(value, "_fields"):
        return map_tensors(value, narrow)
    if len(value) != samples:
        return type(value)(_cut(f"{name}[{n}]", entry, samples, part, narrow) for n, entry in enumerate(value))
    rows = [
        not isinstance(entry, dict) and all(tensor.shape[:1] == (samples,) for tensor in tensors)
        for entry in value
        if (tensors := [tensor for tensor in _tensors_in(entry) if tensor.ndim])
    ]
    listed = isinstance(value, list)
    numbers = listed and _is_list_of(value, int | float)
    unclear = any(rows) and (all(rows) if listed else len(rows) == samples or not all(rows))
    if numbers or unclear:
        raise ConfigError(
            f"execute_pipeline: {name} is a {type(value).__name__} of {samples} "
            f"{'numbers' if numbers else f'entries with tensors of {samples} rows'}, and the batch has {samples} "
            "samples: whether it has one entry for each sample is not known.\n"
            f"  Give a tensor with one row for each sample, or one micro-batch (pipeline.microbatch_size: {samples})."
        )
    if any(rows) and not listed:  # tensors of all samples, and None
        return map_tensors(value, narrow)
    return value[part] if listed or _tensors_in(value) else value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


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
    shifted_labels = microbatch.get("shift_labels")
    labels = microbatch.get("labels") if shifted_labels is None else shifted_labels
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim == 0:
        return batch_size(microbatch, main_input)
    if shifted and labels.ndim > 1 and shifted_labels is None:
        labels = labels[..., 1:]
    return (labels != -100).sum()


# -- rows of samples --------------------------------------------------------------------------------------------------

_TARGETS = re.compile(r"labels|decoder_.*")


class _Medium(NamedTuple):
    """Inputs beside text: names of the arguments, and of the config's token that stands for a part of one."""

    name: str
    arguments: re.Pattern[str]
    tokens: tuple[str, ...]


_MEDIA = (
    _Medium("video", re.compile(r".*videos?(_.*)?|second_per_grid_ts"), ("video_token_id", "video_token_index")),
    _Medium(
        "image",
        re.compile(r"(.*_)?pixel_(values|mask|attention_mask)(_images)?|images?_.*"),
        ("image_token_id", "image_token_index"),
    ),
    _Medium(
        "audio",
        re.compile(r"(audio_)?input_features(_mask)?|feature_attention_mask|audio_.*|chunk_.*"),
        ("audio_token_id", "audio_token_index"),
    ),
)


def sample_rows(batch: Mapping[str, Any], samples: int, config: Any) -> dict[str, list[int]]:
    """Return for arguments that have not one row of each sample where the rows of each begin, and where the last end.

    Args:
        samples: in the batch; more than one.
        config: of the model; None: there are no images.

    Raises:
        ConfigError: images (videos, sounds) that are not one of each sample, and it cannot be told whose they are. From
            the batch and the config only, so the same on every rank.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    found = {
        name: list(range(0, len(value) + 1, len(value) // samples))
        for name, value in tensors.items()
        if _TARGETS.fullmatch(name) and len(value) > samples and len(value) % samples == 0
    }
    left = {name: x for name, x in batch.items() if name in tensors or _is_list_of(x, int | float | torch.Tensor)}
    for medium in _MEDIA if config is not None else ():
        listed = {name: left.pop(name) for name in list(left) if medium.arguments.fullmatch(name)}
        grid = next((value for name, value in listed.items() if name.endswith("grid_thw")), None)
        listed_alike = all(len(x) == samples and not _is_list_of(x, int | float) for x in listed.values())
        if grid is not None or not listed_alike:
            found |= _of_medium(medium, listed, grid, tensors.get("input_ids"), samples, config)
    return found


def _of_medium(
    medium: _Medium,
    listed: Mapping[str, Any],
    grid: torch.Tensor | None,
    ids: torch.Tensor | None,
    samples: int,
    config: Any,
) -> dict[str, list[int]]:
    patches = None if grid is None else grid.prod(1).tolist()
    lengths = {name: len(value) for name, value in listed.items()}
    count = len(grid) if grid is not None else max(lengths.values())
    sizes = {count: [1] * count} | ({} if patches is None else {sum(patches): patches})
    token = _token(medium, config)
    each: list[int] | None = None  # how many of each sample
    if token is not None and ids is not None and ids.shape[:1] == (samples,) and set(lengths.values()) <= set(sizes):
        each = _of_each(ids == token, patches, count)
    if each is None:
        shown = ", ".join(f"{name} {list(getattr(value, 'shape', [len(value)]))}" for name, value in listed.items())
        raise ConfigError(
            f"execute_pipeline: {shown} are not one row of each of the batch's {samples} samples, and it cannot be "
            f"told which {medium.name}s belong to which sample by token {token} ({medium.tokens[0]} of the model's "
            "config) in input_ids.\n"
            f"  Give one micro-batch (pipeline.microbatch_size: {samples}), or batches of one sample each."
        )
    starts = [0, *accumulate(each)]  # of the images of each sample
    ends = {length: [0, *accumulate(each_size)] for length, each_size in sizes.items()}
    return {name: [ends[length][start] for start in starts] for name, length in lengths.items()}


def _is_list_of(value: Any, kind: Any) -> bool:
    """Return whether it is data of a list, such as the seconds of each video."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, kind) for entry in value)


def _token(medium: _Medium, config: Any) -> int | None:
    """The token of a medium in the config, or in one inside of it."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    for each in (config, *inner):
        for name in medium.tokens:
            token = getattr(each, name, None)
            if type(token) is int:
                return token
    return None


def _of_each(marked: torch.Tensor, patches: Sequence[int] | None, count: int) -> list[int] | None:
    """Return how many images each sample has; None if its tokens do not tell.

    Args:
        marked: ``[samples, seq]``, where a token stands for a part of an image.
        patches: of each image; None: not known. Tokens of an image are as many as its patches, or the same part.
        count: of the images.
    """
    tokens = marked.sum(1).tolist()
    if patches is None:
        begins = marked.clone()
        begins[:, 1:] &= ~marked[:, :-1]
        runs: list[int] = begins.sum(1).tolist()
        if sum(runs) == count:
            return runs
        patches = [1] * count
    total, whole = sum(tokens), sum(patches)
    if not total or not whole:
        return None
    ends = {end * total: place for place, end in enumerate(accumulate(patches), 1)} | {0: 0}
    places = [ends.get(end * whole) for end in accumulate(tokens)]
    if None in places:
        return None
    found = [0, *(place for place in places if place is not None)]
    return [after - before for before, after in pairwise(found)]

"""Rows of samples: which rows of a batch's tensors belong to which sample, where they are not one row each.

Targets may have several rows of each sample (channels of sound: ``labels [samples * channels, seq]``). Images, videos
and sounds beside text are listed for the whole batch, a sample has some of them or none:
``pixel_values [images, ...]``, or patches of all of them in a row, ``pixel_values [patches, width]`` with
``image_grid_thw [images, 3]``. Whose they are is told by the tokens that stand for them in ``input_ids``: what cannot
be told is not split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from autopar.errors import ConfigError

__all__ = ["sample_rows"]

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
    left = {name: value for name, value in batch.items() if name in tensors or _is_list_of_numbers(value)}
    for medium in _MEDIA if config is not None else ():
        listed = {name: left.pop(name) for name in list(left) if medium.arguments.fullmatch(name)}
        grid = next((value for name, value in listed.items() if name.endswith("grid_thw")), None)
        listed_alike = all(name in tensors and len(value) == samples for name, value in listed.items())
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
            f"told which {medium.name}s belong to which sample: {_why(medium, token, ids, samples)}.\n"
            f"  Give one micro-batch (pipeline.microbatch_size: {samples}), or batches of one sample each."
        )
    starts = [0, *accumulate(each)]  # of the images of each sample
    ends = {length: [0, *accumulate(each_size)] for length, each_size in sizes.items()}
    return {name: [ends[length][start] for start in starts] for name, length in lengths.items()}


def _is_list_of_numbers(value: Any) -> bool:
    """Return whether it is data of a list, such as the seconds of each video."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, int | float) for entry in value)


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
    return list(_differences([0, *(place for place in places if place is not None)]))


def _differences(places: Sequence[int]) -> Iterator[int]:
    return (after - before for before, after in pairwise(places))


def _why(medium: _Medium, token: int | None, ids: torch.Tensor | None, samples: int) -> str:
    if token is None:
        return f"the model's config has no {medium.tokens[0]}"
    if ids is None or ids.shape[:1] != (samples,):
        return "the batch has no input_ids of each sample"
    counts = (ids == token).sum(1).tolist()
    listed = ", ".join(map(str, counts[:8])) + (" ..." if len(counts) > 8 else "")
    return f"token {token} stands {listed} times in the samples, which is no share of whole {medium.name}s"

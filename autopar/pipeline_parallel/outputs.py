"""Outputs of a model in stages: of all micro-batches together, without entries that only another stage could compute.

Reading one of those raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from autopar.errors import UnsupportedModelError
from autopar.swap import plain_class, swap


def incomplete(output: Any, names: Sequence[str]) -> Any:
    """Return ``output`` without these entries; reading one of them, or all entries in a row, raises."""
    if not names:
        return output
    kept = {name: value for name, value in dict.items(output) if name not in names}
    made = plain_class(output, IncompleteOutput)(**kept)
    readable = next((place for place, name in enumerate(output) if name in names), len(output))
    swap(made, IncompleteOutput, _unavailable=tuple(names), _readable=readable)
    return made


def complete(output: Any) -> Any:
    """Return the plain output again, with None in the place of what is unavailable."""
    if not isinstance(output, IncompleteOutput):
        return output
    entries: Any = output
    return plain_class(output, IncompleteOutput)(**dict(dict.items(entries)))


def unavailable(output: Any) -> tuple[str, ...]:
    """Return the names of the entries that are unavailable."""
    return output._unavailable if isinstance(output, IncompleteOutput) else ()


class IncompleteOutput:
    """Class before that of an output.

    Attributes:
        _unavailable: names of the entries that are not there.
        _readable: entries before the first one that is not there, which can be read by their place.
    """

    _unavailable: tuple[str, ...] = ()
    _readable = 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._unavailable:
            _refuse(self, name)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        own: Any = self
        if isinstance(key, str):
            if key in self._unavailable:
                _refuse(self, key)
            return dict.__getitem__(own, key)
        entries = tuple(dict.values(own))
        if not isinstance(key, int) or not 0 <= key < self._readable:
            _refuse(self, f"[{key}]")
        return entries[key]

    def to_tuple(self) -> Any:
        _refuse(self, "all of them in a row")

    items = values = to_tuple


def _refuse(output: Any, entry: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{entry} of {type(output).__name__}: {', '.join(output._unavailable)} of this output is computed in front of "
        "the blocks, by the first pipeline stage, and the last stage, which makes the outputs, does not have it.\n"
        "  Read the other entries by name, or use pipeline_parallel_size=1."
    )


def merge_outputs(outputs: list[Any], sizes: list[int], weights: list[float]) -> Any:
    """Merge the outputs of the micro-batches: tensors with rows of each sample are concatenated, others averaged.

    Rows of each sample are ``[samples, ...]``, or several for each: ``[samples * frames, width]`` of videos, router
    logits ``[samples * seq, experts]``, or as many as a sample has images. A value that is the same in all
    micro-batches does not depend on them.

    Args:
        sizes: samples of each micro-batch.
        weights: how much each counts in an average (of losses).
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        parts = [output.detach() for output in outputs]
        if _has_rows(parts, sizes):
            return torch.cat(parts)
        if _is_mean(parts):
            return sum(_counted(part, weight) for part, weight in zip(parts, weights, strict=True))
        return torch.cat(parts) if first.ndim else first.detach()
    if isinstance(first, Cache):
        return None
    if isinstance(first, ModelOutput):
        return type(first)(**{name: merge_outputs([o[name] for o in outputs], sizes, weights) for name in first})
    if isinstance(first, dict):
        return {name: merge_outputs([o[name] for o in outputs], sizes, weights) for name in first}
    if isinstance(first, list) and _has_samples(outputs, sizes):
        return [entry for output in outputs for entry in output]
    if isinstance(first, list | tuple):
        merged = [merge_outputs(list(entries), sizes, weights) for entries in zip(*outputs, strict=True)]
        return type(first)(*merged) if hasattr(first, "_fields") else type(first)(merged)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        listed = {name: [getattr(output, name) for output in outputs] for name in names}
        return replace(first, **{name: merge_outputs(entries, sizes, weights) for name, entries in listed.items()})
    return first


def _has_samples(outputs: list[Any], sizes: list[int]) -> bool:
    """Return whether lists hold one entry for each sample, and not tensors of all samples."""
    tensors = [(entry, size) for output, size in zip(outputs, sizes, strict=True) for entry in output]
    rows = all(isinstance(entry, torch.Tensor) and entry.shape[:1] == (size,) for entry, size in tensors)
    return all(len(output) == size for output, size in zip(outputs, sizes, strict=True)) and not rows


def _has_rows(parts: list[torch.Tensor], sizes: list[int]) -> bool:
    """Return whether tensors hold as many rows for each sample, one or more."""
    if not all(part.ndim and part.shape[0] % max(size, 1) == 0 for part, size in zip(parts, sizes, strict=True)):
        return False
    each = {part.shape[0] // max(size, 1) for part, size in zip(parts, sizes, strict=True)}
    if each == {1}:
        return True
    return len(each) == 1 and parts[0].ndim > 1 and not all(torch.equal(part, parts[0]) for part in parts[1:])


def _is_mean(parts: list[torch.Tensor]) -> bool:
    """Check whether each micro-batch has its own number, or all have the same table. Rows of images are neither."""
    first = parts[0]
    if not first.is_floating_point() or any(part.shape != first.shape for part in parts):
        return False
    return first.ndim < 2 or all(torch.equal(part, first) for part in parts[1:])


def _counted(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """The loss of a micro-batch without labels is not a number; it does not count."""
    return loss * weight if weight else torch.zeros_like(loss)

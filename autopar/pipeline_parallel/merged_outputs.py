"""Outputs of the micro-batches of a batch, as those of the whole batch."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

__all__ = ["merge_outputs"]


def merge_outputs(outputs: list[Any], sizes: list[int], weights: list[float]) -> Any:
    """Merge the outputs of the micro-batches: tensors with rows of each sample are concatenated, others averaged.

    Rows of each sample are ``[samples, ...]``, or several for each: ``[samples * frames, width]`` of videos, router
    logits ``[samples * seq, experts]``, or as many as a sample has images. What is the same in all micro-batches does
    not depend on them.

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
    if isinstance(first, list | tuple):
        merged = [merge_outputs(list(entries), sizes, weights) for entries in zip(*outputs, strict=True)]
        return type(first)(*merged) if hasattr(first, "_fields") else type(first)(merged)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        listed = {name: [getattr(output, name) for output in outputs] for name in names}
        return replace(first, **{name: merge_outputs(entries, sizes, weights) for name, entries in listed.items()})
    return first


def _has_rows(parts: list[torch.Tensor], sizes: list[int]) -> bool:
    """Whether tensors hold as many rows for each sample, one or more."""
    if not all(part.ndim and part.shape[0] % max(size, 1) == 0 for part, size in zip(parts, sizes, strict=True)):
        return False
    each = {part.shape[0] // max(size, 1) for part, size in zip(parts, sizes, strict=True)}
    if each == {1}:
        return True
    return len(each) == 1 and parts[0].ndim > 1 and not all(torch.equal(part, parts[0]) for part in parts[1:])


def _is_mean(parts: list[torch.Tensor]) -> bool:
    """Whether each micro-batch has a number of its own, or all the same table; else they are rows of images, say."""
    first = parts[0]
    if not first.is_floating_point() or any(part.shape != first.shape for part in parts):
        return False
    return first.ndim < 2 or all(torch.equal(part, first) for part in parts[1:])


def _counted(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """The loss of a micro-batch without labels is not a number; it does not count."""
    return loss * weight if weight else torch.zeros_like(loss)

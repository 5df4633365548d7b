"""Parts of batches: what a replica gets, and in how many parts a model can take a batch at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar.config import ParallelConfig
from autopar.errors import ConfigError
from autopar.foreign.modules import BatchNorm
from autopar.pipeline_parallel.own_loss import OwnLoss
from autopar.policy.schema import Policy
from autopar.tools.verification.closeness import measure, tolerance_of
from autopar.tools.verification.outputs import named, reseed

__all__ = ["Batch", "fit", "halves_agree", "part_of"]

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
    """Whether the plain model's logits of the two halves of a batch are those of the whole; rank 0 tries."""
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

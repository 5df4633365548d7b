"""``verify``: run a model plain and parallelized on the same inputs, and report whether they are the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar.config import ParallelConfig
from autopar.distributed.rng import kept
from autopar.errors import ConfigError
from autopar.policy.schema import Policy
from autopar.tools.verification.batches import make_batches
from autopar.tools.verification.processes import run_on_ranks
from autopar.tools.verification.ranks import checks_of, verify_on_ranks
from autopar.tools.verification.report import Report
from autopar.tools.verification.session import Batch

__all__ = ["verify"]

_BATCHES = 2  # whose gradients add up


def verify(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | ParallelConfig | None = None,
    *,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    batches: Sequence[Batch] | None = None,
    checks: Sequence[str] | None = None,
    data_parallel_size: int = 1,
    sequence: int = 16,
    device: str = "cpu",
    timeout: float = 1800.0,
) -> Report:
    """Compare ``model`` with what ``initialize`` would make of it: outputs, gradients, a step, tokens, checkpoints.

    It starts processes of its own. In a job of several ranks (torchrun) it takes those instead: every rank calls it
    with the same arguments, and gets the same report. The model is only read.

    Args:
        model: in memory, with weights. Dropout is off while it is compared, but for the check of dropout.
        config, policy: as for :func:`autopar.initialize`.
        batches: arguments of the model's forward, a dict each, of all replicas together, with labels if there shall be
            a loss; rank 0's count. By default two are made at random, for Hugging Face models.
        checks: some of ``weights``, ``forward``, ``generate``, ``save``, ``reshard``, ``backward``, ``step`` and
            ``dropout``; by default all.
        data_parallel_size: replicas that processes are started for.
        sequence: tokens of the samples that are made.
        device: ``cpu``, or ``cuda`` with a GPU for each rank; of the processes that are started.
        timeout: seconds for them.

    Returns:
        The :class:`~autopar.tools.verification.report.Report`: ``report.ok``, ``report.raise_if_failed()``,
        ``report.to_dict()``; it prints as a table.

    Raises:
        ConfigError: the call is wrong, or no inputs are known for the model. What ``initialize`` refuses is no error
            but a row of the report.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, not {device!r}")
    chosen = checks_of(checks)
    job = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    world = job if job > 1 else _world(config, data_parallel_size)
    parsed = ParallelConfig.parse(config, world)
    _refuse(model, parsed)
    listed: list[Batch] = list(batches) if batches is not None else [*_make(model, parsed, world, sequence)]
    if not listed:
        raise ConfigError("batches is empty: give at least one dict of the model's arguments")
    work = _Work(model, parsed, policy, listed, chosen)
    if job == 1:
        return run_on_ranks(work, world, device=device, timeout=timeout)
    with kept():  # the script goes on with its own random states
        return work()


@dataclass
class _Work:
    """The work of every rank; an object, so that it can be pickled."""

    model: nn.Module
    config: ParallelConfig
    policy: Any
    batches: list[Batch]
    checks: tuple[str, ...]

    def __call__(self, alarm: Callable[[Report], None] | None = None) -> Report:
        return verify_on_ranks(self.model, self.config, self.policy, self.batches, self.checks, alarm=alarm)


def _world(config: Any, dp: int) -> int:
    """Return how many processes are started."""
    if dp < 1:
        raise ConfigError(f"data_parallel_size must be at least 1, not {dp}")
    parsed = ParallelConfig.parse(config)
    return parsed.tensor_parallel_size * parsed.pipeline_parallel_size * parsed.context_parallel_size * dp


def _refuse(model: nn.Module, config: ParallelConfig) -> None:
    lacking = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if lacking is not None:
        raise ConfigError(f"verify compares numbers, and {lacking} has no memory: build the model outside of lazy_init")
    if config.compile:
        raise ConfigError("verify looks into modules, which compile takes away: leave the section compile out")


def _make(model: nn.Module, config: ParallelConfig, world: int, sequence: int) -> list[dict[str, Any]]:
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not inner or inner[0] is not model:
        raise ConfigError(
            f"what the forward of {type(model).__name__} takes is not known: give batches=[{{'input': tensor, ...}}]"
        )
    rows = config.data_parallel_size(world) * max(2, config.pipeline_parallel_size)
    with torch.no_grad():
        return make_batches(inner[0], count=_BATCHES, rows=rows, length=sequence)

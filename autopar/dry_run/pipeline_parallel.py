"""Dry run of a plan's stages, one after the other in this process, before the model is split: does each hold its reads?

What :mod:`autopar.dry_run.block_reads` sees are gradients' paths. Here every operation of every stage is followed,
so what goes through whole numbers, comparisons and masks is seen too, and what a model collects beside its blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.distributed.failures import first_line
from autopar.distributed.rng import kept
from autopar.errors import UnsupportedModelError
from autopar.pipeline_parallel.stage import examine
from autopar.pipeline_parallel.stage_forward import (
    StageContext,
    StageForward,
    mark_boundaries,
    unmark_boundaries,
)
from autopar.plan.stages import StagePlan

__all__ = ["evaluating", "rehearse_stages"]


def rehearse_stages(
    model: PreTrainedModel, start: str, plan: StagePlan, inputs: Mapping[str, Any]
) -> dict[str, set[int]]:
    """Find the tensors that stages read though the plan does not give them: name -> stages.

    Args:
        model: whole; changed while this runs. Names in the plan begin with ``start``.
        inputs: with which the whole model runs.

    Raises:
        UnsupportedModelError: a stage fails, or needs what no stage could hold.
    """
    names: dict[int, list[str]] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if start + name in plan.tensors:
            names.setdefault(id(tensor), []).append(start + name)
    by_id = {id(tensor): tensor for _, tensor in tensors}
    missing: dict[str, set[int]] = {}
    received: Any = None
    context = StageContext(plan.encoder)
    with torch.no_grad(), warnings.catch_warnings(), evaluating(model), _boundaries(model, start, plan, context):
        warnings.simplefilter("ignore")
        for stage in range(plan.stages):
            foreign = {same[0]: by_id[key] for key, same in names.items() if stage not in plan.tensors[same[0]]}
            forward = StageForward(plan.bounds[stage], plan.bounds[stage + 1], stage == plan.stages - 1, received)
            try:
                examined = examine(model, context, forward, (), dict(inputs), foreign)
            except Exception as error:
                raise UnsupportedModelError(
                    f"{type(model).__name__} cannot be split into pipeline stages: its forward does not run with the "
                    f"blocks {forward.start} to {forward.stop - 1} alone ({type(error).__name__}: "
                    f"{first_line(error)}), though it does with all.\n  It reads more from its "
                    "blocks than the last one's output. Use pipeline_parallel_size=1."
                ) from error
            for name in examined.missing:
                if name not in plan.tensors:
                    raise UnsupportedModelError(
                        f"{type(model).__name__} cannot be split into pipeline stages in front of block "
                        f"{forward.start}: what comes behind reads {name}, and not only that of the block before.\n"
                        "  Split it elsewhere (pipeline.layers_per_stage), or use pipeline_parallel_size=1."
                    )
                for same in next(same for same in names.values() if same[0] == name):
                    missing.setdefault(same, set()).add(stage)
            received = examined.result
    return missing


@contextmanager
def _boundaries(model: nn.Module, start: str, plan: StagePlan, context: StageContext) -> Iterator[None]:
    try:
        mark_boundaries(model, plan, context, start)
        yield
    finally:
        unmark_boundaries(model, plan, start)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; modes and random generators are as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with kept():
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training

"""The stages of a plan, run one after the other in this process, before anything is cut: does each hold what it reads?

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

from autopar.distributed.rng import Generators
from autopar.errors import UnsupportedModelError
from autopar.pipeline_parallel.stage import examine
from autopar.pipeline_parallel.stage_forward import Conductor, Course, element_class, plain_element_class
from autopar.plan.stages import StagePlan

__all__ = ["rehearse_stages"]


def rehearse_stages(
    model: PreTrainedModel, start: str, plan: StagePlan, inputs: Mapping[str, Any]
) -> dict[str, set[int]]:
    """Tensors that stages read though the plan does not give them: name -> stages.

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
    conductor = Conductor(plan.encoder)
    with torch.no_grad(), warnings.catch_warnings(), _quiet(model), _cut(model, start, plan, conductor):
        warnings.simplefilter("ignore")
        for stage in range(plan.stages):
            absent = {same[0]: by_id[key] for key, same in names.items() if stage not in plan.tensors[same[0]]}
            course = Course(plan.bounds[stage], plan.bounds[stage + 1], stage == plan.stages - 1, received)
            try:
                examined = examine(model, conductor, course, (), dict(inputs), absent)
            except Exception as error:
                raise UnsupportedModelError(
                    f"{type(model).__name__} cannot be cut into pipeline stages: its forward does not run with the "
                    f"blocks {course.start} to {course.stop - 1} alone ({type(error).__name__}: "
                    f"{(str(error).splitlines() or [''])[0]}), though it does with all.\n  It reads more from its "
                    "blocks than the last one's output. Use pipeline_parallel_size=1."
                ) from error
            for name in examined.missing:
                if name not in plan.tensors:
                    raise UnsupportedModelError(
                        f"{type(model).__name__} cannot be cut into pipeline stages in front of block {course.start}: "
                        f"what comes behind reads {name}, and not only that of the block before.\n  Cut it elsewhere "
                        "(pipeline.layers_per_stage), or use pipeline_parallel_size=1."
                    )
                for same in next(same for same in names.values() if same[0] == name):
                    missing.setdefault(same, set()).add(stage)
            received = examined.result
    return missing


@contextmanager
def _cut(model: nn.Module, start: str, plan: StagePlan, conductor: Conductor) -> Iterator[None]:
    modules = dict(model.named_modules(remove_duplicate=False))
    elements = [modules[path.removeprefix(start)] for path in plan.elements]
    try:
        for place, module in enumerate(elements):
            kind: Any = type(module)
            module.__class__ = element_class(kind)
            module.conductor, module.place = conductor, place
        yield
    finally:
        for module in elements:
            if "conductor" in vars(module):
                module.__class__ = plain_element_class(module)
                del module.conductor, module.place


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; modes and the random state are as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    state = Generators.now()
    try:
        model.eval()
        yield
    finally:
        state.restore()
        for module, training in modes:
            module.training = training

"""Dry run of a plan's stages, one after the other in this process, before the model is split: does each hold its reads?

:mod:`autopar.dry_run.block_reads` sees only the paths of gradients. Here every operation of every stage is followed, so
what goes through whole numbers, comparisons and masks is seen too, and what a model collects beside its blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.distributed.rng import kept
from autopar.dry_run.block_replay import BlockReplay, form_of, tensor_of
from autopar.dry_run.equal_blocks import EqualBlocks
from autopar.errors import UnsupportedModelError, first_line
from autopar.foreign.tensors import own_buffers
from autopar.pipeline_parallel.outputs import Provenance, examine
from autopar.pipeline_parallel.stage_forward import (
    StageContext,
    StageForward,
    mark_boundaries,
    unmark_boundaries,
)
from autopar.plan.stages import StagePlan
from autopar.tensor_tracking import TensorTracking, storage_key, tensors_in


def rehearse_stages(
    model: PreTrainedModel,
    start: str,
    plan: StagePlan,
    inputs: Mapping[str, Any],
    equal: Sequence[EqualBlocks] = (),
) -> dict[str, set[int]]:
    """Find the tensors that stages read though the plan does not give them: name -> stages.

    Args:
        model: whole; changed while this runs. Names in the plan begin with ``start``.
        inputs: with which the whole model runs.
        equal: blocks of the model that are; with some it is on the meta device.

    Raises:
        UnsupportedModelError: a stage fails, or needs what no stage could hold.
    """
    if equal:
        try:
            return _rehearse(model, start, plan, inputs, equal)
        except UnsupportedModelError:  # every block speaks for itself
            pass
    return _rehearse(model, start, plan, inputs, ())


def _rehearse(
    model: PreTrainedModel, start: str, plan: StagePlan, inputs: Mapping[str, Any], equal: Sequence[EqualBlocks]
) -> dict[str, set[int]]:
    names: dict[int, list[str]] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if start + name in plan.tensors:
            names.setdefault(id(tensor), []).append(start + name)
    by_id = {id(tensor): tensor for _, tensor in tensors}
    missing: dict[str, set[int]] = {}
    received: Any = None
    context = StageContext(plan.encoder)
    replay = _StageReplay(model, equal, context)
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        evaluating(model),
        _boundaries(model, start, plan, context),
        replay,
    ):
        warnings.simplefilter("ignore")
        for stage in range(plan.stages):
            context.placeholders = {
                same[0]: by_id[key] for key, same in names.items() if stage not in plan.tensors[same[0]]
            }
            forward = StageForward(context, plan.bounds[stage : stage + 2], stage == plan.stages - 1, received)
            try:
                examined = examine(forward, model, (), dict(inputs))
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


class _StageReplay(BlockReplay):
    """The replay of equal blocks while stages run: of those that hold their tensors, and are given nothing else's."""

    def __init__(self, model: nn.Module, equal: Sequence[EqualBlocks], context: StageContext) -> None:
        super().__init__(model, equal)
        self._context = context
        self._held: Mapping[str, torch.Tensor] | None = None  # the placeholders that _elsewhere is of
        self._elsewhere: set[int] = set()
        self._all = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())} if equal else set()
        self._own = {block: (*block.parameters(), *block.buffers()) for block in self._blocks}

    @property
    def _provenance(self) -> Provenance | None:
        return None if self._context.forward is None else self._context.forward.provenance

    def comparable(self, block: nn.Module) -> bool:
        if self._held is not self._context.placeholders:
            self._held = self._context.placeholders
            self._elsewhere = {id(tensor) for tensor in self._held.values()}
        return self._elsewhere.isdisjoint(map(id, self._own[block]))

    def describe(self, tensor: torch.Tensor) -> Any:
        followed = self._provenance
        return None if followed is None or followed.origins(tensor) else ()

    @contextmanager
    def running(self, block: nn.Module) -> Iterator[None]:
        others = self._all - {storage_key(tensor) for tensor in self._own[block]}
        reads = _Reads()
        with reads:
            yield
        self.alone = reads.storages.isdisjoint(others)

    def keep(self, output: torch.Tensor, block: nn.Module, arguments: list[torch.Tensor]) -> Any:
        followed = self._provenance
        return None if followed is None or followed.origins(output) else form_of(output)

    def make(self, kept: Any, block: nn.Module, arguments: list[torch.Tensor]) -> torch.Tensor:
        return tensor_of(kept)


class _Reads(TensorTracking):
    """Notes the storages of all tensors that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int | None] = set()

    def track(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.storages |= {storage_key(tensor) for tensor in tensors_in((args, kwargs))}


@contextmanager
def _boundaries(model: nn.Module, start: str, plan: StagePlan, context: StageContext) -> Iterator[None]:
    try:
        mark_boundaries(model, plan, context, start)
        yield
    finally:
        unmark_boundaries(model, plan, start)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; modes, attributes and random generators are as before afterwards.

    Some forwards write attributes: the capacity of experts for so many tokens, for one.
    """
    training = [module for module in model.modules() if module.training]
    before = [(module, dict(vars(module)), dict(own_buffers(module))) for module in model.modules()]
    try:
        with kept():
            if training:
                model.eval()
            yield
    finally:
        for module, attributes, buffers in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            own_buffers(module).update(buffers)
        for module in training:
            module.training = True

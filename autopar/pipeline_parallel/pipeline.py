"""A model as the stages of this rank: made by ``initialize``, taken back by ``deparallelize``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from autopar.config.pipeline import PipelineConfig
from autopar.data_parallel.grad_sync import average_over_replicas, held_alike
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU, rank_groups
from autopar.distributed.rng import share
from autopar.errors import ConfigError
from autopar.pipeline_parallel.batch_checks import weights_over_replicas
from autopar.pipeline_parallel.engine import Engine, Step
from autopar.pipeline_parallel.generate import call_through_stages
from autopar.pipeline_parallel.microbatch import (
    batch_size,
    default_reduction,
    label_count,
    merge_outputs,
    next_batch,
    own_loss,
    shifts_labels,
    split,
    weights_of,
)
from autopar.pipeline_parallel.outputs import partial
from autopar.pipeline_parallel.p2p import Post, map_tensors
from autopar.pipeline_parallel.schedule import Action, forwards, make_schedule
from autopar.pipeline_parallel.stage_forward import Conductor
from autopar.pipeline_parallel.stage_weights import cut, drop, mend, restore
from autopar.pipeline_parallel.step_start import read_batch, telling
from autopar.pipeline_parallel.tied_weights import Shared
from autopar.plan.stages import StagePlan, refuse_collected

__all__ = ["Pipeline", "PipelineOutput"]

_NAMES = ("execute_pipeline", "no_sync", "forward", "generate", "_autopar_pipeline", "_autopar_span")


@dataclass
class PipelineOutput:
    """What ``execute_pipeline`` returns; also readable as ``out["loss"]``.

    Attributes:
        loss: of the whole batch, detached; None but on the last stage, unless ``broadcast_loss``.
        outputs: the model's, of the whole batch, detached, on the last stage with ``return_outputs``; else None.
    """

    loss: torch.Tensor | None = None
    outputs: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Pipeline:
    """The stages of this rank.

    Args:
        model: whole blocks in place (cut by tensor parallelism already); changed in place.
        inner: the Hugging Face model inside it, or a plain module.
        plan: what every stage holds.
        check: compare the batch over the stages on the first step of each mode.
        steps: how many optimizer steps this rank has made (``made``).
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        plan: StagePlan,
        mpu: MPU,
        config: PipelineConfig,
        failures: FailureLog,
        *,
        check: bool = True,
        steps: Any = None,
    ) -> None:
        self.inner, self.plan, self.mpu, self.config, self.failures = inner, plan, mpu, config, failures
        self.conductor = Conductor(plan.encoder)
        self.post = _post(mpu, failures)
        if plan.stages > 1:
            cut(model, plan, self.conductor)
        self.dropped = drop(model, plan, mpu.pp.rank, mpu.device)
        self.conductor.absent = self.dropped.placeholders
        self.shared = Shared(model, plan, mpu)
        self.engine = Engine(model, self.conductor, plan, mpu.pp.rank, self.post, check=check, steps=steps)
        self.shifted = shifts_labels(inner)
        self.unchecked = {True, False} if check else set[bool]()
        self.averages = True  # gradients over dp, at the end of a training pass
        self.unaveraged = False  # whether the last pass left that to a later one
        self._schedules: dict[tuple[bool, int], list[list[Action]]] = {}

    def attach(self, model: nn.Module) -> None:
        """Give ``model`` its ``execute_pipeline`` and ``no_sync``; in several stages also forward and ``generate``."""
        model._autopar_pipeline = self  # type: ignore[assignment]
        model.execute_pipeline = types.MethodType(execute_pipeline, model)  # type: ignore[assignment]
        model.no_sync = types.MethodType(no_sync, model)  # type: ignore[assignment]
        if self.plan.stages == 1:
            return
        paths = {id(module): path for path, module in model.named_modules()}
        for module in model.modules():
            if module is not model and not isinstance(module, PreTrainedModel):
                continue
            span = self._span(paths[id(module)])
            if span is None:
                continue
            module._autopar_pipeline, module._autopar_span = self, span  # type: ignore[assignment]
            kind: Any = type(module)
            module.forward = types.MethodType(_forward_of(kind), module)
            if isinstance(module, PreTrainedModel) and callable(getattr(module, "generate", None)):
                module.generate = types.MethodType(_generate, module)  # type: ignore[assignment]

    def _span(self, path: str) -> tuple[int, int] | None:
        """The elements that a module runs."""
        start = f"{path}." if path else ""
        inside = [p for p, element in enumerate(self.plan.elements) if element == path or element.startswith(start)]
        return (inside[0], inside[-1] + 1) if inside else None

    def undo(self, model: nn.Module) -> None:
        """The whole model again on every stage (each still a tensor-parallel share)."""
        restore(model, self.plan, self.dropped, self.mpu)
        if self.plan.stages > 1:
            mend(model, self.plan)
        for module in model.modules():
            for name in _NAMES:
                module.__dict__.pop(name, None)

    def actions(self, backward: bool, microbatches: int) -> list[list[Action]]:
        """Every rank's list."""
        key = (backward, microbatches)
        if key not in self._schedules:
            make = make_schedule if backward else forwards
            self._schedules[key] = make(self.config.schedule, self.plan.rank_of, microbatches)
        return self._schedules[key]

    def run(self, model: nn.Module, step: Step) -> None:
        """One pass of the schedule, with gradients summed over stages that share a tensor, averaged over replicas."""
        actions = self.actions(step.backward, len(step.microbatches))
        if not step.backward:
            self.engine.run(actions, step)
            return
        state = vars(model)["_autopar"]
        ours = state.step is not None and state.step.model is model
        with state.step.fp32_gradients() if ours else contextlib.nullcontext():
            self.shared.set_aside()
            try:
                self.engine.run(actions, step)
                with self.failures.blame(
                    "summing the gradients of weights that several stages hold", self.mpu.pp.ranks
                ):
                    self.shared.sum(held_alike(model, state.plan, self.mpu))
            except BaseException:
                self.shared.put_back()
                raise
            if self.averages:
                with self.failures.blame("averaging the gradients over the data-parallel replicas", self.mpu.dp.ranks):
                    average_over_replicas(model, state.plan, self.plan, self.mpu)
        self.unaveraged = not self.averages and self.mpu.dp.size > 1

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.plan.rank_of[-1] == self.mpu.pp.rank

    def share_loss(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        """The last stage's loss on all ranks of the axis."""
        how: dict[str, Any] = {"way": "forward", "tag": 1_000_000, "what": "the loss"}
        if not self.last:
            shared: torch.Tensor | None = self.post.receive(self.plan.rank_of[-1], **how)
            return shared
        for other in range(self.plan.ranks):
            if other != self.mpu.pp.rank:
                self.post.send(loss, other, **how)
        self.post.settle()
        return loss


@contextlib.contextmanager
def no_sync(self: nn.Module) -> Iterator[None]:
    """``execute_pipeline`` inside does not average gradients over data parallel; the next one outside averages all.

    For a step of several calls: it saves communication and changes no number.
    """
    pipeline: Pipeline = vars(self)["_autopar_pipeline"]
    before, pipeline.averages = pipeline.averages, False
    try:
        yield
    finally:
        pipeline.averages = before


@telling
def execute_pipeline(
    self: nn.Module,
    data: Any,
    criterion: Callable[[Any, dict[str, Any]], torch.Tensor] | None = None,
    optimizer: Any = None,
    *,
    return_loss: bool = True,
    return_outputs: bool = False,
    broadcast_loss: bool = False,
    forward_only: bool | None = None,
) -> PipelineOutput:
    """Forward and backward of one batch, in micro-batches, through all stages; gradients accumulate.

    Every rank of a model replica calls it with the same batch. With one stage it accumulates over micro-batches.

    Args:
        data: a dict of the model's arguments (a ``BatchEncoding``), or an iterator over such dicts: one is taken.
        criterion: ``(outputs, inputs) -> loss`` of one micro-batch, a mean; by default ``outputs.loss``, or the only
            number in a tuple or dict of outputs.
        optimizer: what will step; only its ``scale_loss`` is used, if it has one.
        return_loss: whether to return the loss.
        return_outputs: whether to return the model's outputs, put together from all micro-batches.
        broadcast_loss: return the loss on every stage and not on the last one only.
        forward_only: no backward; by default in evaluation mode and where gradients are switched off.

    Returns:
        :class:`PipelineOutput`. The loss and all gradients are those of the whole batch at once (``loss_reduction:
        tokens``): each micro-batch counts by its labels that are not -100, or, without labels, by its samples; with
        ``num_items_in_batch`` in the batch, by which the model divides its losses, they add up. Over data-parallel
        replicas gradients are averaged, each replica counting by its labels too, so that they are those of the global
        batch; the loss is this replica's. (``loss_reduction: microbatch``, ``num_items_in_batch`` and losses that are
        no mean over labels: the plain average, as ``DistributedDataParallel`` takes it.)

    Raises:
        StopIteration: the iterator has ended, on all ranks of this replica.
        ConsistencyError: the stages of one replica got different batches (whole on the first step of a mode, later a
            sample of each tensor), or the iterator has ended on some of them, or on some replicas.
        ConfigError: ``data`` is neither a batch nor an iterator, the outputs hold no loss to train with, or the model's
            own loss is no mean over ``labels`` and there are several micro-batches.
        PipelineError: another stage, tensor-parallel rank or replica failed, ended, or did not deliver within
            ``pipeline.timeout``; names it.

    After an error in the middle of a step, gradients of earlier calls are as they were for weights on several stages;
    others hold a part of this call's too. Use ``zero_grad`` before going on.
    """
    pipeline: Pipeline = vars(self)["_autopar_pipeline"]
    mpu, config = pipeline.mpu, pipeline.config
    backward = (self.training and torch.is_grad_enabled()) if forward_only is None else not forward_only
    main, by_labels = getattr(pipeline.inner, "main_input_name", ""), config.loss_reduction == "tokens"
    agrees = backward and (by_labels or pipeline.averages)
    batch, counts = read_batch(
        lambda: map_tensors(next_batch(data), lambda tensor: tensor.to(mpu.device)),
        *(pipeline.engine, mpu, pipeline.unchecked, backward),
        functools.partial(label_count, main_input=main, shifted=pipeline.shifted) if agrees else None,
    )
    refuse_collected(pipeline.inner, pipeline.plan.stages, batch)
    samples = batch_size(batch, main)
    microbatches = split(batch, samples, config.microbatch_size, config.num_microbatches)
    reduction = config.loss_reduction
    if reduction == "tokens" and criterion is None and (backward or return_loss):
        reduction = default_reduction(pipeline.inner, batch, len(microbatches))
    shares = weights = weights_of(microbatches, main, reduction, pipeline.shifted)
    if counts and reduction == "tokens":
        weights = weights_over_replicas(shares, counts, mpu.dp.rank)
    step = Step(
        microbatches=microbatches,
        weights=weights,
        loss_of=_criterion(criterion, required=backward) if backward or return_loss else None,
        scale=getattr(optimizer, "scale_loss", None),
        keep_outputs=return_outputs,
        backward=backward,
    )
    pipeline.run(self, step)
    result = PipelineOutput()
    if return_loss and pipeline.last and step.losses:
        result.loss = _mean(step, shares)
    if return_loss and broadcast_loss and pipeline.plan.stages > 1:
        result.loss = pipeline.share_loss(result.loss)
    if return_outputs and pipeline.last:
        sizes = [batch_size(microbatch, main) for microbatch in microbatches]
        merged = merge_outputs([step.outputs[m] for m in range(len(microbatches))], sizes, shares)
        result.outputs = partial(merged, step.withheld)
    return result


def _criterion(criterion: Callable[..., Any] | None, *, required: bool) -> Callable[[Any, dict[str, Any]], Any]:
    def loss_of(outputs: Any, inputs: dict[str, Any]) -> Any:
        loss = own_loss(outputs) if criterion is None else criterion(outputs, inputs)
        if loss is None and required:
            raise ConfigError(
                f"execute_pipeline: the outputs ({type(outputs).__name__}) hold no loss: put labels into the batch, or "
                "give criterion=lambda outputs, inputs: ..."
            )
        return loss

    return loss_of


def _mean(step: Step, shares: list[float]) -> torch.Tensor:
    counted = [step.losses[m] * share for m, share in enumerate(shares) if share]
    return torch.stack(counted).sum() if counted else step.losses[0]


def _post(mpu: MPU, failures: FailureLog) -> Post:
    """Groups of its own: a step that failed leaves messages behind that nothing later may meet.

    On gloo tags keep messages apart. nccl has none, and what is sent there waits for what was sent before.
    """
    control = _group_of_stages(mpu, "gloo", "pp control")
    groups = dict.fromkeys(itertools.product(("forward", "backward"), (False, True)), control)
    if mpu.device.type == "cuda":
        groups = {(way, up): _group_of_stages(mpu, "nccl", f"pp {way} {'up' if up else 'down'}") for way, up in groups}
    return Post(mpu.pp, groups, control, failures, mpu.device)


def _group_of_stages(mpu: MPU, backend: str, name: str) -> Any:
    """A new group through the stages of this rank's replica; every rank makes those of all replicas."""
    mine = None
    for ranks in rank_groups(mpu.sizes)["pp"] if mpu.pp.size > 1 else ():
        group = dist.new_group(ranks, backend=backend, group_desc=name)
        if mpu.rank in ranks:
            mine = group
            mpu._owned.append(group)
    return mine


@functools.cache
def _forward_of(kind: Any) -> Callable[..., Any]:
    """The forward of a model in stages; it has the plain one's signature, which ``generate`` reads."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline: Pipeline = self._autopar_pipeline
        if pipeline.conductor.course is not None:
            return type(self).forward(self, *args, **kwargs)
        if self.training and torch.is_grad_enabled():
            raise ConfigError(
                f"{type(self).__name__} is cut into {pipeline.plan.stages} pipeline stages: train it by\n"
                "  out = model.execute_pipeline(batch, optimizer=optimizer); optimizer.step(); optimizer.zero_grad()\n"
                "  A plain call is for inference: model.eval(), or under torch.no_grad()."
            )
        refuse_collected(pipeline.inner, pipeline.plan.stages, kwargs)
        with pipeline.failures.deadline():
            return call_through_stages(
                *(self, self._autopar_span, pipeline.conductor, pipeline.plan, pipeline.mpu.pp.rank, pipeline.post),
                *(args, kwargs),
            )

    return forward


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` that samples alike on all ranks of a model replica: they share the first one's random state."""
    pipeline: Pipeline = self._autopar_pipeline
    axis = pipeline.mpu.model
    with pipeline.failures.deadline(), pipeline.failures.blame("a collective in generate", axis.ranks):
        share(axis, pipeline.mpu.device)
        with contextlib.nullcontext() if self._autopar_check is None else self._autopar_check.first_only():
            return type(self).generate(self, *args, **kwargs)

"""A model in pipeline stages: built by ``initialize``, undone by ``deparallelize``, trained by ``execute_pipeline``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.adapters.wrappers import tuner_layers
from autopar.config.pipeline import PipelineConfig
from autopar.data_parallel.grad_sync import TiedWeights, average_over_replicas, held_alike
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.pipeline_parallel.batch_checks import read_batch
from autopar.pipeline_parallel.criterion import LossOf
from autopar.pipeline_parallel.engine import Engine, Step
from autopar.pipeline_parallel.generate import call_through_stages
from autopar.pipeline_parallel.merged_outputs import merge_outputs
from autopar.pipeline_parallel.microbatch import (
    batch_size,
    label_count,
    next_batch,
    split,
    weights_of,
    weights_over_replicas,
)
from autopar.pipeline_parallel.outputs import incomplete
from autopar.pipeline_parallel.own_loss import OwnLoss
from autopar.pipeline_parallel.p2p import P2P, Message, map_tensors
from autopar.pipeline_parallel.schedule import Action, forwards, make_schedule
from autopar.pipeline_parallel.stage_forward import StageContext, mark_boundaries, unmark_boundaries
from autopar.pipeline_parallel.stage_weights import release, reload
from autopar.plan.stages import StagePlan, refuse_collected
from autopar.swap import bind, unbind

__all__ = ["Pipeline", "PipelineOutput"]

_LOSS = Message("the loss", 1_000_000)
_OWNER = "the pipeline"


@dataclass
class PipelineOutput:
    """Result of ``execute_pipeline``; also readable as ``out["loss"]``.

    Attributes:
        loss: of the whole batch, detached; None but on the last stage, unless ``broadcast_loss``.
        outputs: the model's, of the whole batch, detached, on the last stage with ``return_outputs``; else None.
    """

    loss: torch.Tensor | None = None
    outputs: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Pipeline:
    """The stages of one model on this rank.

    Args:
        model: whole blocks in place (sharded by tensor parallelism already); changed in place.
        inner: the Hugging Face model inside it, or a plain module.
        plan: its stages.
        loss: facts about the model's own loss.
        check: compare the batch over the stages on the first step of each mode.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        plan: StagePlan,
        mpu: MPU,
        config: PipelineConfig,
        failures: FailureLog,
        loss: OwnLoss,
        *,
        check: bool = True,
    ) -> None:
        self.inner, self.plan, self.mpu, self.config, self.failures = inner, plan, mpu, config, failures
        self.context = StageContext(plan.encoder)
        self.p2p = P2P(mpu, failures)
        if plan.stages > 1:
            mark_boundaries(model, plan, self.context)
        self._adapted = sum(1 for _ in tuner_layers(model))
        self.released = release(model, plan, mpu.pp.rank, mpu.device)
        self.context.placeholders = self.released.placeholders
        for placeholder in self.released.placeholders.values():
            placeholder.in_front = self.context.in_front
        self.tied = TiedWeights(model, plan, mpu)
        self.engine = Engine(
            model, self.context, plan, mpu.pp.rank, self.p2p, check=check, released=self.released.parameters
        )
        self.engine.tied = self.tied
        self.loss, self.main_input = loss, getattr(inner, "main_input_name", "")
        self.unchecked = {True, False} if check else set[bool]()
        self.averages = True  # gradients over dp, at the end of a training pass
        self.unaveraged = False  # whether the last pass left that to a later one
        self._schedules: dict[tuple[bool, int], list[list[Action]]] = {}

    def attach(self, model: nn.Module) -> None:
        """Give ``model`` its ``execute_pipeline`` and ``no_sync``; in several stages also a forward through them."""
        model._autopar_pipeline = self  # type: ignore[assignment]
        bind(model, _OWNER, execute_pipeline=execute_pipeline, no_sync=no_sync)
        encoder = None if self.plan.encoder is None else self.plan.elements[self.plan.encoder]
        for path, module in model.named_modules() if self.plan.stages > 1 else ():
            called = module is model or isinstance(module, PreTrainedModel) or path == encoder  # by itself
            span = self._span(path) if called else None
            if span is not None:
                kind: Any = type(module)
                module._autopar_pipeline = self
                bind(module, _OWNER, forward=_forward_of(kind, span))

    def expect_steps(self, optimizer: Any) -> None:
        """Take it for a mistake if this rank never steps: the optimizer that ``initialize`` got has weights here."""
        if optimizer is not None and self.engine.steps is not None:
            self.engine.steps.expected = any(p.numel() for group in optimizer.param_groups for p in group["params"])

    def _span(self, path: str) -> tuple[int, int] | None:
        """The elements that a module runs."""
        start = f"{path}." if path else ""
        inside = [p for p, element in enumerate(self.plan.elements) if element == path or element.startswith(start)]
        return (inside[0], inside[-1] + 1) if inside else None

    def undo(self, model: nn.Module) -> None:
        """Give every stage the whole model back (each still a tensor-parallel shard). Collective."""
        reload(model, self.plan, self.released, self.mpu)
        if self.plan.stages > 1:
            unmark_boundaries(model, self.plan)
        unbind(model, _OWNER)
        for module in model.modules():
            module.__dict__.pop("_autopar_pipeline", None)

    def actions(self, backward: bool, microbatches: int) -> list[list[Action]]:
        """Return every rank's list of actions."""
        key = (backward, microbatches)
        if key not in self._schedules:
            make = make_schedule if backward else forwards
            self._schedules[key] = make(self.config.schedule, self.plan.rank_of, microbatches)
        return self._schedules[key]

    def check_adapters(self, model: nn.Module) -> None:
        """Raise ConfigError if layers have got adapters since: no stage has those of the others."""
        now = sum(1 for _ in tuner_layers(model))
        if now != self._adapted:
            raise ConfigError(
                f"{now} layers of {type(model).__name__} have adapters, {self._adapted} had them when it was split "
                f"into {self.plan.stages} pipeline stages.\n  Adapters come first: model = "
                "autopar.initialize(peft.get_peft_model(plain_model, lora_config), config).\n"
                "  On a model that is parallelized already: autopar.integrations.get_peft_model(model, lora_config)."
            )

    def read_step(
        self,
        data: Any,
        criterion: Callable[..., Any] | None,
        count: Callable[[dict[str, Any]], Any] | None = None,
        *,
        backward: bool,
        wants_loss: bool,
    ) -> Step:
        """Read the next batch, check it, split it into micro-batches and weigh their losses. Collective."""
        mpu, config = self.mpu, self.config
        if count is not None and criterion is None:
            raise ConfigError(
                "execute_pipeline: count= says what a criterion is a mean over, and there is no criterion="
            )
        by_labels = config.loss_reduction == "tokens" or count is not None
        labels = functools.partial(label_count, main_input=self.main_input, shifted=self.loss.shifted)
        whole = labels if count is None else lambda batch: float(count(batch))
        batch, counts = read_batch(
            lambda: map_tensors(next_batch(data), lambda tensor: tensor.to(mpu.device)),
            *(self.p2p, mpu, self.unchecked, backward),
            whole if backward and (by_labels or self.averages) else None,
        )
        refuse_collected(self.inner, self.plan.stages, batch)
        samples = batch_size(batch, self.main_input)
        of_model = getattr(self.inner, "config", None)
        microbatches = split(batch, samples, config.microbatch_size, config.num_microbatches, of_model)
        reduction = "tokens" if by_labels else config.loss_reduction
        if by_labels and criterion is None and wants_loss:
            reduction = self.loss.reduction(batch, len(microbatches))
        shares = weights_of(microbatches, self.main_input, reduction, self.loss.shifted, count)
        globally = counts and reduction == "tokens"
        return Step(
            microbatches=microbatches,
            weights=weights_over_replicas(shares, counts, mpu.dp.rank) if globally else shares,
            shares=shares,
            loss_of=self._loss_of(criterion, backward) if wants_loss else None,
            backward=backward,
        )

    def _loss_of(self, criterion: Callable[..., Any] | None, backward: bool) -> LossOf:
        if criterion is None or not backward or not self.last or self.plan.stages == 1:
            return LossOf(criterion, required=backward)
        blocks = {
            id(parameter): f"{path}.{name}"
            for path in self.plan.elements
            for name, parameter in self.engine.model.get_submodule(path).named_parameters()
        }
        return LossOf(criterion, required=backward, blocks=blocks)

    def run(self, model: nn.Module, step: Step) -> None:
        """Run one pass of the schedule; sum gradients over the holders of tied weights, average them over replicas."""
        actions = self.actions(step.backward, len(step.microbatches))
        if not step.backward:
            self.engine.run(actions, step)
            return
        state = vars(model)["_autopar"]
        ours = state.step is not None and state.step.model is model
        with state.step.fp32_gradients() if ours else contextlib.nullcontext():
            summing = "summing the gradients of weights that several stages hold"
            with self.tied.apart():
                self.engine.run(actions, step)
                with self.failures.blame(summing, self.mpu.pp.ranks):
                    self.tied.sum(held_alike(model, state.plan, self.mpu))
            if self.averages:
                averaging = "averaging the gradients over the data-parallel replicas"
                with self.failures.blame(averaging, self.mpu.dp_cp.ranks):
                    average_over_replicas(model, state.plan, self.plan, self.mpu)
        self.unaveraged = not self.averages and self.mpu.dp_cp.size > 1

    def result(self, step: Step, return_loss: bool, broadcast_loss: bool) -> PipelineOutput:
        """Put the results of a step's micro-batches together. Collective with ``broadcast_loss``."""
        result = PipelineOutput()
        if return_loss and step.losses:
            counted = [step.losses[m] * share for m, share in enumerate(step.shares) if share]
            result.loss = torch.stack(counted).sum() if counted else step.losses[0]
        if return_loss and broadcast_loss and self.plan.stages > 1:
            result.loss = self.share_loss(result.loss)
        if step.outputs:
            sizes = [batch_size(microbatch, self.main_input) for microbatch in step.microbatches]
            outputs = [step.outputs[number] for number in range(len(sizes))]
            result.outputs = incomplete(merge_outputs(outputs, sizes, step.shares), step.unavailable)
        return result

    @property
    def last(self) -> bool:
        """Check whether this rank holds the last stage."""
        return self.plan.rank_of[-1] == self.mpu.pp.rank

    def share_loss(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        """Send the last stage's loss to all ranks of the axis, and return it."""
        if self.last:
            self.p2p.send_to_others(loss, _LOSS)
            self.p2p.wait_sent()
        else:
            loss = self.p2p.receive(self.plan.rank_of[-1], _LOSS)
        return loss


@contextlib.contextmanager
def no_sync(self: nn.Module) -> Iterator[None]:
    """Leave out the averaging over replicas; the next ``execute_pipeline`` outside averages all gradients.

    For a step of several calls: it saves communication and changes no number.
    """
    pipeline: Pipeline = vars(self)["_autopar_pipeline"]
    before, pipeline.averages = pipeline.averages, False
    try:
        yield
    finally:
        pipeline.averages = before


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
    count: Callable[[dict[str, Any]], Any] | None = None,
) -> PipelineOutput:
    """Run forward and backward of one batch, in micro-batches, through all stages; gradients accumulate.

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
        count: ``inputs -> number`` that the ``criterion`` of a micro-batch is a mean over, if not its labels:
            ``lambda inputs: class_weights[inputs["labels"]].sum()``. It runs on every rank.

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
        ConfigError: ``data`` is neither a batch nor an iterator, the outputs hold no loss to train with, the model's
            own loss is no mean over ``labels`` and there are several micro-batches, or ``criterion`` reads weights of
            blocks or returns no tensor, or ``count`` comes without one.
        PipelineError: another stage, tensor-parallel rank or replica failed, ended, or did not deliver within
            ``pipeline.timeout``; names it.

    After an error in the middle of a step, gradients of earlier calls are as they were for weights on several stages;
    others hold a part of this call's too. Use ``zero_grad`` before going on.
    """
    pipeline: Pipeline = vars(self)["_autopar_pipeline"]
    backward = (self.training and torch.is_grad_enabled()) if forward_only is None else not forward_only
    with pipeline.p2p.reports_failure():
        pipeline.check_adapters(self)
        pipeline.released.follow(self)
        step = pipeline.read_step(data, criterion, count, backward=backward, wants_loss=backward or return_loss)
        step.scale = getattr(optimizer, "scale_loss", None)
        step.keep_outputs = return_outputs
        pipeline.run(self, step)
        return pipeline.result(step, return_loss, broadcast_loss)


@functools.cache
def _forward_of(kind: Any, span: tuple[int, int]) -> Callable[..., Any]:
    """The forward of a model in stages, which runs the elements of ``span``; ``generate`` reads its signature."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline: Pipeline = self._autopar_pipeline
        if pipeline.context.forward is not None:
            return type(self).forward(self, *args, **kwargs)
        if self.training and torch.is_grad_enabled():
            raise ConfigError(
                f"{type(self).__name__} is split into {pipeline.plan.stages} pipeline stages: train it by\n"
                "  out = model.execute_pipeline(batch, optimizer=optimizer); optimizer.step(); optimizer.zero_grad()\n"
                "  A plain call is for inference: model.eval(), or under torch.no_grad()."
            )
        refuse_collected(pipeline.inner, pipeline.plan.stages, kwargs)
        pipeline.released.follow(pipeline.engine.model)
        with pipeline.failures.deadline():
            return call_through_stages(self, span, pipeline.engine, args, kwargs)

    return forward

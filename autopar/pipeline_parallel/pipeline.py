"""Build a model's pipeline stages, undo them, train with ``execute_pipeline``, and call the model through stages.

A model with one stage also has ``execute_pipeline`` and ``no_sync``, to accumulate gradients over micro-batches.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from autopar.compat.peft import is_peft_model, tuner_layers
from autopar.config.sections import PipelineConfig
from autopar.data_parallel.grad_sync import held_alike
from autopar.distributed.autograd_functions import refuse_transforms
from autopar.distributed.failures import FailureLog
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.distributed.rng import base_seed
from autopar.errors import ConfigError, nearest, not_parallelized
from autopar.pipeline_parallel import outputs
from autopar.pipeline_parallel.batch_checks import compare_call, read_batch
from autopar.pipeline_parallel.engine import Engine, Step
from autopar.pipeline_parallel.microbatch import (
    OwnLoss,
    batch_size,
    label_count,
    loss_of,
    next_batch,
    split,
    weights_of,
    weights_over_replicas,
)
from autopar.pipeline_parallel.p2p import P2P, Message, UnexpectedReport, map_tensors
from autopar.pipeline_parallel.schedule import Action, forwards, make_schedule
from autopar.pipeline_parallel.stage_forward import (
    StageContext,
    StageForward,
    StageOutput,
    Streams,
    mark_boundaries,
    run_stage,
    unmark_boundaries,
)
from autopar.pipeline_parallel.stage_weights import TiedWeights, release, reload
from autopar.plan.stages import StagePlan, refuse_collected
from autopar.policy.match import is_hugging_face_model
from autopar.swap import argument_names, bind, not_taken, unbind

_OWNER = "the pipeline"


@dataclass
class PipelineOutput:
    """The result of ``execute_pipeline``, also readable as ``out["loss"]``.

    Attributes:
        loss: The detached loss of the batch, on the last stage, or on all stages with ``broadcast_loss``; otherwise
        None.
        outputs: The detached outputs of the model, on the last stage with ``return_outputs``; otherwise None.
    """

    loss: torch.Tensor | None = None
    outputs: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def attach(model: nn.Module) -> None:
    """Add the methods to ``model``."""
    bind(model, _OWNER, execute_pipeline=execute_pipeline, no_sync=no_sync)


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`."""
    unbind(model, _OWNER)


def pipeline_of(model: nn.Module) -> Pipeline:
    """Return the stages of a parallelized model on this rank; raise ConfigError for another model."""
    state = vars(model).get("_autopar")
    if state is None:
        raise not_parallelized(model)
    return state.pp or state.pipeline(model)


@contextlib.contextmanager
def no_sync(self: nn.Module) -> Iterator[None]:
    """Skip the averaging over replicas; the next ``execute_pipeline`` outside of the block averages all gradients.

    In a step of several calls it saves communication without changing the result.
    """
    pipeline = pipeline_of(self)
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
    penalty: Callable[[dict[str, nn.Parameter]], Any] | None = None,
) -> PipelineOutput:
    """Run the forward and backward of one batch, in micro-batches, through all stages; gradients accumulate.

    Every rank of a model replica calls it with the same batch. After an error in the middle of a step call
    ``zero_grad``, because some micro-batches may have added gradients.

    Args:
        data: A dict of the model's arguments (a ``BatchEncoding``), or an iterator over such dicts, from which the next
            one is read. With ``criterion`` it may have further tensors for the loss (targets, weights).
        criterion: A function ``(outputs, inputs) -> loss`` of one micro-batch, a mean. By default ``outputs.loss``, or
            the only number in a tuple or dict of outputs.
        optimizer: The optimizer that will step; its ``scale_loss`` is applied, if it has one.
        return_loss, return_outputs: True to return the loss; the model's outputs, merged over all micro-batches.
        broadcast_loss: True to return the loss on every stage instead of only on the last one.
        forward_only: True to skip the backward; by default in evaluation mode and under ``no_grad``.
        count: A function ``inputs -> number``, the divisor of a micro-batch's loss if it is not the number of labels:
            ``lambda inputs: class_weights[inputs["labels"]].sum()``. It runs on every rank.
        penalty: A function ``parameters -> number``, added to the loss of the batch. Each stage calls it with its
            parameters by name: ``lambda own: sum(autopar.full_tensor(p).norm() for p in own.values())``.

    Returns:
        The :class:`PipelineOutput`. With ``loss_reduction: tokens`` the loss and all gradients are equal to a pass of
        the full batch: each micro-batch is weighted by its labels that are not -100, or by its samples without labels.
        With ``num_items_in_batch`` in the batch, by which the model divides its losses, they are added. Gradients are
        averaged over data-parallel replicas, weighted by labels too, so they are the gradients of the global batch; the
        loss is this replica's. The average over replicas is unweighted, as in ``DistributedDataParallel``, for
        ``loss_reduction: microbatch``, ``num_items_in_batch`` and losses that are not a mean over labels.

    Raises:
        StopIteration: The iterator has ended on all ranks of this replica.
        ConsistencyError: The stages of one replica got different batches (a sample of each tensor is compared) or
            stepped optimizers after different calls, or the iterator has ended on only some ranks.
        ConfigError: ``data`` is neither a batch nor an iterator, the outputs have no loss to train with, the model's
            loss is not a mean over ``labels`` (or is user-defined, without ``count``) and there are several
            micro-batches, or ``criterion`` reads weights of blocks or does not return a tensor.
        PipelineError: Another stage, tensor-parallel rank or replica failed, ended, or exceeded ``pipeline.timeout``.
            The error names it.
    """
    pipeline = pipeline_of(self)
    backward = (self.training and torch.is_grad_enabled()) if forward_only is None else not forward_only
    with pipeline.engine.one_pass():
        if "peft" in sys.modules:
            pipeline.check_adapters(self)
        pipeline.released.follow(self)
        step = pipeline.read_step(data, criterion, count, backward=backward, wants_loss=backward or return_loss)
        step.scale = getattr(optimizer, "scale_loss", None)
        step.keep_outputs, step.penalty = return_outputs, penalty
        pipeline.run(self, step)
        return pipeline.result(step, return_loss, broadcast_loss)


_LOSS = Message("the loss", 1_000_000)
_STAGES = "stages"


class Pipeline:
    """The stages of one model on this rank.

    Args:
        model: The model with all blocks, already sharded by tensor parallelism. It is changed in place.
        inner: The Hugging Face model in ``model``, or a custom module.
        check: True to compare batches, optimizer steps and copies of weights between the stages.
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
        self.context = StageContext(plan)
        self.p2p = P2P(mpu, failures)
        if plan.stages > 1:
            mark_boundaries(model, plan, self.context)
        self._adapted = sum(1 for _ in tuner_layers(model))
        self.released = release(model, plan, mpu.pp.rank, mpu.device)
        self.context.placeholders = self.released.placeholders
        for placeholder in self.released.placeholders.values():
            placeholder.in_front = self.context.in_front
        self.tied = TiedWeights(model, plan, mpu)
        released = self.released.parameters
        self.engine = Engine(model, self.context, plan, self.p2p, self.tied, check=check, released=released)
        self.loss, self.main_input = loss, getattr(inner, "main_input_name", "")
        self.last = plan.rank_of[-1] == mpu.pp.rank  # True if this rank holds the last stage
        self.averages = True  # False inside of no_sync: gradients are not averaged over dp
        self.unaveraged = False  # True if the last pass did not average
        self._warned = False  # True after the warning about replicas with different numbers of labels
        # transformers fills a KV cache by default, which would copy all keys and values without use.
        cached = isinstance(inner, PreTrainedModel) and (model is inner or is_peft_model(model))
        cached = cached and "use_cache" in inspect.signature(inner.forward).parameters
        self._defaults: dict[str, Any] = {"use_cache": False} if cached else {}
        self._schedules: dict[tuple[bool, int], list[list[Action]]] = {}

    def attach(self, model: nn.Module) -> None:
        """Bind a forward through the stages to ``model``, and to models inside it that user code may call."""
        elements = self.plan.elements
        encoder = None if self.plan.encoder is None else elements[self.plan.encoder]
        for path, module in model.named_modules():
            if not (module is model or is_hugging_face_model(module) or path == encoder):
                continue
            start = f"{path}." if path else ""
            inside = [place for place, name in enumerate(elements) if name == path or name.startswith(start)]
            if inside:
                kind: Any = type(module)
                module._autopar_pipeline = self
                bind(module, _STAGES, forward=_forward_of(kind, (inside[0], inside[-1] + 1)))

    def expect_steps(self, optimizer: Any) -> None:
        """Expect steps of the optimizer that was passed to ``initialize`` on this rank, if it has weights here."""
        if optimizer is not None and self.engine.steps is not None:
            self.engine.steps.expected = any(p.numel() for group in optimizer.param_groups for p in group["params"])

    def undo(self, model: nn.Module) -> None:
        """Restore all blocks on every stage, still sharded over tp. Collective."""
        reload(model, self.plan, self.released, self.mpu)
        unmark_boundaries(model, self.plan)
        unbind(model, _STAGES)
        for module in model.modules():
            module.__dict__.pop("_autopar_pipeline", None)

    def actions(self, backward: bool, microbatches: int) -> list[list[Action]]:
        """Return every rank's list of actions ([Note: memory of the schedule])."""
        key = (backward, microbatches)
        if key not in self._schedules:
            make = make_schedule if backward else forwards
            self._schedules[key] = make(self.config.schedule, self.plan.rank_of, microbatches)
        return self._schedules[key]

    def check_adapters(self, model: nn.Module) -> None:
        """Raise ConfigError if layers got adapters after the split, because each stage would have only some."""
        now = sum(1 for _ in tuner_layers(model))
        if now != self._adapted:
            raise ConfigError(
                f"{now} layers of {type(model).__name__} have adapters; {self._adapted} had them before the split into "
                f"{self.plan.stages} pipeline stages.\n  Add adapters before: model = "
                "autopar.initialize(peft.get_peft_model(base_model, lora_config), config).\n"
                "  On a parallelized model use autopar.integrations.get_peft_model(model, lora_config)."
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
        """Read the next batch, check it, split it into micro-batches and weight their losses. Collective."""
        mpu, config = self.mpu, self.config
        by_labels = config.loss_reduction == "tokens" or count is not None

        def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
            batch = map_tensors(next_batch(data), lambda tensor: tensor.to(mpu.device))
            refuse_collected(self.inner, self.plan.stages, batch)
            samples, of_model = batch_size(batch, self.main_input), getattr(self.inner, "config", None)
            return batch, split(batch, samples, config.microbatch_size, config.num_microbatches, of_model)

        def counted(found: tuple[dict[str, Any], Any]) -> float:
            counts = self.loss.counted(found[0])
            return float(count(found[0]) if count else label_count(counts, self.main_input, self.loss.shifted))

        (batch, microbatches), counts = read_batch(
            read,
            lambda found: self.engine.report(found[0], len(found[1]), backward=backward),
            *(self.p2p, mpu, counted if backward and (by_labels or self.averages) else None),
        )
        reduction = "tokens" if by_labels else config.loss_reduction
        if by_labels and criterion is None and wants_loss:
            replicas = mpu.dp.size if backward else 1
            reduction = self.loss.reduction(batch, len(microbatches), replicas, counts=count is not None)
            self._warned = self._warned or (count is None and self.loss.warn_of_replicas(counts))
        parts = microbatches if count else [dict(self.loss.counted(part)) for part in microbatches]
        shares = weights_of(parts, self.main_input, reduction, self.loss.shifted, count)
        return Step(
            microbatches=microbatches,
            weights=_weights(shares, counts if reduction == "tokens" else [], mpu.dp.rank),
            shares=shares,
            loss_of=self._loss_of(criterion, backward) if wants_loss else None,
            backward=backward,
            defaults=self._defaults if backward and self._needs_no_cache(batch) else {},
            targets=_targets(self.engine.model, batch) if criterion is not None else (),
        )

    def _needs_no_cache(self, batch: dict[str, Any]) -> bool:
        """Return whether transformers computes the same without a cache.

        Without a cache and a mask it would split documents by ``position_ids``, which waits for an accelerator.
        """
        masked = batch.get("attention_mask") is not None or self.mpu.device.type == "cpu"
        return masked and not any(name.endswith("position_ids") for name in batch)

    def _loss_of(self, criterion: Callable[..., Any] | None, backward: bool) -> Callable[[Any, dict[str, Any]], Any]:
        blocks: dict[int, str] = {}
        if criterion is not None and backward and self.last and self.plan.stages > 1:
            for path in self.plan.elements:
                named = self.engine.model.get_submodule(path).named_parameters()
                blocks |= {id(parameter): f"{path}.{name}" for name, parameter in named}
        return functools.partial(loss_of, criterion, required=backward, blocks=blocks)

    def run(self, model: nn.Module, step: Step) -> None:
        """Run one pass of the schedule, sum gradients of tied weights over stages, and average over replicas."""
        actions = self.actions(step.backward, len(step.microbatches))
        if not step.backward:
            self.engine.run(actions, step)
            self._penalise(model, step)
            return
        state = vars(model)["_autopar"]
        step.together = self.mpu.dp.size > 1 and (state.config.fully_sharded or bool(state.plan.experts))
        frozen = self.plan.stages == 1 and not any(parameter.requires_grad for parameter in model.parameters())
        step.required = step.penalty is None and (frozen or self.mpu.dp.size == 1)
        rows, nothing = state.dp.fully_sharded if self.plan.stages > 1 else None, contextlib.nullcontext()
        stepped = state.dp.step
        ours = stepped is not None and stepped.model is model
        average = self.averages and self.mpu.dp_cp.size > 1
        averaging = state.dp.replicas.averaged(model, early=step.penalty is None) if average else nothing
        with stepped.fp32_gradients() if ours else nothing, averaging as step.before_last_backward:
            summing = "summing the gradients of weights that several stages hold"
            with self.tied.apart():
                gathering = "gathering weights and reducing gradients over the data-parallel replicas (FSDP2)"
                with self.failures.blame(gathering, self.mpu.fsdp.ranks), rows.one_pass() if rows else nothing:
                    self.engine.run(actions, step)
                    self._penalise(model, step)
                with self.failures.blame(summing, self.mpu.pp.ranks):
                    self.tied.sum(held_alike(model, state.plan, self.mpu))
        self.unaveraged = not self.averages and self.mpu.dp_cp.size > 1 and not state.config.fully_sharded

    def _penalise(self, model: nn.Module, step: Step) -> None:
        """Add the penalty of this stage's parameters and its gradients. A tied weight counts on its first stage."""
        if step.penalty is None:
            return
        plan, place = vars(model)["_autopar"].plan, self.mpu.pp.rank
        own = {
            name: parameter
            for name, parameter in model.named_parameters()
            if min(self.plan.holders(plan.canonical(name))) == place
        }
        with torch.set_grad_enabled(step.backward):
            value = step.penalty(own) if own else 0.0
        if isinstance(value, torch.Tensor) and (value.numel() != 1 or not value.is_floating_point()):
            raise ConfigError(f"execute_pipeline: penalty= must return one number, got a tensor of {list(value.shape)}")
        if isinstance(value, torch.Tensor) and value.requires_grad:
            (value if step.scale is None else step.scale(value)).backward()
        step.penalties = torch.as_tensor(value, dtype=torch.float32, device=self.mpu.device).detach().reshape(())

    def result(self, step: Step, return_loss: bool, broadcast_loss: bool) -> PipelineOutput:
        """Merge the results of a step's micro-batches. Collective with ``broadcast_loss``."""
        result = PipelineOutput()
        if return_loss and step.losses:
            counted = [step.losses[m] * share for m, share in enumerate(step.shares) if share]
            result.loss = torch.stack(counted).sum() if counted else step.losses[0]
        if return_loss and step.penalties is not None:
            total = step.penalties.clone()
            if self.mpu.pp.size > 1:
                with self.failures.blame("adding up the penalties of all stages", self.mpu.pp.ranks):
                    all_reduce(total, group=self.mpu.pp.group)
            result.loss = None if result.loss is None else result.loss + total.to(result.loss.dtype)
        if return_loss and broadcast_loss and self.plan.stages > 1:
            if self.last:
                self.p2p.send_to_others(result.loss, _LOSS)
                self.p2p.wait_sent()
            else:
                result.loss = self.p2p.receive(self.plan.rank_of[-1], _LOSS)
        if step.outputs:
            sizes = [batch_size(microbatch, self.main_input) for microbatch in step.microbatches]
            merged = outputs.merge_outputs([step.outputs[number] for number in range(len(sizes))], sizes, step.shares)
            result.outputs = outputs.incomplete(merged, step.unavailable)
        return result


def _targets(model: Any, batch: dict[str, Any]) -> frozenset[str]:
    """Return the entries that only the criterion reads. A name close to a missing argument raises ConfigError."""
    model = model.get_base_model() if is_peft_model(model) else model  # PeftModel takes all, and passes it on
    found, missing = not_taken(model, batch), [name for name in argument_names(model) if name not in batch]
    for name in sorted(found):
        if hint := nearest(name, missing, cutoff=0.8):
            raise ConfigError(
                f"execute_pipeline: the forward of {type(model).__name__} does not take '{name}'.{hint}\n"
                "  Rename the entry. If only the criterion reads it, choose another name."
            )
    return found


def _weights(shares: list[float], counts: list[float], replica: int) -> list[float]:
    """Return the factors of losses. If no replica has a label, NaN is differentiated, as in one process."""
    if not (sum(counts) if counts else any(shares)):
        return [1 / len(shares)] * len(shares)
    return weights_over_replicas(shares, counts, replica) if counts else shares


@functools.cache
def _forward_of(kind: Any, span: tuple[int, int]) -> Callable[..., Any]:
    """Return a forward through the stages for the elements of ``span``; ``generate`` reads its signature."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline: Pipeline = self._autopar_pipeline
        refuse_transforms(lambda: [*self.parameters(), args, kwargs])
        if pipeline.context.forward is not None:
            return type(self).forward(self, *args, **kwargs)
        if self.training and torch.is_grad_enabled():
            raise ConfigError(
                f"{type(self).__name__} has {pipeline.plan.stages} pipeline stages and cannot be trained by a plain "
                "call\n  Use out = model.execute_pipeline(batch, optimizer=optimizer); optimizer.step(); "
                "optimizer.zero_grad()\n  For inference call model.eval(), or use torch.no_grad()."
            )
        refuse_collected(pipeline.inner, pipeline.plan.stages, kwargs)
        pipeline.released.follow(pipeline.engine.model)
        return call_through_stages(self, span, pipeline.engine, args, kwargs)

    return forward


# -- plain calls, also by ``generate`` ---------------------------------------------------------------------------------

_RESULT = Message("the model's result", 1_000_001)
_COMPARED = "_autopar_compared"  # attribute of a returned cache: True if the call had received it


@torch.no_grad()
def call_through_stages(
    module: nn.Module, span: tuple[int, int], engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of ``module(*args, **kwargs)`` through all stages, on every rank, without gradients.

    Every rank calls it with the same arguments. A KV cache holds only this rank's layers.

    Args:
        span: The range ``(first, stop)`` of the module's elements.

    Raises:
        ConfigError: The call has a KV cache, and ranks have several stages.
        ConsistencyError: Stages got different arguments in the first call with a cache, or in a call without one; or a
            cache was used before on only some ranks.
    """
    start, stop = span
    context, plan, p2p = engine.context, engine.plan, engine.p2p
    if context.encoder is not None and kwargs.get("encoder_outputs") is not None and stop > context.encoder + 1:
        start = max(start, context.encoder + 1)
    stages = [s for s in range(plan.stages) if plan.bounds[s] < stop and plan.bounds[s + 1] > start]
    given, ranks = outputs.find_cache(args, kwargs), [plan.rank_of[stage] for stage in stages]
    if given is not None and len(set(ranks)) < len(ranks):  # the second stage would read the length after this call
        raise ConfigError(
            f"a KV cache is not supported with {len(ranks)} stages on {len(set(ranks))} ranks, several per rank\n"
            "  Use generate(..., use_cache=False), or a schedule with one stage per rank: 1f1b, gpipe, zero-bubble."
        )
    plain = functools.partial(type(module).forward, module)  # the hooks around it have run
    rank, owner = p2p.axis.rank, ranks[-1]
    compared, checks = getattr(given, _COMPARED, None), engine.steps is not None
    with p2p.one_pass():
        try:
            if checks and not compared:  # in generate only the first call
                compare_call(module, args, kwargs, p2p, compared)
            blame = p2p.failures.blame("a collective in a plain call of the model", p2p.failures.mpu.tp_cp.ranks)
            with base_seed(plan.stages > 1 and module.training) as seed, blame:
                result, cache = _run_stages(plain, stages, engine, args, kwargs, seed)
            cache = cache if given is None else given
            if cache is not None:
                setattr(cache, _COMPARED, given is not None)
            if owner == rank:
                p2p.send_to_others((outputs.complete(result), outputs.unavailable(result)), _RESULT)
            else:
                result = outputs.incomplete(*p2p.receive(owner, _RESULT, cache=cache))
            p2p.wait_sent()
        except UnexpectedReport:  # a rank has another cache: all ranks compare, and raise
            compare_call(module, args, kwargs, p2p, compared)
            raise
    if cache is not None and rank not in ranks:
        outputs.record_lengths(cache, kwargs)
    return result


def _run_stages(
    plain: Any, stages: list[int], engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None
) -> tuple[Any, Cache | None]:
    """Run this rank's stages; return the result of the last one (the model's, if it is here), and their cache."""
    plan, p2p = engine.plan, engine.p2p
    output: StageOutput | None = None
    result: Any = None
    cache: Cache | None = None
    for stage, before, after in zip(stages, [None, *stages], [*stages[1:], None], strict=False):
        if plan.rank_of[stage] != p2p.axis.rank:
            continue
        if before is not None and plan.rank_of[before] != p2p.axis.rank:
            output, seed = p2p.receive(plan.rank_of[before], _output(before, stage))
        received = None if before is None else output
        bounds, streams = plan.bounds[stage : stage + 2], Streams(seed, plan.stages)
        forward = StageForward(engine.context, bounds, after is None, received, streams, stage)
        result = run_stage(forward, plain, args, dict(kwargs))
        cache = cache or forward.cache
        if after is not None:
            output = result
            if plan.rank_of[after] != p2p.axis.rank:
                p2p.send((output, seed), plan.rank_of[after], _output(stage, after))
    return result, cache


def _output(origin: int, stage: int) -> Message:
    return Message(f"stage {origin}'s output (for stage {stage})", 1_000_002 + stage)

"""The methods ``execute_pipeline`` and ``no_sync`` of a parallelized model.

A model in one piece has them, too: it accumulates gradients over micro-batches. The code that runs them is loaded when
they are first called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.errors import not_parallelized
from autopar.swap import bind, unbind

if TYPE_CHECKING:
    from autopar.pipeline_parallel.pipeline import Pipeline

_OWNER = "the pipeline"


@dataclass
class PipelineOutput:
    """Result of ``execute_pipeline``; also readable as ``out["loss"]``.

    Attributes:
        loss: of the whole batch, detached; None on other stages than the last, unless ``broadcast_loss``.
        outputs: the model's, of the whole batch, detached, on the last stage with ``return_outputs``; else None.
    """

    loss: torch.Tensor | None = None
    outputs: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def attach(model: nn.Module) -> None:
    """Give ``model`` the methods."""
    bind(model, _OWNER, execute_pipeline=execute_pipeline, no_sync=no_sync)


def detach(model: nn.Module) -> None:
    """Take them back."""
    unbind(model, _OWNER)


def pipeline_of(model: nn.Module) -> Pipeline:
    """Return the stages of a parallelized model on this rank.

    Raises:
        ConfigError: it is not parallelized.
    """
    state = vars(model).get("_autopar")
    if state is None:
        raise not_parallelized(model)
    found: Pipeline = state.pipeline(model)
    return found


@contextlib.contextmanager
def no_sync(self: nn.Module) -> Iterator[None]:
    """Leave out the averaging over replicas; the next ``execute_pipeline`` outside averages all gradients.

    For a step of several calls: it saves communication and changes no number.
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
    """Run forward and backward of one batch, in micro-batches, through all stages; gradients accumulate.

    Every rank of a model replica calls it with the same batch. With one stage it accumulates over micro-batches.

    Args:
        data: a dict of the model's arguments (a ``BatchEncoding``), or an iterator over such dicts: one is taken.
        criterion: ``(outputs, inputs) -> loss`` of one micro-batch, a mean; by default ``outputs.loss``, or the only
            number in a tuple or dict of outputs.
        optimizer: what will step; only its ``scale_loss`` is used, if it has one.
        return_loss, return_outputs: return the loss; the model's outputs, put together from all micro-batches.
        broadcast_loss: return the loss on every stage and not on the last one only.
        forward_only: no backward; by default in evaluation mode and under ``no_grad``.
        count: ``inputs -> number`` that the ``criterion``, or the model's own loss, of a micro-batch is a mean over, if
            not its labels: ``lambda inputs: class_weights[inputs["labels"]].sum()``. It runs on every rank.
        penalty: ``parameters -> number``, added to the loss of the batch. Each stage calls it with its own parameters,
            by name: ``lambda own: sum(autopar.full(p).norm() for p in own.values())``.

    Returns:
        :class:`PipelineOutput`. The loss and all gradients are those of the whole batch at once, with
        ``loss_reduction: tokens``. Each micro-batch counts by its labels that are not -100, or, without labels, by its
        samples; with ``num_items_in_batch`` in the batch, by which the model divides its losses, they add up. Over
        data-parallel replicas gradients are averaged, each replica counting by its labels too, so that they are those
        of the global batch; the loss is this replica's. (``loss_reduction: microbatch``, ``num_items_in_batch`` and
        losses that are not a mean over labels: the plain average, as ``DistributedDataParallel`` takes it.)

    Raises:
        StopIteration: the iterator has ended, on all ranks of this replica.
        ConsistencyError: the stages of one replica got different batches (a sample of each tensor is compared) or
            stepped optimizers behind other calls, or the iterator has ended on some of them, or on some replicas.
        ConfigError: ``data`` is neither a batch nor an iterator, the outputs hold no loss to train with, the model's
            own loss is not a mean over ``labels`` (or is user-defined, without ``count``) and there are several
            micro-batches, or ``criterion`` reads weights of blocks or returns no tensor.
        PipelineError: another stage, tensor-parallel rank or replica failed, ended, or did not deliver within
            ``pipeline.timeout``; names it.

    After an error in the middle of a step use ``zero_grad``: some gradients hold a part of this call's.
    """
    pipeline = pipeline_of(self)
    backward = (self.training and torch.is_grad_enabled()) if forward_only is None else not forward_only
    with pipeline.engine.one_pass():
        pipeline.check_adapters(self)
        pipeline.released.follow(self)
        step = pipeline.read_step(data, criterion, count, backward=backward, wants_loss=backward or return_loss)
        step.scale = getattr(optimizer, "scale_loss", None)
        step.keep_outputs, step.penalty = return_outputs, penalty
        pipeline.run(self, step)
        return pipeline.result(step, return_loss, broadcast_loss)

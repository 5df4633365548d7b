"""Megatron-LM's training loop over a model of ``autopar.initialize``: ``get_forward_backward_func``.

    forward_backward = get_forward_backward_func()
    losses = forward_backward(
        forward_step_func=forward_step, data_iterator=iterator, model=model, num_microbatches=8, forward_only=False
    )
    optimizer.step()

where, as in Megatron-LM's ``pretrain_gpt.py``, ::

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        outputs = model(**batch)
        return outputs, lambda outputs: (outputs.loss, {"lm loss": outputs.loss.detach()})

The step function runs once per micro-batch and stage; every stage reads the data and calls the model once. The data of
all micro-batches is read first. With ``precision.dtype: fp16`` nothing here knows the optimizer, so ``loss_func``
returns ``optimizer.scale_loss(outputs.loss)`` as its loss (and reports the plain one).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from autopar.errors import ConfigError
from autopar.pipeline_parallel.beginning import beginning, read_batch
from autopar.pipeline_parallel.engine import Step
from autopar.pipeline_parallel.pipeline import Pipeline

__all__ = ["get_forward_backward_func"]


def get_forward_backward_func(*_: Any, **__: Any) -> Callable[..., list[Any]]:
    """The function that runs one batch; Megatron-LM's arguments (sizes of the pipeline) are taken and not needed."""
    return forward_backward


def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any],
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    **_: Any,
) -> list[Any]:
    """Forward and backward of ``num_microbatches`` micro-batches; gradients are averaged over them.

    Args:
        forward_step_func: ``(data_iterator, model) -> (outputs, loss_func)``; ``loss_func(outputs) -> (loss, what is
            reported)``, called on the last stage only. In fp16 the loss must have gone through
            ``optimizer.scale_loss``.
        data_iterator: gives micro-batches, the same ones on every stage; one for each call of the step function.
        model: what ``autopar.initialize`` returned (or a list of it).
        seq_length, micro_batch_size: not needed: shapes travel with the activations.
        forward_only: no backward.

    Returns:
        What ``loss_func`` reports, one entry per micro-batch; an empty list but on the last stage.

    Raises:
        ConfigError: the model is not parallelized, or ``collect_non_loss_data``, which is not supported.
        PipelineError: another stage did not deliver.
        ConsistencyError: the stages read different data, or it has ended on some of them.
        StopIteration: it has ended on all of them.
    """
    chosen = model[0] if isinstance(model, list) else model
    pipeline: Pipeline | None = vars(chosen).get("_autopar_pipeline")
    if pipeline is None:
        raise ConfigError(f"{type(chosen).__name__} is not parallelized; autopar.initialize does that")
    if collect_non_loss_data:
        raise ConfigError("collect_non_loss_data is not supported: return the data from loss_func instead")
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches must be at least 1, not {num_microbatches}")
    reported: list[Any] = []

    def loss_of(result: Any, inputs: dict[str, Any]) -> Any:
        outputs, loss_func = result
        loss, report = loss_func(outputs)
        reported.append(report)
        return loss

    engine, backward = pipeline.engine, not forward_only
    with beginning(engine):
        read = functools.partial(_take, data_iterator, num_microbatches)
        count = (lambda _: 1) if backward and pipeline.averages else None
        batches = read_batch(read, engine, pipeline.mpu, pipeline.unchecked, backward, count)[0]
        step = Step(
            microbatches=[{"microbatch": number} for number in range(num_microbatches)],
            weights=[1 / num_microbatches] * num_microbatches,
            loss_of=loss_of,
            backward=backward,
            call=_StepFunction(forward_step_func, batches, chosen, pipeline),
            read=list(batches),
        )
        pipeline.run(chosen, step)
    return reported


def _take(data: Iterator[Any], count: int) -> list[Any]:
    """Not inside the step function, where stages draw other random numbers: a loader would shuffle by them."""
    return [next(data) for _ in range(count)]


class _StepFunction:
    """``forward_step_func`` as what the engine calls: with the number of a micro-batch.

    Several stages on one rank see the same micro-batch.
    """

    def __init__(self, function: Callable[..., Any], batches: list[Any], model: nn.Module, pipeline: Pipeline) -> None:
        self.function, self.batches, self.model = function, batches, model
        self.left = [len(pipeline.plan.stages_on(pipeline.mpu.pp.rank))] * len(batches)

    def __call__(self, microbatch: int) -> Any:
        batch = self.batches[microbatch]
        self.left[microbatch] -= 1
        if not self.left[microbatch]:
            self.batches[microbatch] = None
        return self.function(iter([batch]), self.model)

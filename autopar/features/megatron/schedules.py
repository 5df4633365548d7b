"""Megatron-LM's training loop for a model from ``autopar.initialize``: ``get_forward_backward_func``::

    forward_backward = get_forward_backward_func()
    losses = forward_backward(
        forward_step_func=forward_step, data_iterator=iterator, model=model, num_microbatches=8, forward_only=False
    )
    optimizer.step()

where, as in Megatron-LM's ``pretrain_gpt.py``::

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        outputs = model(**batch)
        return outputs, lambda outputs: (outputs.loss, {"lm loss": outputs.loss.detach()})

``loss_func`` may also return Megatron-LM's three values: the sum of the tokens' losses, their number, and the report.
The loss of a micro-batch is then its mean (``calculate_per_token_loss: False``).

The step function runs once per micro-batch and stage; every stage reads the data and calls the model once. The data of
all micro-batches is read first. With ``precision.dtype: fp16`` the loop has no access to the optimizer, so
``loss_func`` must return ``optimizer.scale_loss(outputs.loss)`` as its loss, and report the unscaled loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autopar.errors import ConfigError
from autopar.pipeline_parallel.batch_checks import read_batch
from autopar.pipeline_parallel.engine import Step
from autopar.pipeline_parallel.pipeline import Pipeline, pipeline_of

__all__ = ["get_forward_backward_func"]


def get_forward_backward_func(*_: Any, **__: Any) -> Callable[..., list[Any]]:
    """Return the function that runs one batch; Megatron-LM's arguments (sizes of the pipeline) are ignored."""
    return forward_backward


def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | list[Any] | None,
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
    seq_length: Any = None,
    micro_batch_size: Any = None,
    decoder_seq_length: Any = None,
    first_val_step: Any = None,
    adjust_tensor_shapes_fn: Any = None,
    force_all_reduce: Any = None,
) -> list[Any]:
    """Run forward and backward of ``num_microbatches`` micro-batches, and average the gradients over them.

    Megatron-LM's other arguments are ignored, since activations carry their shapes.

    Args:
        forward_step_func: Function ``(data_iterator, model) -> (outputs, loss_func)``. ``loss_func(outputs)`` is called
            on the last stage only, and returns ``(loss, report)`` or ``(sum of the tokens' losses, their number,
            report)``.
        data_iterator: Iterator of micro-batches, identical on every stage; None if the step function gets its data
            elsewhere (``broadcast_data``). A list has one iterator per chunk of the model on this rank, or one for all.
        model: Model from ``autopar.initialize``, or a list of it.
        forward_only: True to skip the backward pass.

    Returns:
        Reports of ``loss_func``, one per micro-batch; an empty list on all stages except the last. If the step function
        returns None for ``loss_func`` (with ``forward_only``), its outputs.

    Raises:
        ConfigError: The model is not parallelized, or a function returns a wrong value.
        PipelineError: Another stage failed.
        ConsistencyError, StopIteration: The data differs between stages, or has ended on some stages; on all stages.
    """
    chosen, pipeline = _only_model(model)
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches must be at least 1, not {num_microbatches}")
    chunks = len(pipeline.plan.stages_on(pipeline.mpu.pp.rank))
    iterators = _iterators(data_iterator, chunks)
    reported: list[Any] = []

    def loss_of(result: Any, inputs: dict[str, Any]) -> Any:
        loss, report = _loss_and_report(result, forward_only)
        reported.append(report)
        return loss

    with pipeline.engine.one_pass():
        backward = not forward_only
        read = functools.partial(_take, iterators, num_microbatches)
        count = (lambda _: 1) if backward and pipeline.averages else None
        report = functools.partial(pipeline.engine.report, microbatches=num_microbatches, backward=backward)
        batches = read_batch(read, report, pipeline.p2p, pipeline.mpu, count)[0]
        left = [chunks] * len(batches)

        def call(microbatch: int) -> Any:
            batch = batches[microbatch]
            left[microbatch] -= 1
            if not left[microbatch]:  # all chunks on this rank have read the batch
                batches[microbatch] = None
            return forward_step_func(iter([batch]) if iterators else None, chosen)

        step = Step(
            microbatches=[{"microbatch": number} for number in range(num_microbatches)],
            weights=[1 / num_microbatches] * num_microbatches,
            loss_of=loss_of,
            backward=backward,
            call=call,
        )
        pipeline.run(chosen, step)
    return reported


def _only_model(model: nn.Module | list[nn.Module]) -> tuple[nn.Module, Pipeline]:
    chunks = model if isinstance(model, list | tuple) else [model]
    if not chunks or any(chunk is not chunks[0] for chunk in chunks):
        raise ConfigError(
            f"model is a list of {len(chunks)} {'different modules' if chunks else 'modules'}\n  Pass the model that "
            "autopar.initialize returned, which holds all chunks of this rank (pipeline.chunks)."
        )
    return chunks[0], pipeline_of(chunks[0])


def _iterators(data: Any, chunks: int) -> list[Any]:
    """Return the distinct iterators."""
    given = list(data) if isinstance(data, list | tuple) else [data]
    if len(given) not in (1, chunks):
        raise ConfigError(
            f"data_iterator is a list of {len(given)}, and this rank has {chunks} chunk{'s' if chunks > 1 else ''} of "
            "the model\n  Pass one iterator, or one for each chunk."
        )
    return list({id(iterator): iterator for iterator in given if iterator is not None}.values())


def _loss_and_report(result: Any, forward_only: bool) -> tuple[Any, Any]:
    """Return the loss to differentiate (not yet divided by the number of micro-batches) and the values to report."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(f"forward_step_func must return (outputs, loss_func), not {_form(result)}")
    outputs, loss_func = result
    if loss_func is None and forward_only:
        return None, outputs
    if not callable(loss_func):
        raise ConfigError(f"forward_step_func must return (outputs, loss_func) to train with, not {_form(result)}")
    found = loss_func(outputs)
    if not isinstance(found, tuple | list) or len(found) not in (2, 3):
        raise ConfigError(
            f"loss_func must return (loss, report) or (sum of losses, number of tokens, report), got {_form(found)}"
        )
    loss, *tokens, report = found
    for count in tokens:  # empty, or one number
        loss = loss / torch.as_tensor(count, device=loss.device).clamp(min=1)
    return loss, report


def _form(value: Any) -> str:
    kinds = [type(entry).__name__ for entry in value] if isinstance(value, tuple | list) else None
    return type(value).__name__ if kinds is None else f"({', '.join(kinds)})"


def _take(iterators: list[Any], count: int) -> list[Any]:
    """Read all micro-batches before the step function runs, so that a loader shuffles identically on all stages."""
    batches = [[next(iterator) for iterator in iterators] for _ in range(count)]
    return [of_chunks[0] if of_chunks else None for of_chunks in batches]

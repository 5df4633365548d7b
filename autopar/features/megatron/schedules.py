"""Megatron-LM's training loop over a model of ``autopar.initialize``: ``get_forward_backward_func``::

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

``loss_func`` may return Megatron-LM's three values too: the sum of the tokens' losses, their number, and what is
reported. Each micro-batch then counts by its own mean (``calculate_per_token_loss: False``).

The step function runs once per micro-batch and stage; every stage reads the data and calls the model once. The data of
all micro-batches is read first. With ``precision.dtype: fp16`` nothing here knows the optimizer, so ``loss_func``
returns ``optimizer.scale_loss(outputs.loss)`` as its loss (and reports the plain one).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import ConfigError, nearest
from autopar.pipeline_parallel.batch_checks import read_batch
from autopar.pipeline_parallel.engine import Step
from autopar.pipeline_parallel.pipeline import Pipeline, pipeline_of

__all__ = ["get_forward_backward_func"]

_NOT_NEEDED = (
    "seq_length",
    "micro_batch_size",
    "decoder_seq_length",
    "first_val_step",
    "adjust_tensor_shapes_fn",
    "force_all_reduce",
)
_REFUSED = {
    "p2p_communicator": "stages talk over the groups of model.mpu",
    "pg_collection": "the groups are those of model.mpu",
    "calculate_per_token_loss": (
        "each micro-batch counts by its own mean here; model.execute_pipeline(batch) weighs by tokens, "
        "over all micro-batches and replicas"
    ),
}


def get_forward_backward_func(*_: Any, **__: Any) -> Callable[..., list[Any]]:
    """Return the function that runs one batch. Megatron-LM's arguments (sizes of the pipeline) are ignored."""
    return forward_backward


def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | list[Any] | None,
    model: nn.Module | list[nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    **others: Any,
) -> list[Any]:
    """Run forward and backward of ``num_microbatches`` micro-batches; gradients are averaged over them.

    Args:
        forward_step_func: ``(data_iterator, model) -> (outputs, loss_func)``. ``loss_func(outputs)`` is called on the
            last stage only and returns ``(loss, what is reported)``, or ``(sum of the tokens' losses, their number,
            what is reported)``: each micro-batch then counts by its own mean. In fp16 the loss must have gone through
            ``optimizer.scale_loss``.
        data_iterator: gives micro-batches, the same ones on every stage; one for each call of the step function. None
            where the step function gets its data otherwise (``broadcast_data``). A list holds one for each chunk of the
            model on this rank, each with all micro-batches; or one for all of them.
        model: what ``autopar.initialize`` returned, or a list of it.
        forward_only: no backward.
        collect_non_loss_data: report ``loss_func(outputs, non_loss_data=True)``; with ``forward_only``.
        others: Megatron-LM's. Those that are not needed are ignored: shapes travel with the activations.

    Returns:
        The reports of ``loss_func``, one entry per micro-batch; an empty list on all other stages than the last. Where
        the step function gives None for ``loss_func`` (with ``forward_only``), its outputs.

    Raises:
        ConfigError: the model is not parallelized, an argument is not known, or a function returns something else.
        PipelineError: another stage did not deliver.
        ConsistencyError, StopIteration: the data differs between stages, has ended on some of them; on all of them.
    """
    chosen, pipeline = _only_model(model)
    _check_arguments(num_microbatches, forward_only, collect_non_loss_data, others)
    chunks = len(pipeline.plan.stages_on(pipeline.mpu.pp.rank))
    iterators = _iterators(data_iterator, chunks)
    reported: list[Any] = []

    def loss_of(result: Any, inputs: dict[str, Any]) -> Any:
        loss, report = _loss_and_report(result, forward_only, collect_non_loss_data)
        reported.append(report)
        return loss

    with pipeline.engine.one_pass():
        backward = not forward_only
        read = functools.partial(_take, iterators, num_microbatches)
        count = (lambda _: 1) if backward and pipeline.averages else None
        report = functools.partial(pipeline.engine.report, microbatches=num_microbatches, backward=backward)
        batches = read_batch(read, report, pipeline.p2p, pipeline.mpu, count)[0]
        step = Step(
            microbatches=[{"microbatch": number} for number in range(num_microbatches)],
            weights=[1 / num_microbatches] * num_microbatches,
            loss_of=loss_of,
            backward=backward,
            call=_StepFunction(forward_step_func, batches, chosen, chunks, bool(iterators)),
        )
        pipeline.run(chosen, step)
    return reported


def _only_model(model: nn.Module | list[nn.Module]) -> tuple[nn.Module, Pipeline]:
    chunks = model if isinstance(model, list | tuple) else [model]
    if not chunks or any(chunk is not chunks[0] for chunk in chunks):
        raise ConfigError(
            f"model is a list of {len(chunks)} {'different modules' if chunks else 'modules'}: give what "
            "autopar.initialize returned, which holds all chunks of this rank (pipeline.chunks)"
        )
    return chunks[0], pipeline_of(chunks[0])


def _check_arguments(num_microbatches: int, forward_only: bool, collect: bool, others: Mapping[str, Any]) -> None:
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches must be at least 1, not {num_microbatches}")
    if collect and not forward_only:
        raise ConfigError("collect_non_loss_data=True needs forward_only=True: there is no loss to train with")
    for name, value in others.items():
        if name in _REFUSED and value not in (None, False):
            raise ConfigError(f"{name} is not supported: {_REFUSED[name]}")
        if name not in _NOT_NEEDED and name not in _REFUSED:
            known = [*inspect.signature(forward_backward).parameters, *_NOT_NEEDED][:-1]
            raise ConfigError(f"the forward-backward function takes no '{name}'.{nearest(name, known)}")


def _iterators(data: Any, chunks: int) -> list[Any]:
    """Each iterator once; none if there is no data."""
    given = list(data) if isinstance(data, list | tuple) else [data]
    if len(given) not in (1, chunks):
        raise ConfigError(
            f"data_iterator is a list of {len(given)}, and this rank has {chunks} chunk{'s' if chunks > 1 else ''} of "
            "the model: give one iterator, or one for each chunk"
        )
    return list({id(iterator): iterator for iterator in given if iterator is not None}.values())


def _loss_and_report(result: Any, forward_only: bool, collect: bool) -> tuple[Any, Any]:
    """Return the loss to differentiate (not yet divided by the number of micro-batches) and the values to report."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(f"forward_step_func must return (outputs, loss_func), not {_form(result)}")
    outputs, loss_func = result
    if loss_func is None and forward_only:
        return None, outputs
    if not callable(loss_func):
        raise ConfigError(f"forward_step_func must return (outputs, loss_func) to train with, not {_form(result)}")
    if collect:
        return None, loss_func(outputs, non_loss_data=True)
    found = loss_func(outputs)
    if not isinstance(found, tuple | list) or len(found) not in (2, 3):
        raise ConfigError(
            "loss_func must return (loss, what is reported) or (sum of losses, number of tokens, what is reported), "
            f"not {_form(found)}"
        )
    loss, *tokens, report = found
    for count in tokens:  # none, or one
        loss = loss / torch.as_tensor(count, device=loss.device).clamp(min=1)
    return loss, report


def _form(value: Any) -> str:
    kinds = [type(entry).__name__ for entry in value] if isinstance(value, tuple | list) else None
    return type(value).__name__ if kinds is None else f"({', '.join(kinds)})"


def _take(iterators: list[Any], count: int) -> list[Any]:
    """Return the micro-batches, which are those of every chunk. Not inside the step function, where stages draw other
    random numbers: a loader would shuffle by them."""
    batches = [[next(iterator) for iterator in iterators] for _ in range(count)]
    return [of_chunks[0] if of_chunks else None for of_chunks in batches]


class _StepFunction:
    """``forward_step_func`` as what the engine calls: with the number of a micro-batch.

    Several chunks on one rank see the same micro-batch.
    """

    def __init__(
        self, function: Callable[..., Any], batches: list[Any], model: nn.Module, chunks: int, has_data: bool
    ) -> None:
        self.function, self.batches, self.model, self.has_data = function, batches, model, has_data
        self.left = [chunks] * len(batches)

    def __call__(self, microbatch: int) -> Any:
        batch = self.batches[microbatch]
        self.left[microbatch] -= 1
        if not self.left[microbatch]:
            self.batches[microbatch] = None
        return self.function(iter([batch]) if self.has_data else None, self.model)

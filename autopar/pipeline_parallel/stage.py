"""The forward of one stage. The first one of each kind of call is examined: no placeholder may reach its results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from autopar.distributed.rng import Generators
from autopar.errors import AutoparError, ConfigError, UnsupportedModelError
from autopar.pipeline_parallel.kv_cache import copy_caches, kind_of_cache
from autopar.pipeline_parallel.outputs import incomplete
from autopar.pipeline_parallel.provenance import Provenance
from autopar.pipeline_parallel.stage_forward import StageContext, StageForward

__all__ = ["Examined", "examine", "run_stage"]

_PADDING = re.compile(r"padding token|pad_token", re.IGNORECASE)


def run_stage(
    model: Callable[..., Any],
    context: StageContext,
    forward: StageForward,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    finish: Callable[[Any], Any] | None = None,
) -> Any:
    """Run the forward of one stage: returns its ``StageOutput``, or on the last stage what the model returns.

    Args:
        finish: on the last stage, applied to what the model returns; its result is left in ``forward.loss``.

    Raises:
        UnsupportedModelError: the result would need what this stage does not have; found at the first call of its kind
            (with an image for the first time, say).
        ConfigError: the model's code asks for a padding token, and its config has none.
    """
    kind = (forward.start, forward.last, torch.is_grad_enabled(), _kind_of(list(args)), _kind_of(kwargs))
    unavailable = context.examined.get(kind)
    if unavailable is None:
        examined = examine(model, context, forward, args, kwargs, context.placeholders, finish)
        if examined.missing:
            raise UnsupportedModelError(_explain(forward, examined.missing))
        context.examined[kind] = examined.unavailable
        return examined.result
    try:
        result = forward.run(model, context, args, kwargs)
    except ValueError as error:
        _check_padding(error)
        raise
    if forward.last:
        result = incomplete(result, unavailable) if unavailable else result
        forward.loss = finish(result) if finish is not None else None
    return result


@dataclass
class Examined:
    """Result of :func:`examine`.

    Attributes:
        result: as of :func:`run_stage`.
        missing: names of placeholders that were used, or outputs of elements ("the output of ...").
        unavailable: entries of the last stage's result that are computed from placeholders, and nothing else is.
    """

    result: Any
    missing: frozenset[str]
    unavailable: tuple[str, ...] = ()


def examine(
    model: Callable[..., Any],
    context: StageContext,
    forward: StageForward,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    placeholders: Mapping[str, torch.Tensor],
    finish: Callable[[Any], Any] | None = None,
) -> Examined:
    """Run a stage and follow what is computed from ``placeholders``, and from outputs that it did not receive.

    Raises:
        UnsupportedModelError: the model writes in place into outputs of blocks.
    """
    kept = copy_caches(args, kwargs)
    state = Generators.now()
    result, provenance = _followed(model, context, forward, args, kwargs, placeholders)
    if forward.skipped_source:  # the block in front of this stage is not called: the one before it is what counts
        state.restore()
        forward.restart(forward.before[-1])
        result, provenance = _followed(model, context, forward, *kept, placeholders)
    missing, unavailable = provenance.read_by_control_flow, []
    if forward.last and isinstance(result, ModelOutput):
        chief = next((name for name in result if "loss" not in name), next(iter(result)))  # logits, or hidden states
        for name, value in result.items():
            origins = provenance.origins(value)
            if name == chief or "loss" in name:
                missing |= origins
            elif origins:
                unavailable.append(name)
        result = incomplete(result, unavailable)
    else:
        missing |= provenance.origins(result)
    if finish is not None and forward.last and not missing:
        with provenance:
            forward.loss = finish(result)
        missing |= provenance.origins(forward.loss) | provenance.read_by_control_flow
    return Examined(result, missing, tuple(unavailable))


def _followed(
    model: Callable[..., Any],
    context: StageContext,
    forward: StageForward,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    placeholders: Mapping[str, torch.Tensor],
) -> tuple[Any, Provenance]:
    provenance = forward.provenance = Provenance()
    for name, tensor in placeholders.items():
        provenance.mark(tensor, provenance.origins(tensor) | {name})
    try:
        with provenance:
            return forward.run(model, context, args, kwargs), provenance
    except Exception as error:
        if provenance.read_by_control_flow:
            text = _explain(forward, provenance.read_by_control_flow)
            raise UnsupportedModelError(f"{text}\n  It ended with {type(error).__name__}.") from error
        if not isinstance(error, AutoparError):
            _check_padding(error)
            if forward.start > 0:  # the first stage had the same arguments
                error.add_note(
                    f"Raised behind the elements {forward.start} to {forward.stop - 1} of the pipeline. If "
                    "pipeline_parallel_size=1 does not raise the same,\nthis model cannot be split into pipeline "
                    "stages: its code behind the blocks reads more than the last one's output."
                )
        raise
    finally:
        forward.provenance = None


def _check_padding(error: Exception) -> None:
    """Raise ConfigError if the model's own code asks for a padding token."""
    if _PADDING.search(str(error)):
        alone = ", or give every\n  micro-batch one sample (pipeline.microbatch_size: 1)"
        raise ConfigError(
            f"{str(error).splitlines()[0]}\n  Set model.config.pad_token_id (to tokenizer.pad_token_id)"
            f"{alone if 'batch size' in str(error) else ''}."
        ) from error


def _explain(forward: StageForward, missing: frozenset[str]) -> str:
    names = sorted(missing)
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"this model cannot be split into pipeline stages here: the elements {forward.start} to {forward.stop - 1} of "
        f"the pipeline, or the loss behind them, read {listed}, which another stage holds.\n  Blocks or the head use "
        "it beside the output of the block before (features of an image, say). Split the model elsewhere "
        "(pipeline.layers_per_stage), leave that input or criterion out, or use pipeline_parallel_size=1."
    )


def _kind_of(value: Any) -> Any:
    """What decides which code of a model runs: which arguments there are, and their types."""
    if isinstance(value, torch.Tensor):
        return value.ndim, value.dtype
    if isinstance(value, Cache):
        return kind_of_cache(value)
    if isinstance(value, Mapping):
        return tuple((name, _kind_of(entry)) for name, entry in value.items() if entry is not None)
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(map(_kind_of, value)))
    return value if value is None or isinstance(value, bool | str) else type(value)

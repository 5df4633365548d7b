"""The forward of one stage. The first one of each kind of call is examined: nothing absent may reach its results."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from autopar.distributed.rng import Generators
from autopar.errors import AutoparError, ConfigError, UnsupportedModelError
from autopar.pipeline_parallel.outputs import chief, partial
from autopar.pipeline_parallel.provenance import Absent
from autopar.pipeline_parallel.stage_forward import Conductor, Course, Handed, StageDone, WrittenInPlace

__all__ = ["Examined", "examine", "run_stage"]

_PADDING = re.compile(r"padding token|pad_token", re.IGNORECASE)


def run_stage(
    model: Callable[..., Any],
    conductor: Conductor,
    course: Course,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    finish: Callable[[Any], Any] | None = None,
) -> Any:
    """The forward of one stage: what it hands on (:class:`Handed`), or on the last one what the model returns.

    Args:
        finish: on the last stage, applied to what the model returns; what it makes is left in ``course.loss``.

    Raises:
        UnsupportedModelError: the result would need what this stage does not have; found at the first call of its kind
            (with an image for the first time, say).
        ConfigError: the model's code asks for a padding token, and its config has none.
    """
    kind = (course.start, course.last, torch.is_grad_enabled(), _kind_of(list(args)), _kind_of(kwargs))
    withheld = conductor.proven.get(kind)
    if withheld is None:
        examined = examine(model, conductor, course, args, kwargs, conductor.absent, finish)
        if examined.missing:
            raise UnsupportedModelError(_explain(course, examined))
        conductor.proven[kind] = withheld = examined.withheld
        return examined.result
    try:
        result = _run(model, conductor, course, args, kwargs)
    except ValueError as error:
        _say_what_is_missing(error)
        raise
    if course.last:
        result = partial(result, withheld)
        course.loss = finish(result) if finish is not None else None
    return result


@dataclass
class Examined:
    """A forward that was followed.

    Attributes:
        result: as of :func:`run_stage`.
        missing: names of what is absent and was used: tensors, or outputs of elements ("output of ...").
        withheld: entries of the last stage's result that are made from absent tensors, and nothing else is.
    """

    result: Any
    missing: frozenset[str]
    withheld: tuple[str, ...] = ()


def examine(
    model: Callable[..., Any],
    conductor: Conductor,
    course: Course,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    absent: Mapping[str, torch.Tensor],
    finish: Callable[[Any], Any] | None = None,
) -> Examined:
    """Run a stage and follow what is computed from ``absent`` tensors, and from outputs that it did not receive.

    Raises:
        UnsupportedModelError: the model writes in place into outputs of blocks.
    """
    kept = [copy.deepcopy(value) if isinstance(value, Cache) else value for value in args]
    kept_named = {name: copy.deepcopy(value) if isinstance(value, Cache) else value for name, value in kwargs.items()}
    state = Generators.now()
    result, watch = _watched(model, conductor, course, args, kwargs, absent)
    if course.skipped_source:  # the block in front of this stage is not called: the one before it is what counts
        state.restore()
        source = course.before[-1]
        course.restart(source)
        result, watch = _watched(model, conductor, course, kept, kept_named, absent)
    missing, withheld = watch.looked_at, []
    if not course.last:
        missing |= watch.origins((result.output, result.encoder))
    elif isinstance(result, ModelOutput):
        for name, value in result.items():
            origins = watch.origins(value)
            if name == chief(result) or "loss" in name:
                missing |= origins
            elif origins:
                withheld.append(name)
        result = partial(result, withheld)
    else:
        missing |= watch.origins(result)
    if finish is not None and course.last and not missing:
        with watch:
            course.loss = finish(result)
        missing |= watch.origins(course.loss) | watch.looked_at
    return Examined(result, missing, tuple(withheld))


def _watched(
    model: Callable[..., Any],
    conductor: Conductor,
    course: Course,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    absent: Mapping[str, torch.Tensor],
) -> tuple[Any, Absent]:
    watch = course.watch = Absent()
    for name, tensor in absent.items():
        watch.mark(tensor, watch.origins(tensor) | {name})
    try:
        with watch:
            result = _run(model, conductor, course, args, kwargs)
    except Exception as error:
        if watch.looked_at:
            text = _explain(course, Examined(None, watch.looked_at))
            raise UnsupportedModelError(f"{text}\n  It ended with {type(error).__name__}.") from error
        if not isinstance(error, AutoparError):
            _say_what_is_missing(error)
            if course.start > 0:  # the first stage had the same arguments
                error.add_note(
                    f"Raised behind the elements {course.start} to {course.stop - 1} of the pipeline. If "
                    "pipeline_parallel_size=1 does not show the same,\nthis model cannot be cut into pipeline stages: "
                    "its code behind the blocks reads more than the last one's output."
                )
        raise
    finally:
        course.watch = None
    return result, watch


def _say_what_is_missing(error: Exception) -> None:
    """Raises ConfigError if the model's own code asks for a padding token."""
    if _PADDING.search(str(error)):
        alone = ", or give every\n  micro-batch one sample (pipeline.microbatch_size: 1)"
        raise ConfigError(
            f"{str(error).splitlines()[0]}\n  Set model.config.pad_token_id (to tokenizer.pad_token_id)"
            f"{alone if 'batch size' in str(error) else ''}."
        ) from error


def _run(
    model: Callable[..., Any], conductor: Conductor, course: Course, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    with conductor.running(course):
        try:
            result = model(*args, **kwargs)
        except StageDone as done:
            return done.handed
        except WrittenInPlace as written:
            raise UnsupportedModelError(
                f"this model cannot be cut into pipeline stages: its forward writes in place into the output of block "
                f"{written}, which a later stage does not have"
            ) from None
    return result if course.last else Handed(course.output, course.encoder)


def _explain(course: Course, examined: Examined) -> str:
    names = sorted(examined.missing)
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"this model cannot be cut into pipeline stages here: the elements {course.start} to {course.stop - 1} of the "
        f"pipeline, or the loss behind them, read {listed}, which another stage holds.\n  Blocks or the head use it "
        "beside the output of the block before (features of an image, say). Cut the model elsewhere "
        "(pipeline.layers_per_stage), leave that input or criterion out, or use pipeline_parallel_size=1."
    )


def _kind_of(value: Any) -> Any:
    """What decides which code of a model runs: which arguments there are, and their types."""
    if isinstance(value, torch.Tensor):
        return value.ndim, value.dtype
    if isinstance(value, Cache):
        with contextlib.suppress(Exception):
            return "cache", int(value.get_seq_length()) > 0
        return "cache"
    if isinstance(value, Mapping):
        return tuple((name, _kind_of(entry)) for name, entry in value.items() if entry is not None)
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(map(_kind_of, value)))
    return value if value is None or isinstance(value, bool | str) else type(value)

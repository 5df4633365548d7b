"""What comes before a pass: reading the batch, and telling the other stages if this rank cannot begin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from autopar.collectives import Axis
from autopar.pipeline_parallel.agreement import check_batch
from autopar.pipeline_parallel.engine import Engine

__all__ = ["beginning", "read_batch", "telling"]

Batch = TypeVar("Batch")
Function = TypeVar("Function", bound=Callable[..., Any])


def read_batch(read: Callable[[], Batch], engine: Engine, model: Axis, unchecked: set[bool], backward: bool) -> Batch:
    """What ``read`` gives: the next batch, on the first step of a mode the same one on all ranks of the replica.

    Args:
        model: the axis of these ranks.
        unchecked: the modes (with backward or not) without a first step so far.

    Raises:
        StopIteration: on all ranks; where the data has ended on some only, all raise an AutoparError.
    """
    if engine.plan.ranks > 1 and backward in unchecked:
        try:
            batch = check_batch(read, model)
        except Exception:
            engine.post.begin()  # on all ranks: none needs to be told
            raise
        unchecked.discard(backward)
        return batch
    try:
        return read()
    except StopIteration:
        engine.data_ended()
        raise


@contextmanager
def beginning(engine: Engine) -> Iterator[None]:
    """The other stages are told of an error inside, if it comes before this rank's pass."""
    before = engine.post.passes
    try:
        yield
    except Exception as error:
        if engine.post.passes == before:
            engine.cannot_begin(error)
        raise


def telling(function: Function) -> Function:
    """A method of a model in stages, :func:`beginning` around it."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with beginning(self._autopar_pipeline.engine):
            return function(self, *args, **kwargs)

    return call  # type: ignore[return-value]

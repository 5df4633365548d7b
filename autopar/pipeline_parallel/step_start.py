"""What comes before a pass: reading the batch, and telling the other stages if this rank cannot begin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError
from autopar.pipeline_parallel.batch_checks import check_batch, counts_of_replicas
from autopar.pipeline_parallel.engine import Engine

__all__ = ["beginning", "read_batch", "telling"]

Batch = TypeVar("Batch")
Function = TypeVar("Function", bound=Callable[..., Any])


def read_batch(
    read: Callable[[], Batch],
    engine: Engine,
    mpu: MPU,
    unchecked: set[bool],
    backward: bool,
    count: Callable[[Batch], int] | None,
) -> tuple[Batch, list[int]]:
    """What ``read`` gives: the next batch, on the first step of a mode the same one on all ranks of the replica.

    Args:
        unchecked: the modes (with backward or not) without a first step so far.
        count: how much a batch counts among those of the replicas; None if replicas need not agree on a step.

    Returns:
        The batch, and each replica's count; nothing if they need not agree, or there is one replica.

    Raises:
        StopIteration: on all ranks; where the data has ended on some only, all raise an AutoparError.
    """
    asked = count is not None and mpu.dp.size > 1
    try:
        batch = _read(read, engine, mpu, unchecked, backward)
    except StopIteration:
        if asked:
            _agree(None, engine, mpu)
        raise
    return batch, _agree(count(batch), engine, mpu) if asked and count is not None else []


def _agree(count: int | None, engine: Engine, mpu: MPU) -> list[int]:
    try:
        return counts_of_replicas(count, mpu.dp, mpu.device, engine.post.failures)
    except ConsistencyError:
        engine.post.begin()  # on all ranks: none needs to be told
        raise


def _read(read: Callable[[], Batch], engine: Engine, mpu: MPU, unchecked: set[bool], backward: bool) -> Batch:
    if engine.plan.ranks > 1 and backward in unchecked:
        try:
            batch = check_batch(read, mpu.model, engine.post.failures)
        except Exception:
            engine.post.begin()  # on all ranks: none needs to be told
            raise
        unchecked.discard(backward)
        return batch
    try:
        return read()
    except StopIteration:
        engine.data_ended()
        engine.post.failures.publish("the data iterator has ended on this rank, which takes no part in another step.")
        raise


@contextmanager
def beginning(engine: Engine) -> Iterator[None]:
    """The other stages are told of an error inside, if it comes before this rank's pass.

    Collectives inside wait no longer than ``pipeline.timeout``, and every error is said to all ranks.
    """
    before = engine.post.passes
    try:
        with engine.post.failures.deadline():
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

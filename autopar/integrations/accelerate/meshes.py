"""Which parallelized model a call of accelerate's means.

``Accelerator`` and the functions beside it count processes, deal batches out to them, gather, add up, and step
schedulers by them. All ranks of a replica get the same batch and find the same, so what such a loop has to see are the
replicas. An accelerator means the models that it has prepared. One that has prepared none, and a function that knows no
accelerator, means the parallelized model that is alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from autopar.checks.process_hooks import listeners
from autopar.data_parallel.replica_norm import ReplicaNorm
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError

__all__ = ["alive", "inside", "meaning", "mesh", "mesh_of", "only"]

_UNSET: Any = object()
_meant: ContextVar[Any] = ContextVar("the MPU of the model that is meant; None: all processes", default=_UNSET)


@contextlib.contextmanager
def meaning(mpu: MPU | None) -> Iterator[None]:
    token = _meant.set(mpu)
    try:
        yield
    finally:
        _meant.reset(token)


def alive() -> list[ReplicaNorm]:
    """Return those of the parallelized models that are larger than one rank."""
    return [one for one in listeners(ReplicaNorm) if one.is_alive]


def only(found: Iterable[MPU]) -> MPU | None:
    """Return one of meshes that have the same replicas.

    Raises:
        ConfigError: they have not.
    """
    meshes = {tuple(mpu.dp.ranks): mpu for mpu in found}
    if len(meshes) > 1:
        sizes = " and ".join(str(mpu.dp.size) for mpu in meshes.values())
        raise ConfigError(
            f"accelerate cannot tell which of {len(meshes)} parallelized models is meant, which have {sizes} "
            "replicas:\n  use an Accelerator that has prepared one of them, or\n"
            "  autopar.gather_for_metrics(values, mpu=model.mpu) and torch.distributed with "
            "model.mpu.get_data_parallel_group()."
        )
    return next(iter(meshes.values()), None)


def inside(model: nn.Module) -> MPU | None:
    """Return the mesh of the parallelized model that ``model`` is, or wraps."""
    known = {id(one.model): one.mpu for one in alive()}
    return next((known[id(part)] for part in model.modules() if id(part) in known), None) if known else None


def mesh() -> MPU | None:
    """Return the mesh whose replicas a function has to see; None if it has to see all processes."""
    meant = _meant.get()
    return only(one.mpu for one in alive()) if meant is _UNSET else meant


def mesh_of(accelerator: Any) -> MPU | None:
    """Return the mesh whose replicas an accelerator has to see; None if it has to see all processes."""
    meant = _meant.get()
    if meant is not _UNSET:
        return meant
    own: MPU | None = vars(accelerator).get("autopar_mpu")  # a parallel trainer's
    if own is not None:
        return own
    found = [mpu for mpu in map(inside, accelerator._models) if mpu is not None]
    return only(found) if accelerator._models else mesh()

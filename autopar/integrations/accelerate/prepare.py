"""Prepare a parallelized model with accelerate: batches for each replica, and gradients averaged over them.

``Accelerator`` and the functions beside it count processes, deal batches out to them, gather, add up, and step
schedulers by them. All ranks of a replica get the same batch and find the same, so such a loop has to see the replicas.
An accelerator means the models that it has prepared. One that has prepared none, and a function that knows no
accelerator, means the parallelized model that is alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autopar.call_site import frames_of
from autopar.checks.process_hooks import listeners
from autopar.checks.wrappers import in_trainer
from autopar.data_parallel.dataloader import ReplicaDataLoader
from autopar.data_parallel.replica_norm import ReplicaNorm
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError

__all__ = [
    "Place",
    "alive",
    "inside",
    "is_dealing",
    "meaning",
    "mesh",
    "mesh_of",
    "only",
    "prepare",
    "prepare_data_loader",
    "prepare_model",
]


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


_dealing: ContextVar[bool] = ContextVar("a data loader is being made", default=False)


class Place:
    """A state of accelerate's, whose process is a replica."""

    def __init__(self, state: Any, mpu: MPU) -> None:
        self._state, self.num_processes, self.process_index = state, mpu.dp.size, mpu.dp.rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def is_dealing() -> bool:
    """Return whether batches are being split among the replicas."""
    return _dealing.get()


def prepare(plain: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """The body of ``Accelerator.prepare``, which may meet a loader before the model."""
    found = [mpu for each in args if isinstance(each, nn.Module) and (mpu := inside(each)) is not None]
    with meaning(only(found)) if found else contextlib.nullcontext():
        return plain(accelerator, *args, **kwargs)


def prepare_model(
    plain: Any, accelerator: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
) -> Any:
    """The body of ``Accelerator.prepare_model``: averages gradients over the replicas."""
    mpu = inside(model)
    if mpu is not None and not evaluation_mode and any(frames_of("transformers.trainer")):
        raise ConfigError(in_trainer(mpu))
    if mpu is None or not _wraps_ddp(accelerator):
        return plain(accelerator, model, device_placement, evaluation_mode)
    _check_sizes(accelerator)
    prepared = plain(accelerator, model, device_placement, evaluation_mode=True)
    wanted = mpu.dp_cp.size > 1 and mpu.pp.size == 1 and any(p.requires_grad for p in model.parameters())
    if evaluation_mode or not wanted or isinstance(model, DistributedDataParallel) or _is_dtensor(model):
        return prepared
    handler = accelerator.ddp_handler
    settings = {} if handler is None else handler.to_kwargs()
    engine = DistributedDataParallel(prepared, process_group=mpu.dp_cp.group, **settings)
    if handler is not None:
        handler.register_comm_hook(engine)
    vars(prepared).pop("_is_accelerate_prepared", None)  # the engine is
    engine._is_accelerate_prepared = True  # type: ignore[assignment]
    return engine


def _wraps_ddp(accelerator: Any) -> bool:
    kind: str = accelerator.distributed_type.value
    return kind == "NO" or kind.startswith("MULTI_")


def _is_dtensor(model: nn.Module) -> bool:
    from accelerate.utils import model_has_dtensor

    return bool(model_has_dtensor(model))  # FSDP2 averages


def _check_sizes(accelerator: Any) -> None:
    if accelerator.parallelism_config is not None:
        raise ConfigError(
            "Accelerator(parallelism_config=...) is for models that accelerate shards, and this one is parallelized "
            "already: it would\n  deal out batches by both. Leave parallelism_config out."
        )


def prepare_data_loader(plain: Any, accelerator: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
    """The body of ``Accelerator.prepare_data_loader``: deals batches out to the replicas."""
    from accelerate.data_loader import DataLoaderDispatcher

    mpu = mesh_of(accelerator)
    if mpu is None:
        return plain(accelerator, data_loader, *args, **kwargs)
    _check_sizes(accelerator)
    if isinstance(data_loader, ReplicaDataLoader):
        raise ConfigError(
            "accelerator.prepare got a loader of autopar.prepare_dataloader, which gives each replica batches of its "
            f"own\n  already: each of {mpu.dp.size} would see a part of its part. Leave it out of prepare, or give "
            "prepare a plain DataLoader."
        )
    if accelerator.use_stateful_dataloader:
        raise ConfigError(
            "use_stateful_dataloader counts the batches of all processes, and tensor-parallel ranks and stages share "
            "theirs:\n  leave it out. The loader of autopar.prepare_dataloader(dataset, batch_size, mpu=model.mpu) has "
            "state_dict and load_state_dict."
        )
    token = _dealing.set(True)
    try:
        with meaning(mpu):
            made = plain(accelerator, data_loader, *args, **kwargs)
    finally:
        _dealing.reset(token)
    if isinstance(made, DataLoaderDispatcher):
        made.state = Place(made.state, mpu)
    return made

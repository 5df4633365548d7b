"""accelerate with a parallelized model: replicas count as its processes, and gradients are averaged over them.

``Accelerator`` shards batches over processes, gathers and reduces over them, and steps schedulers once per process. All
ranks of a replica have the same batch, so such a loop must see replicas instead. The patched functions below find the
model, and call accelerate's function in all other cases. An accelerator uses the mesh of the models that it has
prepared. An accelerator without models, or a function without an accelerator, uses the parallelized model that exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autopar.call_site import frames_of
from autopar.compat.patches import patch_body, patch_member
from autopar.compat.tensors import steps_of
from autopar.data_parallel.gradients import ReplicaNorm
from autopar.distributed.collectives import all_gather, even_layout, gathered
from autopar.distributed.failures import waiting
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.guards.model_changes import listed_ranks
from autopar.guards.step import listeners
from autopar.swap import Proxy, replaced

_UNSET: Any = object()
_meant: ContextVar[tuple[Any, bool]] = ContextVar("the chosen MPU, see meaning", default=(_UNSET, False))


@contextlib.contextmanager
def meaning(mpu: MPU | None, *, deals: bool = False) -> Iterator[None]:
    """Let functions without an accelerator see the replicas of ``mpu``; None: all processes.

    Args:
        deals: True if ``process_index`` also counts replicas, for code that splits batches or slices gathered tensors.
    """
    token = _meant.set((mpu, deals))
    try:
        yield
    finally:
        _meant.reset(token)


def alive() -> list[ReplicaNorm]:
    """Return the existing models that are parallelized over several ranks."""
    return [one for one in listeners(ReplicaNorm) if one.is_alive]


def only(found: Iterable[MPU]) -> MPU | None:
    """Return the only mesh, or None; raise ConfigError for meshes with different replicas."""
    meshes = {tuple(mpu.dp.ranks): mpu for mpu in found}
    if len(meshes) > 1:
        sizes = " and ".join(str(mpu.dp.size) for mpu in meshes.values())
        raise ConfigError(
            f"this call of accelerate is ambiguous: there are {len(meshes)} parallelized models with {sizes} "
            "replicas\n  Use an Accelerator that has prepared one of them; or use\n"
            "  autopar.gather_for_metrics(values, mpu=model.mpu) and torch.distributed with model.mpu.dp.group."
        )
    return next(iter(meshes.values()), None)


def inside(model: nn.Module) -> MPU | None:
    """Return the mesh of the parallelized model inside ``model``, or None."""
    known = {id(one.model): one.mpu for one in alive()}
    return next((known[id(part)] for part in model.modules() if id(part) in known), None) if known else None


def mesh() -> MPU | None:
    """Return the mesh whose replicas a function sees; None if it sees all processes."""
    meant, _ = _meant.get()
    return only(one.mpu for one in alive()) if meant is _UNSET else meant


def mesh_of(accelerator: Any) -> MPU | None:
    """Return the mesh whose replicas an accelerator sees; None if it sees all processes."""
    meant, _ = _meant.get()
    if meant is not _UNSET:
        return meant
    own: MPU | None = vars(accelerator).get("autopar_mpu")  # set by a parallel trainer
    if own is not None:
        return own
    found = [mpu for mpu in map(inside, accelerator._models) if mpu is not None]
    return only(found) if accelerator._models else mesh()


def of_replicas(state: Any, mpu: MPU) -> Proxy:
    """Return a proxy of accelerate's state that counts replicas as processes."""
    return Proxy(state, num_processes=mpu.dp.size, process_index=mpu.dp.rank)


def prepare(plain: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Accelerator.prepare``, which may get a loader before the model."""
    found = [mpu for each in args if isinstance(each, nn.Module) and (mpu := inside(each)) is not None]
    with meaning(only(found)) if found else contextlib.nullcontext():
        return plain(accelerator, *args, **kwargs)


def prepare_model(
    plain: Any, accelerator: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
) -> Any:
    """Replace ``Accelerator.prepare_model``: average gradients over the replicas."""
    from accelerate.utils import model_has_dtensor  # for such models FSDP2 averages

    mpu = inside(model)
    if mpu is not None and not evaluation_mode and any(frames_of("transformers.trainer")):
        raise ConfigError(
            "transformers' Trainer would wrap the model in DistributedDataParallel over ranks "
            f"{listed_ranks(range(mpu.world_size))},\n  but only {listed_ranks(mpu.dp_cp.ranks)} hold the shards of "
            f"rank {mpu.rank}. Use\n"
            "  autopar.integrations.ParallelTrainer(model=model, args=args, ...) with the same arguments."
        )
    kind: str = accelerator.distributed_type.value
    if mpu is None or not (kind == "NO" or kind.startswith("MULTI_")):  # another engine handles the model
        return plain(accelerator, model, device_placement, evaluation_mode)
    _check_sizes(accelerator)
    prepared = plain(accelerator, model, device_placement, evaluation_mode=True)
    wanted = mpu.dp_cp.size > 1 and mpu.pp.size == 1 and any(p.requires_grad for p in model.parameters())
    if evaluation_mode or not wanted or isinstance(model, DistributedDataParallel) or model_has_dtensor(model):
        return prepared
    handler = accelerator.ddp_handler
    settings = {} if handler is None else handler.to_kwargs()
    engine = DistributedDataParallel(prepared, process_group=mpu.dp_cp.group, **settings)
    if handler is not None:
        handler.register_comm_hook(engine)
    vars(prepared).pop("_is_accelerate_prepared", None)  # the wrapper gets this mark
    engine._is_accelerate_prepared = True  # type: ignore[assignment]
    return engine


def _check_sizes(accelerator: Any) -> None:
    if accelerator.parallelism_config is not None:
        raise ConfigError(
            "Accelerator(parallelism_config=...) is not supported with a model that autopar has parallelized\n"
            "  Remove parallelism_config."
        )
    world = dist.get_world_size()
    if accelerator.distributed_type.value == "NO" and world > 1:
        raise ConfigError(
            f"Accelerator() counts 1 process, expected {world}: without a GPU it would not gather\n"
            "  Write Accelerator(cpu=True)."
        )


def prepare_data_loader(plain: Any, accelerator: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Accelerator.prepare_data_loader``: shard batches over the replicas."""
    from accelerate.data_loader import DataLoaderDispatcher

    mpu = mesh_of(accelerator)
    if mpu is None:
        return plain(accelerator, data_loader, *args, **kwargs)
    _check_sizes(accelerator)
    if getattr(data_loader, "is_of_replicas", False):
        raise ConfigError(
            "accelerator.prepare got a loader of autopar.prepare_dataloader, which is already sharded over "
            f"{mpu.dp.size} replicas\n  Do not pass it to prepare, or pass a plain DataLoader."
        )
    if accelerator.use_stateful_dataloader:
        raise ConfigError(
            "use_stateful_dataloader is not supported with a parallelized model: it counts the batches of all processes"
            "\n  Remove it. The loader of autopar.prepare_dataloader(dataset, batch_size, mpu=model.mpu) has "
            "state_dict and load_state_dict."
        )
    with meaning(mpu, deals=True):
        made = plain(accelerator, data_loader, *args, **kwargs)
    if isinstance(made, DataLoaderDispatcher):
        made.state = of_replicas(made.state, mpu)
    return made


def _num_processes(plain: Callable[..., int], accelerator: Any) -> int:
    """Replace ``Accelerator.num_processes``, a factor of batch sizes and scheduler steps, with the replicas."""
    mpu = mesh_of(accelerator)
    return plain(accelerator) if mpu is None else mpu.dp.size


def _process_index(plain: Callable[..., int], accelerator: Any) -> int:
    """Replace ``Accelerator.process_index``: the rank in the world, or the replica inside :func:`meaning`."""
    mpu = mesh_of(accelerator) if _meant.get()[1] else None
    return plain(accelerator) if mpu is None else mpu.dp.rank


def _split(plain: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    mpu = mesh()
    return plain(state if mpu is None else of_replicas(state, mpu), *args, **kwargs)


def _split_of(plain: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    from accelerate import PartialState

    with meaning(mesh_of(accelerator)):
        return PartialState().split_between_processes(*args, **kwargs)


def _step(plain: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``AcceleratedScheduler.step``, which steps once per process: step once per replica."""
    optimizers = scheduler.optimizers or [scheduler.scheduler.optimizer]
    given = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    mpu = only(one.mpu for one in alive() if one.mine(given))
    stepping = scheduler.step_with_optimizer and scheduler.gradient_state.sync_gradients and not scheduler.split_batches
    if mpu is None or not stepping:
        plain(scheduler, *args, **kwargs)
        return
    with replaced(vars(scheduler), {"split_batches": True}):  # one step per call
        for _ in range(mpu.dp.size):
            total = getattr(scheduler.scheduler, "total_steps", None)  # of OneCycleLR
            if total is None or steps_of(scheduler.scheduler) <= total:
                plain(scheduler, *args, **kwargs)


def _for_accelerator(plain: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace methods that call the functions below."""
    with meaning(mesh_of(accelerator)):
        return plain(accelerator, *args, **kwargs)


def _for_all(plain: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace methods and properties that must see every process."""
    with meaning(None):
        return plain(accelerator, *args, **kwargs)


def _gather(plain: Any, tensor: Any) -> Any:
    """Replace ``accelerate.utils.gather``: concatenate the tensors of the replicas in dim 0."""
    from accelerate.utils import recursively_apply

    mpu = mesh()
    if mpu is None:
        return plain(tensor)

    def joined(part: torch.Tensor) -> torch.Tensor:
        local = part.reshape(1) if part.ndim == 0 else part  # single numbers as [replicas]
        layout = even_layout(len(local) * mpu.dp.size, mpu.dp.size)
        return all_gather(local, mpu.dp, layout, 0) if mpu.dp.size > 1 else local.contiguous()

    with waiting(mpu, "accelerate's gather", mpu.dp.ranks):
        return recursively_apply(joined, tensor, error_on_other_type=True)


def _gather_object(plain: Any, given: Any) -> Any:
    """Replace ``accelerate.utils.gather_object``: concatenate the lists of the replicas."""
    mpu = mesh()
    if mpu is None:
        return plain(given)
    with waiting(mpu, "accelerate's gather_object", mpu.dp.ranks):
        lists = gathered(given, mpu.dp.group) if mpu.dp.size > 1 else [given]
    return [each for one in lists for each in one]


def _reduce(plain: Any, tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Replace ``accelerate.utils.reduce``: reduce over the replicas."""
    from accelerate.utils import recursively_apply

    mpu = mesh()
    if mpu is None:
        return plain(tensor, reduction, scale)

    def reduced(part: torch.Tensor) -> torch.Tensor:
        result = part.clone()
        if mpu.dp.size > 1:
            all_reduce(result, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=mpu.dp.group)
        if reduction == "mean":
            result /= mpu.dp.size
        return result

    with waiting(mpu, "accelerate's reduce", mpu.dp.ranks):
        return recursively_apply(reduced, tensor, error_on_other_type=True)


_MEMBERS: dict[str, Callable[..., Any]] = {
    "num_processes": _num_processes,
    "process_index": _process_index,
    "is_last_process": _for_all,
    "split_between_processes": _split_of,
    "prepare": prepare,
    "prepare_model": prepare_model,
    "prepare_data_loader": prepare_data_loader,
    "gather": _for_accelerator,
    "gather_for_metrics": _for_accelerator,
    "pad_across_processes": _for_accelerator,
    "reduce": _for_accelerator,
    "check_trigger": _for_all,
}


def install() -> None:
    """Patch accelerate after its import."""
    import accelerate.accelerator
    import accelerate.scheduler
    import accelerate.state
    from accelerate.utils import operations

    for name, body in _MEMBERS.items():
        patch_member(accelerate.accelerator.Accelerator, name, body)
    patch_member(accelerate.scheduler.AcceleratedScheduler, "step", _step)
    patch_member(accelerate.state.PartialState, "split_between_processes", _split)
    patch_member(operations, "_gpu_gather", _gather)
    patch_member(operations, "_gpu_gather_object", _gather_object)
    patch_body(operations.reduce, "function", _reduce)

"""accelerate's calls, for which the replicas of a parallelized model are the processes.

accelerate's inner functions are patched; those below ask which model is meant, and hand everything
else to accelerate's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.failures import waiting
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.foreign.modules import steps_of
from autopar.foreign.patches import patch_body, patch_member, patch_name
from autopar.integrations.accelerate.prepare import (
    Place,
    alive,
    is_dealing,
    meaning,
    mesh,
    mesh_of,
    only,
    prepare,
    prepare_data_loader,
    prepare_model,
)

__all__ = ["install"]

# -- counting ----------------------------------------------------------------------------------------------------------


def _num_processes(plain: Callable[..., int], accelerator: Any) -> int:
    """The body of ``Accelerator.num_processes``: by which loops multiply batch sizes and steps of schedulers."""
    mpu = mesh_of(accelerator)
    return plain(accelerator) if mpu is None else mpu.dp.size


def _process_index(plain: Callable[..., int], accelerator: Any) -> int:
    """The body of ``Accelerator.process_index``, the rank in the world but where batches are dealt out."""
    mpu = mesh_of(accelerator) if is_dealing() else None
    return plain(accelerator) if mpu is None else mpu.dp.rank


def _is_last_process(plain: Callable[..., bool], accelerator: Any) -> bool:
    with meaning(None):
        return plain(accelerator)


def _split(plain: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """The body of ``PartialState.split_between_processes``."""
    mpu = mesh()
    return plain(state if mpu is None else Place(state, mpu), *args, **kwargs)


def _split_of(plain: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """The body of ``Accelerator.split_between_processes``."""
    from accelerate import PartialState

    with meaning(mesh_of(accelerator)):
        return PartialState().split_between_processes(*args, **kwargs)


def _step(plain: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """The body of ``AcceleratedScheduler.step``, which steps once a process."""
    mpu = _stepped_by(scheduler)
    stepping = scheduler.step_with_optimizer and scheduler.gradient_state.sync_gradients and not scheduler.split_batches
    if mpu is None or not stepping:
        plain(scheduler, *args, **kwargs)
        return
    scheduler.split_batches = True  # one step
    try:
        for _ in range(mpu.dp.size):
            total = getattr(scheduler.scheduler, "total_steps", None)  # OneCycleLR's
            if total is None or steps_of(scheduler.scheduler) <= total:
                plain(scheduler, *args, **kwargs)
    finally:
        scheduler.split_batches = False


def _stepped_by(scheduler: Any) -> MPU | None:
    """Return the mesh of the model whose parameters the scheduler's optimizers step."""
    optimizers = scheduler.optimizers or [scheduler.scheduler.optimizer]
    given = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return only(one.mpu for one in alive() if one.mine(given))


# -- gathering ---------------------------------------------------------------------------------------------------------


def _for_accelerator(plain: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """The body of methods that call the functions below."""
    with meaning(mesh_of(accelerator)):
        return plain(accelerator, *args, **kwargs)


def _for_all(plain: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """The body of methods that ask every process, whichever replica it belongs to."""
    with meaning(None):
        return plain(accelerator, *args, **kwargs)


def _gather(plain: Any, tensor: Any) -> Any:
    """The body of ``accelerate.utils.gather``: joins the replicas' tensors in dim 0."""
    from accelerate.utils import recursively_apply

    mpu = mesh()
    if mpu is None:
        return plain(tensor)
    with waiting(mpu, "accelerate's gather", mpu.dp.ranks):
        return recursively_apply(lambda part: _joined(part, mpu.dp), tensor, error_on_other_type=True)


def _joined(tensor: torch.Tensor, dp: Axis) -> torch.Tensor:
    """Join the replicas' tensors in dim 0; single numbers as ``[replicas]``."""
    local = (tensor.reshape(1) if tensor.ndim == 0 else tensor).contiguous()
    if dp.size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(dp.size)]
    dist.all_gather(parts, local, group=dp.group)
    return torch.cat(parts)


def _gather_object(plain: Any, given: Any) -> Any:
    """The body of ``accelerate.utils.gather_object``: joins the replicas' lists."""
    mpu = mesh()
    if mpu is None:
        return plain(given)
    lists: list[Any] = [given] * mpu.dp.size
    if mpu.dp.size > 1:
        with waiting(mpu, "accelerate's gather_object", mpu.dp.ranks):
            dist.all_gather_object(lists, given, group=mpu.dp.group)
    return [each for one in lists for each in one]


def _reduce(plain: Any, tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The body of ``accelerate.utils.reduce``: adds up over the replicas."""
    from accelerate.utils import recursively_apply

    mpu = mesh()
    if mpu is None:
        return plain(tensor, reduction, scale)
    with waiting(mpu, "accelerate's reduce", mpu.dp.ranks):
        return recursively_apply(lambda part: _reduced(part, reduction, mpu.dp), tensor, error_on_other_type=True)


def _reduced(tensor: torch.Tensor, reduction: str, dp: Axis) -> torch.Tensor:
    result = tensor.clone()
    if dp.size > 1:
        all_reduce(result, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=dp.group)
    if reduction == "mean":
        result /= dp.size
    return result


# -- the patches ------------------------------------------------------------------------------------------------------

_MEMBERS: dict[str, Callable[..., Any]] = {
    "num_processes": _num_processes,
    "process_index": _process_index,
    "is_last_process": _is_last_process,
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
    """Patch accelerate, which has been imported."""
    import accelerate.accelerator
    import accelerate.scheduler
    import accelerate.state
    import accelerate.utils
    from accelerate.utils import operations

    for name, body in _MEMBERS.items():
        patch_member(accelerate.accelerator.Accelerator, name, body)
    patch_member(accelerate.scheduler.AcceleratedScheduler, "step", _step)
    patch_member(accelerate.state.PartialState, "split_between_processes", _split)
    patch_name(operations, "_gpu_gather", _gather)
    patch_name(operations, "_gpu_gather_object", _gather_object)
    named = (operations, accelerate.utils, accelerate.accelerator)
    patch_body(operations.reduce, "function", _reduce, named, lambda function: function)

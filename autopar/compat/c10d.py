"""Private names of torch.distributed: groups, stores, backends, timeouts, and parameters of DDP and FSDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as native
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

HashStore = native.HashStore
PrefixStore = native.PrefixStore
default_group = distributed_c10d._get_default_group
default_store = distributed_c10d._get_default_store
fake_worlds: list[int] = []
"""Rank of this process in a rehearsal, where groups send nothing; empty otherwise."""


def in_fake_world() -> bool:
    """Return whether this process runs a rehearsal, where groups send nothing and tensors have no memory."""
    return bool(fake_worlds)


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of a group for tensors on a device."""
    return group._get_backend(device)


def backends_of(group: Any) -> Iterator[Any]:
    """Yield the backends of a group."""
    for device in group._device_types:
        yield group._get_backend(device)


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Set how long collectives of a backend wait."""
    backend._set_default_timeout(timeout)


def has_timeout(backend: Any) -> bool:
    """Return whether :func:`set_timeout` supports a backend."""
    return hasattr(backend, "_set_default_timeout") and hasattr(backend, "options")


def destroy(groups: Iterable[Any]) -> None:
    """Destroy process groups, and clear DTensor's cache, which would return old results for an equal mesh."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    for group in groups:
        with contextlib.suppress(ValueError):  # user code has destroyed it
            dist.destroy_process_group(group)
    _clear_sharding_prop_cache()


def number_of_next_group(number: int | None = None) -> int:
    """Return the number in torch's name of the next process group of this rank; set it first if ``number`` is given."""
    world = distributed_c10d._world
    if number is not None:
        world.group_count = number
    return world.group_count


def is_flat_parameter(parameter: torch.Tensor) -> bool:
    """Return whether FSDP1 has flattened several parameters into this one."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"


def leave_out_of_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Let a later ``DistributedDataParallel`` of ``model`` ignore these parameters; an empty ``names`` ignores none."""
    vars(model).pop(_LEFT_OUT, None)
    if listed := list(names):
        vars(model)[_LEFT_OUT] = listed


def left_out_of_ddp(wrapper: nn.Module) -> set[str]:
    """Return the parameters that a ``DistributedDataParallel`` ignores, by their names in the wrapped module."""
    return set(getattr(wrapper, "parameters_to_ignore", ()))


def meshes_of_fsdp(module: nn.Module) -> set[Any]:
    """Return the meshes over which FSDP2 shards the direct parameters of a module."""
    state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    return {group.mesh_info.mesh for group in getattr(state, "_fsdp_param_groups", ())}


def _groups(root: FSDPModule) -> Iterator[Any]:
    """Yield the parameter groups of FSDP2 below the root."""
    for each in root._get_fsdp_state()._state_ctx.all_states:
        yield from each._fsdp_param_groups


def gathered_parameters(root: FSDPModule) -> set[int]:
    """Return the ids of the full parameters that FSDP2 uses while its shards are gathered."""
    every = (held for group in _groups(root) for held in group.fsdp_params)
    return {id(held._unsharded_param) for held in every if hasattr(held, "_unsharded_param")}


def take_new_shards(model: nn.Module) -> None:
    """Let FSDP2 use the current local shards of its parameters (source: ``FSDPModule._apply``)."""
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            for held in group.fsdp_params:
                held.reset_sharded_param()


def drop_gradients(root: FSDPModule) -> None:
    """Drop gradients that FSDP2 has accumulated but not reduced."""
    for held in (held for group in _groups(root) for held in group.fsdp_params):
        held.unsharded_accumulated_grad = None
        if hasattr(held, "_unsharded_param"):
            held._unsharded_param.grad = None


def running(root: FSDPModule) -> str:
    """Return the training state of FSDP2: ``IDLE``, ``FORWARD``, ``PRE_BACKWARD`` or ``POST_BACKWARD``."""
    return str(root._get_fsdp_state()._training_state.name)


def begin_forward(root: Any, args: Any, kwargs: Any) -> Any:
    """Gather the root's direct weights, as a call of the root does; return the inputs for the module to run.

    Source: ``torch.distributed.fsdp.register_fsdp_forward_method``.
    """
    return root._get_fsdp_state()._pre_forward(root, args, kwargs)


def end_forward(root: Any, output: Any) -> Any:
    """Finish a forward after :func:`begin_forward`; return the output for the caller."""
    return root._get_fsdp_state()._post_forward(root, None, output)


def forward_order(root: FSDPModule) -> list[str]:
    """Return the paths of the groups that ran forward since the last backward pass, in order."""
    order = getattr(root._get_fsdp_state()._comm_ctx, "post_forward_order", ())
    return [group._module_fqn or "" for group in order]


def free_weights(root: FSDPModule) -> None:
    """Free the weights that FSDP2 has gathered; do nothing before its first forward, where torch would raise."""
    if hasattr(root._get_fsdp_state()._comm_ctx, "all_gather_state"):
        root.reset_iter_state()


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients that FSDP2 has accumulated, as torch's pipeline stages do after their last backward pass.

    Source: ``torch.distributed.pipelining.stage``, ``_PipelineStageBase.perform_reduce_grad``.
    """
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    for group in _groups(root):
        group.post_backward()
    root._get_fsdp_state()._root_post_backward_final_callback()

"""torch.distributed: groups, stores, backends and time-outs, FSDP's groups, and operators as its dispatcher sees them.

Every collective of Python or C++ becomes an operator ``c10d::...`` before a backend runs it. A dispatch mode sees it
there, whoever called it: this library, FSDP2 or the reducer of ``DistributedDataParallel``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    FakeWork,
    HashStore,
    PrefixStore,
    ProcessGroup,
    _create_work_from_future,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _get_default_group as default_group,
    _get_default_store as default_store,
    _resolve_process_group,
    _world,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HashStore", "PrefixStore", "TorchDispatchMode", "default_group", "default_store"]


class Operator(NamedTuple):
    """An operator's name here, and where its arguments stand.

    Attributes:
        kind: name of the collective.
        out: place of what is written; -1: it is made and returned.
        given: place of what is sent; ``out`` of those in place.
        group: place of the process group.
        peer: place of the root, or of the other rank, by its number in the group; -1: none.
        result: whether what is written is returned, beside the handle to wait for.
        splits: places of the sizes that are received and sent.
        tag: place of a message's tag; -1: none.
        reduction: place of what makes one number of those of all ranks; -1: none.
    """

    kind: str
    out: int
    given: int
    group: int
    peer: int = -1
    result: bool = True
    splits: tuple[int, ...] = ()
    tag: int = -1
    reduction: int = -1


OPERATORS: dict[str, Operator] = {
    "allreduce_": Operator("all_reduce", 0, 0, 1, reduction=2),
    "allreduce_coalesced_": Operator("all_reduce", 0, 0, 1, reduction=2, result=False),
    "allgather_": Operator("all_gather", 0, 1, 2),
    "_allgather_base_": Operator("all_gather", 0, 1, 2),
    "allgather_into_tensor_coalesced_": Operator("all_gather", 0, 1, 2, result=False),
    "reduce_scatter_": Operator("reduce_scatter", 0, 1, 2, reduction=3),
    "_reduce_scatter_base_": Operator("reduce_scatter", 0, 1, 2, reduction=3),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", 0, 1, 2, reduction=3, result=False),
    "alltoall_": Operator("all_to_all", 0, 1, 2),
    "alltoall_base_": Operator("all_to_all", 0, 1, 2, result=False, splits=(3, 4)),
    "broadcast_": Operator("broadcast", 0, 0, 1, peer=2),
    "reduce_": Operator("reduce", 0, 0, 1, peer=3, reduction=2, result=False),
    "gather_": Operator("gather", 0, 1, 2, peer=3, result=False),
    "scatter_": Operator("scatter", 0, 1, 2, peer=3),
    "barrier": Operator("barrier", 0, 0, 1, result=False),
    "send": Operator("send", 0, 0, 1, peer=2, result=False, tag=3),
    "recv_": Operator("recv", 0, 0, 1, peer=2, result=False, tag=3),
    "recv_any_source_": Operator("recv", 0, 0, 1, result=False, tag=2),
}


_REDUCED = Operator("all_reduce", -1, 0, 2, reduction=1)
_GATHERED = Operator("all_gather", -1, 0, 2)
_SCATTERED = Operator("reduce_scatter", -1, 0, 3, reduction=1)

FUNCTIONAL: dict[str, Operator] = {
    **dict.fromkeys(("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"), _REDUCED),
    **{f"all_gather_into_tensor{form}": _GATHERED for form in ("", "_out", "_coalesced")},
    **{f"reduce_scatter_tensor{form}": _SCATTERED for form in ("", "_out", "_coalesced")},
    "all_to_all_single": Operator("all_to_all", -1, 0, 3, splits=(1, 2)),
    **dict.fromkeys(("broadcast", "broadcast_"), Operator("broadcast", -1, 0, 2, peer=1)),
    "isend": Operator("send", -1, 0, 3, peer=1, tag=2),
    "irecv": Operator("recv", -1, 0, 3, peer=1, tag=2),
}
"""Those of ``torch.distributed._functional_collectives``, which DTensors issue."""

_TABLES = {
    "c10d": OPERATORS,
    "_c10d_functional": FUNCTIONAL,
    "_dtensor": {"shard_dim_alltoall": Operator("all_to_all", -1, 0, 3)},
}


def operator_of(function: Any) -> Operator | None:
    """Return which collective an operator of the dispatcher is; None if it is none."""
    table = _TABLES.get(getattr(function, "namespace", ""))
    return None if table is None else table.get(function._schema.name.partition("::")[2])


def group_of(argument: Any) -> dist.ProcessGroup:
    """Return the process group of an operator's argument, which may be its name."""
    if isinstance(argument, str):
        return _resolve_process_group(argument)  # type: ignore[arg-type]
    return argument if isinstance(argument, ProcessGroup) else ProcessGroup.unbox(argument)


def name_of_group(group: dist.ProcessGroup) -> str:
    """Return the description of a group; of several of one description and the same ranks, with a number."""
    described, ranks = group.group_desc, dist.get_process_group_ranks(group)
    made = [one for one in _world.pg_map if one.group_desc == described and dist.get_process_group_ranks(one) == ranks]
    if described in ("", "undefined", "default_pg"):
        described = "world" if group is dist.group.WORLD else "group"
    number = next((place for place, one in enumerate(made) if one is group), 0)
    return f"{described} #{number + 1}" if number else described


_REDUCTIONS = {kind: name.lower() for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


def reduction_of(argument: Any) -> str:
    """Return the name of an operator's reduction: ``sum``, ``max``."""
    return argument if isinstance(argument, str) else _REDUCTIONS[argument.op()]


def in_parts(types: Any) -> bool:
    """Return whether tensors of these classes are DTensors, whose operators are made of operators on plain tensors."""
    return any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types)


def tensors_in(argument: Any) -> list[torch.Tensor]:
    """Return the tensors of an operator's argument, which may be lists of lists."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [x for each in argument for x in tensors_in(each)] if isinstance(argument, list | tuple) else []


def done(out: list[torch.Tensor] | None = None, handle: FakeWork | None = None) -> Any:
    """Return the handle of a collective that is done, as the dispatcher wants it.

    Args:
        out: its result, for ``DistributedDataParallel``, which asks for it.
        handle: of a message.
    """
    if out is None:
        return (handle or FakeWork()).boxed()
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(out)
    return _create_work_from_future(future).boxed()


fake_worlds: list[int] = []
"""The rank that this process has in a fake world (:mod:`autopar.compat.fake_world`), if it is in one."""


def in_fake_world() -> bool:
    """Return whether this process runs inside of a fake world: tensors have no memory, and are on no device."""
    return bool(fake_worlds)


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend that carries a group's collectives of tensors on a device."""
    return group._get_backend(device)


def backends_of(group: Any) -> Iterator[Any]:
    """Yield the backends of a group."""
    for device in group._device_types:
        yield group._get_backend(device)


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Set how long collectives of a backend wait."""
    backend._set_default_timeout(timeout)


def has_timeout(backend: Any) -> bool:
    """Return whether :func:`set_timeout` knows a backend."""
    return hasattr(backend, "_set_default_timeout") and hasattr(backend, "options")


def destroy(groups: Iterable[Any]) -> None:
    """Destroy process groups. DTensor forgets its results over them, which it would return for an equal mesh."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    for group in groups:
        with contextlib.suppress(ValueError):  # user code has destroyed it
            dist.destroy_process_group(group)
    _clear_sharding_prop_cache()


def number_of_next_group(number: int | None = None) -> int:
    """Return the number by which torch names the next process group of this rank; with ``number`` it is this one."""
    if number is not None:
        _world.group_count = number
    return _world.group_count


def is_flat_parameter(parameter: torch.Tensor) -> bool:
    """Return whether FSDP1 has put several parameters into this one."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"


def leave_out_of_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Let a ``DistributedDataParallel`` that is made of ``model`` later leave these parameters alone; none: not any."""
    vars(model).pop(_LEFT_OUT, None)
    if listed := list(names):
        vars(model)[_LEFT_OUT] = listed


def left_out_of_ddp(wrapper: nn.Module) -> set[str]:
    """Return the parameters that a ``DistributedDataParallel`` leaves alone, by their names in what it wraps."""
    return set(getattr(wrapper, "parameters_to_ignore", ()))


def meshes_of_fsdp(module: nn.Module) -> set[Any]:
    """Return the meshes over which FSDP2 shards a module's own parameters."""
    state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    return {group.mesh_info.mesh for group in getattr(state, "_fsdp_param_groups", ())}


def gathered_parameters(root: FSDPModule) -> set[int]:
    """Return the ids of the whole parameters that FSDP2 puts in the place of its shards while it has them gathered."""
    states = root._get_fsdp_state()._state_ctx.all_states
    every = (held for each in states for group in each._fsdp_param_groups for held in group.fsdp_params)
    return {id(held._unsharded_param) for held in every if hasattr(held, "_unsharded_param")}


def take_new_shards(model: nn.Module) -> None:
    """Let FSDP2 pad and gather the local shards that its parameters have now; it did so with those that they had.

    Source: ``torch.distributed.fsdp.FSDPModule._apply``.
    """
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            for held in group.fsdp_params:
                held.reset_sharded_param()


def drop_gradients(root: FSDPModule) -> None:
    """Drop the gradients that FSDP2 has accumulated and not reduced."""
    for each in root._get_fsdp_state()._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            for held in group.fsdp_params:
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None


def running(root: FSDPModule) -> str:
    """Return what FSDP2 runs of the model: ``IDLE``, ``FORWARD``, ``PRE_BACKWARD`` or ``POST_BACKWARD``."""
    return str(root._get_fsdp_state()._training_state.name)


def begin_forward(root: FSDPModule, args: Any, kwargs: Any) -> Any:
    """Gather the root's own weights, as a call of the root does; return the inputs for the module that runs instead.

    Source: ``torch.distributed.fsdp.register_fsdp_forward_method``.
    """
    state: Any = root._get_fsdp_state()
    return state._pre_forward(root, args, kwargs)


def end_forward(root: FSDPModule, output: Any) -> Any:
    """Return the output that the caller gets after :func:`begin_forward`."""
    state: Any = root._get_fsdp_state()
    return state._post_forward(root, None, output)


def forward_order(root: FSDPModule) -> list[str]:
    """Return the paths of the groups that ran in forwards since the last backward, in their order."""
    order = getattr(root._get_fsdp_state()._comm_ctx, "post_forward_order", ())
    return [group._module_fqn or "" for group in order]


def free_weights(root: FSDPModule) -> None:
    """Free weights that FSDP2 has gathered; before its first forward there are none, and torch would raise."""
    if hasattr(root._get_fsdp_state()._comm_ctx, "all_gather_state"):
        root.reset_iter_state()


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients that FSDP2 has accumulated, as torch's pipeline stages do after their last backward.

    Source: ``torch.distributed.pipelining.stage``, ``_PipelineStageBase.perform_reduce_grad``.
    """
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state = root._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()

"""A fake world for one rank: torch.distributed with groups that send nothing, on tensors without memory.

A dispatch mode answers the collectives (:mod:`autopar.tools.rehearsal.trace`). This module replaces torch code that
bypasses the dispatcher or rejects tensors without memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import _api, placement_types
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import distributed
from torch.utils.weak import WeakIdKeyDictionary

from autopar.compat.c10d import fake_worlds
from autopar.compat.tensors import no_dispatch_modes
from autopar.tensor_tracking import tensors_in
from autopar.tools.compat.operators import FakeWork, ProcessGroup


def without_data(function: Any, args: Any, kwargs: Any) -> Any:
    """Answer an operator that reads values from tensors without memory; else return ``NotImplemented``.

    Numbers are 1. Flags are False, except results of ``all()``: sequences are not padded, not packed, and finite. All
    experts get equally many tokens.
    """
    answer = _ANSWERS.get(function)
    if answer is None or not any(tensor.is_meta for tensor in tensors_in(args)):
        return NotImplemented
    return answer(function, args, kwargs)


def _hits(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    of = x.untyped_storage().nbytes() // x.itemsize  # a slice of a mask for one expert has its share of the hits
    return x.new_empty((-(-x.numel() * x.numel() // of) if of else 0, x.ndim), dtype=torch.long)


def _all_of(function: Any, args: Any, kwargs: Any) -> Any:
    out = function(*args, **kwargs)
    _up[out] = None
    return out


def _number(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    return x in _up if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1


def _on_host(function: Any, args: Any, kwargs: Any) -> Any:
    x, device = args[0], kwargs.get("device")
    if device is None or torch.device(device).type != "cpu":
        return NotImplemented
    dtype = kwargs.get("dtype") or x.dtype
    return torch.full(x.shape, dtype != torch.bool and not dtype.is_floating_point, dtype=dtype)


def _own_order(function: Any, args: Any, kwargs: Any) -> Any:
    """Keep this rank's order of buckets, which ``DistributedDataParallel`` copies from rank 0."""
    return args[0] if not args[0].is_meta and args[0].dtype == torch.int32 else NotImplemented


_up = WeakIdKeyDictionary()  # results of all(), which are True
_ANSWERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.ops.aten.nonzero.default: _hits,
    torch.ops.aten.all.default: _all_of,
    torch.ops.aten._local_scalar_dense.default: _number,
    torch.ops.aten._to_copy.default: _on_host,
    torch.ops.aten.copy_.default: _own_order,
}


class _Stream(torch.cpu.Stream):
    """A stream of the meta device. Its work is always complete."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()


class World(NamedTuple):
    """Callbacks of a fake world."""

    note_group: Callable[[str, list[int]], None]  # gets the description and ranks of each new group
    gives_for: Callable[[int], AbstractContextManager[bool]]  # around a broadcast; True: as the root
    note_resize: Callable[[torch.Tensor], None]  # after FSDP2 has allocated or freed a storage
    note_wait: Callable[[FakeWork], None]  # at each ``wait``


@contextmanager
def fake_world(rank: int, size: int, callbacks: World) -> Iterator[None]:
    """Initialize torch.distributed as ``rank`` of ``size`` with groups that send nothing.

    Inside the block FSDP2 accepts parameters without memory. ``DeviceMesh`` and object collectives work as usual.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    streams = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")}
    streams |= {"current_device": lambda: 0, "current_stream": lambda *_: _Stream(), "Stream": _Stream}
    torch.meta = SimpleNamespace(**streams)  # type: ignore[attr-defined]
    fake_worlds.append(rank)
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    _carry_meta(dist.group.WORLD)
    try:
        with ExitStack() as stack:
            for place, name, new in _replaced(rank, size, callbacks):
                stack.enter_context(mock.patch.object(place, name, new))
            yield
    finally:
        fake_worlds.pop()
        del torch.meta  # type: ignore[attr-defined]
        if dist.is_initialized():
            dist.destroy_process_group()


def _replaced(rank: int, size: int, callbacks: World) -> list[tuple[Any, str, Any]]:
    """Return the attributes to replace: object, name and replacement."""
    new_group, broadcast_objects = distributed_c10d._new_group_with_tag, dist.broadcast_object_list
    format_of: Any = torch.Tensor.__format__
    sizes, shards = (getattr(ShardingPropagator, name) for name in (SIZES_OF_DTENSORS, SHARDS_OF_DTENSORS))

    def made(ranks: Any = None, timeout: Any = None, *args: Any, **named: Any) -> Any:
        named |= dict(zip(_LATER_ARGUMENTS, args, strict=False)) | {"backend": None, "backend_options": None}
        if not named.get("use_local_synchronization"):  # only its members create such a group
            callbacks.note_group(named.get("group_desc") or "", list(range(size)) if ranks is None else sorted(ranks))
        group = new_group(ranks, timeout, **named)
        if isinstance(group, ProcessGroup):
            _carry_meta(group)
        return group

    def objects(object_list: list[Any], src: int | None = None, group: Any = None, *args: Any, **kwargs: Any) -> None:
        place = kwargs.pop("group_src", None)
        world: Any = dist.group.WORLD
        if place is not None:
            src = dist.get_global_rank(group or world, place)
        root = src or 0
        with callbacks.gives_for(root) as instead:
            broadcast_objects(object_list, rank if instead else root, group, *args, **kwargs)

    def waited(work: Any, timeout: Any = None) -> bool:
        callbacks.note_wait(work)
        return True

    def sizes_of_dtensors(*args: Any) -> Any:
        with no_dispatch_modes():  # a mode would count these tensors
            return sizes(*args)

    def shown(value: torch.Tensor, form: str) -> str:
        number = value.is_meta and value.ndim == 0
        return format(value.item(), form) if number else str(format_of(value, form))

    return [
        (distributed_c10d, "_new_group_with_tag", made),
        *((place, "monitored_barrier", lambda group=None, *_, **__: dist.barrier(group)) for place in _HOMES),
        (dist, "broadcast_object_list", objects),
        *((kind, "wait", waited) for kind in (FakeWork, dist.Work)),
        (torch.Tensor, "__format__", shown),
        (placement_types, "mesh_scatter", _mesh_scatter),
        *((place, "mesh_broadcast", _mesh_broadcast) for place in (_api, placement_types)),
        (torch.accelerator, "current_stream", lambda *_: _Stream()),
        (FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
        (distributed, "_verify_param_shape_across_processes", _compare_shapes),
        (ShardingPropagator, SIZES_OF_DTENSORS, sizes_of_dtensors),
        (ShardingPropagator, SHARDS_OF_DTENSORS, once_for_equal_tensors(shards)),
        (_fsdp_param, "alloc_storage", _and_then(_fsdp_param.alloc_storage, callbacks.note_resize)),
        (_fsdp_param, "free_storage", _and_then(_fsdp_param.free_storage, callbacks.note_resize)),
    ]


SIZES_OF_DTENSORS = "_propagate_tensor_meta_non_cached"  # allocates tensors of the full sizes
SHARDS_OF_DTENSORS = "propagate_op_sharding_non_cached"


def once_for_equal_tensors(propagate: Any) -> Any:
    """Wrap ``propagate`` to handle each distinct DTensor of a list only once.

    The time of torch's propagation is quadratic in the length of the list: 10 s for an AdamW step of a 70B model.
    """

    def found(self: Any, schema: OpSchema) -> Any:
        lists = [each for each in schema.args_schema if isinstance(each, list | tuple)]
        if not schema.op.name().startswith("aten::_foreach_") or len({*map(len, lists)}) != 1:
            return propagate(self, schema)
        places: dict[Any, int] = {}
        at = [places.setdefault(row, len(places)) for row in zip(*lists, strict=True)]
        columns = zip(*places, strict=True)
        args = (type(each)(next(columns)) if isinstance(each, list | tuple) else each for each in schema.args_schema)
        made = propagate(self, OpSchema(schema.op, tuple(args), schema.kwargs_schema, schema.schema_info))
        if made.needs_redistribute:
            return propagate(self, schema)
        if made.output_spec is not None:
            made.output_spec = type(made.output_spec)(made.output_spec[place] for place in at)
        return made

    return found


_HOMES = (dist, distributed_c10d)  # modules with monitored_barrier, which only gloo supports
_LATER_ARGUMENTS = [*inspect.signature(distributed_c10d._new_group_with_tag).parameters][2:]


def _carry_meta(group: Any) -> None:
    """Register a backend of the group for the meta device."""
    group._register_backend(
        torch.device("meta"), ProcessGroup.BackendType.CUSTOM, group._get_backend(torch.device("cpu"))
    )


def _mesh_scatter(
    output: torch.Tensor, parts: Any, mesh: Any, mesh_dim: int = 0, async_op: bool = False, *, group_src: int = 0
) -> Any:
    """Scatter a DTensor's shards. Torch skips tensors without memory."""
    group = mesh.get_group(mesh_dim)
    given = parts if dist.get_rank(group) == group_src else None
    return dist.scatter(output, given, group=group, async_op=async_op, group_src=group_src)


def _mesh_broadcast(
    tensor: torch.Tensor, mesh: Any, mesh_dim: int = 0, async_op: bool = False, *, group_src: int = 0
) -> Any:
    """Broadcast a DTensor's full tensor. Torch skips tensors without memory."""
    return dist.broadcast(tensor, group=mesh.get_group(mesh_dim), async_op=async_op, group_src=group_src)


def _compare_shapes(group: Any, parameters: list[torch.Tensor], logger: Any = None) -> None:
    """Issue the collectives with which ``DistributedDataParallel`` compares shapes. Torch's C++ code reads results."""
    number = torch.tensor([len(parameters)], device="meta")
    dist.all_gather([torch.empty_like(number) for _ in range(group.size())], number, group=group)
    shapes = [size for parameter in parameters for size in (*parameter.shape, *parameter.stride())]
    dist.broadcast(torch.tensor(shapes, device="meta"), group=group, group_src=0)


def _and_then(first: Callable[[torch.Tensor], None], second: Callable[[torch.Tensor], None]) -> Any:
    def run(tensor: torch.Tensor) -> None:
        first(tensor)
        second(tensor)

    return run

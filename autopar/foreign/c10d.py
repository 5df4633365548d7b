"""torch.distributed's operators as its dispatcher sees them, and groups that carry nothing.

Every collective of Python or C++ becomes an operator ``c10d::...`` before a backend runs it. A dispatch mode sees it
there, whoever called it: this library, FSDP2 or the reducer of ``DistributedDataParallel``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    FakeWork,
    ProcessGroup,
    _create_work_from_future,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "FUNCTIONAL",
    "OPERATORS",
    "Operator",
    "TorchDispatchMode",
    "done",
    "fake_world",
    "group_of",
    "in_fake_world",
    "in_parts",
    "operator_of",
    "tensors_in",
    "without_data",
]


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
        reduction: place of its name: ``sum``; -1: none.
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
    "allreduce_": Operator("all_reduce", 0, 0, 1),
    "allreduce_coalesced_": Operator("all_reduce", 0, 0, 1, result=False),
    "allgather_": Operator("all_gather", 0, 1, 2),
    "_allgather_base_": Operator("all_gather", 0, 1, 2),
    "allgather_into_tensor_coalesced_": Operator("all_gather", 0, 1, 2, result=False),
    "reduce_scatter_": Operator("reduce_scatter", 0, 1, 2),
    "_reduce_scatter_base_": Operator("reduce_scatter", 0, 1, 2),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", 0, 1, 2, result=False),
    "alltoall_": Operator("all_to_all", 0, 1, 2),
    "alltoall_base_": Operator("all_to_all", 0, 1, 2, result=False, splits=(3, 4)),
    "broadcast_": Operator("broadcast", 0, 0, 1, peer=2),
    "reduce_": Operator("reduce", 0, 0, 1, peer=3, result=False),
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


def in_parts(types: Any) -> bool:
    """Return whether tensors of these classes are DTensors, whose operators are made of operators on plain tensors."""
    return any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types)


def tensors_in(argument: Any) -> list[torch.Tensor]:
    """Return the tensors of an operator's argument, which may be lists of lists."""
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]


def done(out: list[torch.Tensor] | None = None) -> Any:
    """Return the handle of a collective that is done, as the dispatcher wants it.

    Args:
        out: its result, for ``DistributedDataParallel``, which asks for it; such a handle takes no time-out.
    """
    if out is None:
        return FakeWork().boxed()
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(out)
    return _create_work_from_future(future).boxed()


def without_data(function: Any, args: Any, kwargs: Any) -> Any:
    """Answer a look at numbers that have no memory: counts are 1, flags are down. ``NotImplemented``: it is none.

    Those of ``all()`` are up: sequences are not padded, not packed, and finite. Every expert is hit, by an equal share.
    """
    answer = _ANSWERS.get(function)
    if answer is None or not any(tensor.is_meta for tensor in tensors_in(args)):
        return NotImplemented
    return answer(function, args, kwargs)


def _hits(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    of = x.untyped_storage().nbytes() // x.itemsize  # one expert's part of a mask has that part of its hits
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
    """Leave in place the order of its buckets that ``DistributedDataParallel`` takes over from rank 0."""
    return args[0] if not args[0].is_meta and args[0].dtype == torch.int32 else NotImplemented


_up = WeakIdKeyDictionary()  # flags of all()
_ANSWERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.ops.aten.nonzero.default: _hits,
    torch.ops.aten.all.default: _all_of,
    torch.ops.aten._local_scalar_dense.default: _number,
    torch.ops.aten._to_copy.default: _on_host,
    torch.ops.aten.copy_.default: _own_order,
}


class _Stream(torch.cpu.Stream):
    """A stream of the meta device, on which nothing is ever late."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()


_worlds: list[int] = []  # ranks that run in a fake world, at most one


def in_fake_world() -> bool:
    """Return whether this process runs inside of :func:`fake_world`: tensors have no memory, and are on no device."""
    return bool(_worlds)


@contextmanager
def fake_world(
    rank: int,
    world: int,
    note_reduce: Callable[[Any], None],
    note_group: Callable[[str, list[int]], None],
    gives_for: Callable[[int], AbstractContextManager[bool]],
    note_resize: Callable[[torch.Tensor], None],
) -> Iterator[None]:
    """Start torch.distributed as ``rank`` of ``world`` with groups that carry nothing.

    FSDP2 takes parameters without memory inside; ``DeviceMesh`` and exchanges of objects work as they do elsewhere.

    Args:
        note_reduce: called with the operation of each ``all_reduce`` before it: its operator hides which one it is.
        note_group: called with the name and the ranks of each group that is made.
        gives_for: around a broadcast of objects from another rank: whether this one gives its own objects instead.
        note_resize: called with each tensor whose storage FSDP2 has given memory or has freed.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    all_reduce, new_group, broadcast_objects = dist.all_reduce, dist.new_group, dist.broadcast_object_list

    def noted(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        note_reduce(op)
        return all_reduce(tensor, op, *args, **kwargs)

    def made(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        note_group(kwargs.get("group_desc") or "", list(range(world) if ranks is None else ranks))
        return new_group(ranks, *args, **kwargs)

    def objects(values: list[Any], src: int | None = None, group: Any = None, *args: Any, **kwargs: Any) -> None:
        root = dist.get_global_rank(group, kwargs.pop("group_src")) if src is None else src
        with gives_for(root) as instead:
            broadcast_objects(values, rank if instead else root, group, *args, **kwargs)

    streams = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")}
    streams |= {"current_device": lambda: 0, "current_stream": lambda *_: _Stream(), "Stream": _Stream}
    replaced: list[tuple[Any, str, Any]] = [
        (dist, "all_reduce", noted),
        (dist, "new_group", made),
        (dist, "all_gather_object", _gather_objects),
        (dist, "broadcast_object_list", objects),
        (FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
        (distributed, "_verify_param_shape_across_processes", _compare_shapes),
        (_fsdp_param, "alloc_storage", _and_then(_fsdp_param.alloc_storage, note_resize)),
        (_fsdp_param, "free_storage", _and_then(_fsdp_param.free_storage, note_resize)),
    ]
    torch.meta = SimpleNamespace(**streams)  # type: ignore[attr-defined]
    _worlds.append(rank)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with _replacing(replaced):
            yield
    finally:
        _worlds.pop()
        del torch.meta  # type: ignore[attr-defined]
        dist.destroy_process_group()


def _gather_objects(found: list[Any], value: Any, group: Any = None) -> None:
    """Exchange objects by the collectives of torch's ``all_gather_object``; unpickle equal ones once."""
    members = dist.get_world_size(group)
    if members < 0:
        return  # not a member
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.zeros(members, dtype=torch.long)
    dist.all_gather(list(sizes.split(1)), torch.tensor([data.numel()]), group=group)
    rows = torch.zeros(members, int(sizes.max()), dtype=torch.uint8)
    given = torch.zeros_like(rows[0])
    given[: data.numel()] = data
    dist.all_gather(list(rows.unbind()), given, group=group)
    packed = [row.tobytes() for row in rows.numpy()]  # zeros behind the end are not read
    unpacked = {each: pickle.loads(each) for each in dict.fromkeys(packed)}
    found[:] = [unpacked[each] for each in packed]


def _compare_shapes(group: Any, parameters: list[torch.Tensor], logger: Any = None) -> None:
    """Send what ``DistributedDataParallel`` compares when it is made; in C++ it would read the answers."""
    number = torch.tensor([len(parameters)], device="meta")
    dist.all_gather([torch.empty_like(number) for _ in range(group.size())], number, group=group)
    shapes = [size for parameter in parameters for size in (*parameter.shape, *parameter.stride())]
    dist.broadcast(torch.tensor(shapes, device="meta"), group=group, group_src=0)


def _and_then(first: Callable[[torch.Tensor], None], second: Callable[[torch.Tensor], None]) -> Any:
    def run(tensor: torch.Tensor) -> None:
        first(tensor)
        second(tensor)

    return run


@contextmanager
def _replacing(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put others in the place of attributes, each given with its object and name, inside of ``with``."""
    before = [getattr(place, name) for place, name, _ in attributes]
    for place, name, new in attributes:
        setattr(place, name, new)
    try:
        yield
    finally:
        for (place, name, _), old in zip(attributes, before, strict=True):
            setattr(place, name, old)

"""Operators of torch.distributed in the dispatcher, and their results.

Every collective of Python or C++ becomes an operator ``c10d::...`` before a backend runs it. A dispatch mode sees the
operators of all callers: this library, FSDP2 and the reducer of ``DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml
from torch._C._distributed_c10d import FakeWork, ProcessGroup, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group, _world  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

__all__ = ["FakeWork", "ProcessGroup"]


class Operator(NamedTuple):
    """The kind of a collective, and the argument positions of its operator; -1: the operator lacks the argument.

    Attributes:
        out, given: The positions of the output (-1 if it is a new tensor) and of the input.
        peer: The position of the group rank of the root, or of the other end of a message.
        result: A flag, set if the operator returns the output together with the handle.
        splits: The positions of the received and the sent split sizes.
    """

    kind: str
    out: int
    given: int
    group: int
    peer: int = -1
    result: bool = True
    splits: Sequence[int] = ()
    tag: int = -1
    reduction: int = -1


TABLES: dict[str, dict[str, Operator]] = {
    namespace: {name: Operator(**fields) for name, fields in operators.items()}
    for namespace, operators in yaml.safe_load(Path(__file__).with_name("collectives.yaml").read_text("utf-8")).items()
}
"""Namespace -> name of a dispatcher operator -> its description."""


def operator_of(function: Any) -> Operator | None:
    """Return the collective of a dispatcher operator; None if the operator is not a collective."""
    table = TABLES.get(getattr(function, "namespace", ""))
    return None if table is None else table.get(function._schema.name.partition("::")[2])


def group_of(argument: Any) -> dist.ProcessGroup:
    """Return the process group of an operator's argument, which may be a group name."""
    if isinstance(argument, str):
        return _resolve_process_group(argument)  # type: ignore[arg-type]
    return argument if isinstance(argument, ProcessGroup) else ProcessGroup.unbox(argument)


def name_of_group(group: dist.ProcessGroup) -> str:
    """Return the description of a group. Add a number if several groups have the same description and ranks."""
    described, ranks = group.group_desc, dist.get_process_group_ranks(group)
    made = [one for one in _world.pg_map if one.group_desc == described and dist.get_process_group_ranks(one) == ranks]
    if described in ("", "undefined", "default_pg"):
        described = "world" if group is dist.group.WORLD else "group"
    number = next((place for place, one in enumerate(made) if one is group), 0)
    return f"{described} #{number + 1}" if number else described


_REDUCTIONS = {kind: name.lower() for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


def reduction_of(argument: Any) -> str:
    """Return the name of a reduction, for example ``sum``."""
    return argument if isinstance(argument, str) else _REDUCTIONS[argument.op()]


def in_parts(types: Any) -> bool:
    """Return whether a class is a DTensor, whose operators are decomposed into operators on local tensors."""
    return any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types)


def done(out: list[torch.Tensor] | None = None, handle: FakeWork | None = None) -> Any:
    """Return the boxed handle of a finished collective, with its result ``out`` for ``DistributedDataParallel``."""
    if out is None:
        return (handle or FakeWork()).boxed()
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(out)
    return _create_work_from_future(future).boxed()

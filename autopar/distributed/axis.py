"""One axis of the mesh as a rank sees it, the sizes of the mesh, and the argument ``group`` of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from autopar.compat.c10d import in_fake_world
from autopar.distributed.process import accelerator
from autopar.errors import ConfigError
from autopar.layout import Block, Layout, even_shards
from autopar.swap import NotCopied


class MeshSizes(NamedTuple):
    """The sizes of the axes of a mesh, in a job or a checkpoint."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1

    def in_words(self) -> str:
        """Return the sizes by their names in the config; context parallelism only if it is used."""
        cp = f"context_parallel_size={self.cp}, " if self.cp > 1 else ""
        return f"tensor_parallel_size={self.tp}, {cp}pipeline_parallel_size={self.pp}, data-parallel size {self.dp}"


class Axis(NotCopied):
    """One axis of the mesh as this rank sees it: the process group, this rank's place in it, and its size.

    Copying an axis (``copy.deepcopy`` of a parallelized model) returns the same axis: process groups cannot be copied.

    Attributes:
        name: ``tp``, ``cp``, ``dp``, ``pp``, or the name of a joined axis.
        group: The process group; None in a dry run, which does not communicate.
        ranks: The global ranks of the axis.
        rank: The index of this rank among them.
        size: The number of ranks.
        one_each: The layout of one element for each rank.
        explain: A function that returns the error for a failed collective, with the failed rank, or None; set by
            ``initialize``.
        transport: A feature's transport for collectives of CPU tensors; None for the process group.
        reduce_dtype: The dtype in which half-precision tensors are summed; None for their dtype.
        read_timeout: The seconds that a rank waits for the other ranks when it reads a lazily gathered tensor.
    """

    __slots__ = (
        *("explain", "group", "name", "one_each", "rank", "ranks", "read_timeout", "reduce_dtype", "size"),
        "transport",
    )

    def __init__(self, name: str, group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int) -> None:
        self.name = name
        self.group = group
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.one_each = Layout.of(0, [Block("element", self.size, 1, even_shards(self.size, self.size))])
        self.explain: Callable[[RuntimeError, str, Sequence[int]], Exception | None] | None = None
        self.transport: Any = None
        self.reduce_dtype: torch.dtype | None = None
        self.read_timeout = 20.0

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` in the dtype of sums over the axis: ``x`` itself, or a converted copy of a half tensor."""
        dtype = self.reduce_dtype
        return x if dtype is None or not x.is_floating_point() or x.itemsize >= dtype.itemsize else x.to(dtype)

    @classmethod
    def of(cls, group: dist.ProcessGroup, name: str = "tp") -> Axis:
        """Make an axis from a process group."""
        return cls(name, group, dist.get_process_group_ranks(group), dist.get_rank(group))

    def __repr__(self) -> str:
        return f"Axis({self.name}, rank {self.rank} of {self.size}, global ranks {list(self.ranks)})"


class HasTensorAxis(Protocol):
    """An :class:`~autopar.distributed.mesh.MPU`, reduced to the attribute that this module needs."""

    tp: Any  # an Axis


Group = dist.ProcessGroup | HasTensorAxis | Axis
"""A process group, an MPU (for its tensor-parallel axis), or an axis of an MPU."""


def axis_of(group: Group | None) -> Axis:
    """Return the axis of ``group``. None raises, because the world is rarely the tensor-parallel group.

    Raises:
        ConfigError: ``group`` has another type, or is a process group without this rank.
    """
    if isinstance(group, Axis):
        return group
    if isinstance(group, dist.ProcessGroup):
        return Axis.of(group)
    axis = getattr(group, "tp", None)
    if isinstance(axis, Axis):
        return axis
    outsider: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is outsider:
        raise ConfigError(f"group: global rank {dist.get_rank()} is not a member of this process group")
    raise ConfigError(f"group must be a torch ProcessGroup or an MPU, got {type(group).__name__}")


def device_of(axis: Axis) -> torch.device:
    """Return the device of the axis's tensors: the GPU of this process with nccl, otherwise the CPU."""
    return device_of_group(axis.group)


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of a group's tensors (by default the world's), as :func:`device_of`."""
    if in_fake_world():
        return torch.device("meta")
    found = accelerator()
    return torch.device("cpu") if found is None or found.backend_of(group) is None else found.device

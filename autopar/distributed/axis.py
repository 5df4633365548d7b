"""Axis: one dimension of the mesh as a rank sees it; the sizes of all; and what functions accept as ``group``."""

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
    """Sizes of the axes, which also checkpoints without a process group tell."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1

    def in_words(self) -> str:
        """Return the sizes by the names that they have in a config, context parallelism's if there is any."""
        cp = f"context_parallel_size={self.cp}, " if self.cp > 1 else ""
        return f"tensor_parallel_size={self.tp}, {cp}pipeline_parallel_size={self.pp}, data-parallel size {self.dp}"


class Axis(NotCopied):
    """One axis of the mesh as this rank sees it: the process group, this rank's place in it, and its size.

    Copying an axis (``copy.deepcopy`` of a parallelized model) gives the same axis: process groups cannot be copied.

    Attributes:
        name: ``tp``, ``cp``, ``dp``, ``pp``, or the name of a joined axis.
        group: Process group; None: a dry run, which sends nothing.
        ranks: Global ranks of the axis.
        rank: Place of this rank among them.
        size: Number of ranks.
        one_each: Layout of one element for each rank.
        explain: Function that names the failed rank when a collective failed (None: no rank); set by ``initialize``.
        transport: Carrier of a feature for collectives of tensors on the CPU; None: the process group carries all.
        reduce_dtype: Dtype in which tensors of half precision are summed; None: their own.
        read_timeout: Seconds that a rank which reads a lazily gathered tensor waits for the other ranks to read it.
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
        """Return ``x`` in the dtype in which it is summed over the axis: itself, or a copy of a half tensor."""
        dtype = self.reduce_dtype
        return x if dtype is None or not x.is_floating_point() or x.itemsize >= dtype.itemsize else x.to(dtype)

    @classmethod
    def of(cls, group: dist.ProcessGroup, name: str = "tp") -> Axis:
        """Make the axis of a bare process group."""
        return cls(name, group, dist.get_process_group_ranks(group), dist.get_rank(group))

    def __repr__(self) -> str:
        return f"Axis({self.name}, rank {self.rank} of {self.size}, global ranks {list(self.ranks)})"


class HasTensorAxis(Protocol):
    """An :class:`~autopar.distributed.mesh.MPU`, as far as this low row has to know it."""

    tp: Any  # an Axis


Group = dist.ProcessGroup | HasTensorAxis | Axis
"""A process group, an MPU (its tensor-parallel axis is meant), or an axis of an MPU."""


def axis_of(group: Group | None) -> Axis:
    """Return the axis that ``group`` means.

    Raises:
        ConfigError: it is none of the three, or a process group without this rank. No default exists: the world is a
            tensor-parallel group only by accident.
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
    raise ConfigError(f"group must be a torch ProcessGroup or an MPU, not {type(group).__name__}")


def device_of(axis: Axis) -> torch.device:
    """Return where the tensors of this axis live: this process's GPU under nccl, else the CPU."""
    return device_of_group(axis.group)


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where tensors of a group (by default the world) live: as :func:`device_of`."""
    if in_fake_world():
        return torch.device("meta")
    found = accelerator()
    return torch.device("cpu") if found is None or found.backend_of(group) is None else found.device

"""MPU, the model-parallel unit: sizes, ranks and process groups of the (pp, dp, cp, tp) mesh.

Ranks count tp fastest, then cp, then dp, then pp, as in Megatron-LM. With 16 ranks, tp 2, cp 2 and pp 2::

    tp: [0, 1] [2, 3] [4, 5] ...      ranks that hold different shards of the same layers
    cp: [0, 2] [1, 3] [4, 6] ...      ranks that hold the same shard and get the same sequences
    dp: [0, 4] [1, 5] [2, 6] ...      ranks that hold the same shard and get different sequences
    pp: [0, 8] [1, 9] [2, 10] ...     ranks that hold consecutive stages of one replica

Joined axes (``dp_cp``, ``tp_cp``, ``tp_pp``, ``model``) contain all ranks of the axes in their name. Experts of a
mixture may be sharded over more ranks than the other layers, including the innermost replicas. With 8 ranks, tp 2 and
an expert-parallel size of 4, ``ep`` is [0, 1, 2, 3] [4, 5, 6, 7], and ``edp`` is [0, 4] [1, 5] [2, 6] [3, 7].

An MPU has no module-level state, so a process may have several meshes. They never share a process group, because their
models may run in different threads, and a failed collective leaves messages in its group. The groups of a mesh are
destroyed when all ranks have dropped it, because torch otherwise keeps their threads and connections.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar import registry
from autopar.compat.c10d import default_group, destroy
from autopar.config import ParallelConfig
from autopar.distributed.axis import Axis, MeshSizes, device_of_group
from autopar.distributed.digest import number_groups_alike
from autopar.distributed.process import TIMEOUT, start_process_group
from autopar.errors import ConfigError, nearest
from autopar.swap import NotCopied


class _Owned(NamedTuple):
    owner: weakref.ref[Any]
    groups: list[Any]


_worlds: weakref.WeakKeyDictionary[Any, dict[int, _Owned]] = weakref.WeakKeyDictionary()
"""Default process group -> number of an owner, identical on all ranks -> its groups."""

_MOST_OWNERS = 4
"""The number of owners above which garbage is collected, which takes some tenths of a second with transformers."""


def owned_groups(owner: Any) -> list[Any]:
    """Return a list for the process groups of ``owner``. Every rank calls it, in the same order."""
    owners = _worlds.setdefault(default_group(), {})
    owners[max(owners, default=-1) + 1] = made = _Owned(weakref.ref(owner), [])
    return made.groups


def dropped() -> set[int]:
    """Return the numbers of the owners that this rank has dropped."""
    owners = _worlds.get(default_group(), {})
    if len(owners) > _MOST_OWNERS:
        gc.collect()  # models are reference cycles
    return {number for number, (owner, _) in owners.items() if owner() is None}


def destroy_dropped(numbers: Iterable[set[int]]) -> None:
    """Destroy the groups of owners that all ranks have dropped, in the same order on all ranks.

    Args:
        numbers: The results of :func:`dropped` on all ranks.
    """
    owners = _worlds.get(default_group(), {})
    for number in sorted(set.intersection(*numbers)):
        destroy(owners.pop(number).groups)


_AXES = ("pp", "dp", "cp", "tp")  # slowest first
_DIMS = ("pp", "edp", "inner", "cp", "tp")  # the same axes, with dp split into two


def rank_groups(sizes: MeshSizes, experts: int = 1, zero: int = 0) -> dict[str, list[list[int]]]:
    """Return the global ranks of every group of every axis, without communication. Each axis partitions the world.

    Joined axes vary the axes in their name; ``model`` is one model replica (tp x cp x pp). ``embedding`` groups the
    first and last stage, which both hold tied embeddings.

    Args:
        experts: The expert-parallel size. Above tp, ``ep`` joins tp and the innermost replicas, ``edp`` the remaining
            replicas.
        zero: The number of neighbors in ``dp_cp`` over which FSDP2 shards (``fsdp``); ``hsdp`` joins ranks with equal
            rows.
    """
    inner = max(experts // sizes.tp, 1)
    ranks = np.arange(math.prod(sizes)).reshape(sizes.pp, sizes.dp // inner, inner, sizes.cp, sizes.tp)
    joined = {"dp": ("edp", "inner"), "ep": ("inner", "tp") if experts > 1 else ()}

    def groups_of(*varied: str) -> list[list[int]]:
        dims = [_DIMS.index(dim) for name in varied for dim in joined.get(name, (name,))]
        fixed = [dim for dim in range(ranks.ndim) if dim not in dims]
        size = math.prod(ranks.shape[dim] for dim in dims)
        return ranks.transpose(*fixed, *dims).reshape(-1, size).tolist()

    groups = {name: groups_of(*name.split("_")) for name in ("tp", "dp", "pp", "cp", "dp_cp", "ep", "edp", "edp_cp")}
    groups |= {"model": groups_of("pp", "cp", "tp"), "tp_cp": groups_of("cp", "tp"), "tp_pp": groups_of("pp", "tp")}
    groups["ep_pp"] = groups_of("pp", "inner", "tp")
    if zero:
        joint = groups["dp_cp"]
        groups["fsdp"] = [line[at : at + zero] for line in joint for at in range(0, len(line), zero)]
        groups["hsdp"] = [line[at::zero] for line in joint for at in range(zero)]
    groups["embedding"] = [[stages[0], stages[-1]] if sizes.pp > 1 else stages for stages in groups["pp"]]
    return groups


class MPU(NotCopied):
    """The (pp, dp, cp, tp) mesh as this process sees it: its place, and the process groups that contain it.

    Every process of the world must create it at the same point of the program, with the same sizes. The arguments are
    keys of the configuration (``docs/configuration.md``). The data-parallel size is ``world_size / (tp * cp * pp)``.

    Attributes:
        tp: The :class:`~autopar.distributed.axis.Axis` of the ranks that hold the shards of the same layers.
        cp: The axis of the ranks that share the same sequences.
        dp: The axis of the ranks that hold the same shard and read different data.
        pp: The axis of the stages of this replica.
        dp_cp: The axis of the ranks that hold the same shard; ``dp`` itself if cp is 1.
        tp_cp: The axis of the ranks of a stage that get the same batch; ``tp`` itself if cp is 1.
        model: The axis of all ranks that get the same batch, one model replica.
        tp_pp: The axis of ranks that together hold each shard once; ``model`` itself if cp is 1.
        ep: The axis of the ranks that hold the experts of the same layers; only this rank at size 1.
        edp: The axis of the ranks that hold the same experts and read different data; ``dp`` unless ep is above tp.
        shards: The axis of the ranks that together hold the weights of a stage: the larger of ``ep`` and ``tp``.
        copies: The axis of the ranks that hold the same shards as this rank, including experts.
        fsdp: The axis over which ZeRO stages 2 and 3 shard: ``dp_cp`` or a part of it.
        shards_pp: The axis of the ranks that together hold the weights of all stages.
        sizes: The sizes ``MeshSizes(tp, pp, dp, cp)``.
        device: The device of this rank: an accelerator with its backend, otherwise the CPU.
        failures: The failure log of the model; None for a mesh that user code created.
        alive: True until :meth:`destroy`, while the process groups exist.
        random_tracker: The named random streams, after ``tensor_parallel.manual_seed`` was called with this MPU.

    Raises:
        ConfigError: The sizes do not divide the world (with sizes that do), or ``shm`` is not possible.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        cpu_transport: str = "auto",
        context_parallel_size: int = 1,
        reduce_dtype: str = "same",
        expert_parallel_size: int = 1,
        zero_shard_size: int = 0,
    ) -> None:
        tp, pp, cp, ep = tensor_parallel_size, pipeline_parallel_size, context_parallel_size, expert_parallel_size
        config = ParallelConfig(
            tp, pp, ep, cpu_transport=cpu_transport, context_parallel_size=cp, reduce_dtype=reduce_dtype
        )
        registry.check_settings(config)
        start_process_group()
        world = dist.get_world_size()
        ParallelConfig.parse(config, world)
        self.sizes = MeshSizes(tp, pp, config.data_parallel_size(world), cp)
        self.rank = dist.get_rank()
        self.world_size = world
        self.device = device_of_group()
        self.random_tracker: Any = None
        self.failures: Any = None
        self._owned: list[dist.ProcessGroup] = owned_groups(self)
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}  # by names of the dims
        self.alive = True
        made: dict[tuple[int, ...], Any] = {}
        number_groups_alike(dist.group.WORLD)
        groups = rank_groups(self.sizes, ep, zero_shard_size)
        axes: dict[str, Axis] = {name: self._make_axis(name, groups[name], made) for name in groups}
        for axis in filter(None, axes.values()):  # stages in the middle have no embedding axis
            axis.reduce_dtype = torch.float32 if reduce_dtype == "fp32" else None
        self.tp, self.cp, self.dp, self.pp = (axes[name] for name in ("tp", "cp", "dp", "pp"))
        self.model = axes["model"]
        self.dp_cp, self.tp_cp, self.tp_pp = self.dp, self.tp, self.model
        if cp > 1:
            self.dp_cp, self.tp_cp, self.tp_pp = (axes[name] for name in ("dp_cp", "tp_cp", "tp_pp"))
        self.ep, self.edp = axes["ep"], self.dp
        self.shards, self.copies, self.shards_pp = self.tp, self.dp_cp, self.tp_pp
        if ep > tp:
            self.edp, self.copies, self.shards_pp = (axes[name] for name in ("edp", "edp_cp", "ep_pp"))
            self.shards = self.ep
        self.fsdp, self._hsdp = axes.get("fsdp", self.dp_cp), axes.get("hsdp")
        self._embedding = axes["embedding"]
        # Objects and errors are sent over gloo, for any backend of the tensors.
        if self.device.type not in ("cpu", "meta"):
            self.control = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self._owned.append(self.control)
        else:
            self.control = dist.group.WORLD
        try:
            for axis in dict.fromkeys(self._carried):
                choice = "auto" if axis is not self.tp and cpu_transport == "shm" else cpu_transport
                for _, choose in registry.entries("transports"):
                    axis.transport = axis.transport or choose(axis, groups[axis.name], choice, self.control)
        except ConfigError:
            self.destroy()
            raise

    @classmethod
    def of(cls, config: ParallelConfig) -> MPU:
        """Make the mesh of a configuration."""
        return cls(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            config.transport,
            config.context_parallel_size,
            config.reduce_dtype,
            config.expert_parallel_size,
            config.zero_shard_size,
        )

    def _make_axis(self, name: str, groups: list[list[int]], made: dict[tuple[int, ...], Any]) -> Any:
        mine: Axis | None = None
        for ranks in groups:  # every rank must create every group, in the same order
            key = tuple(ranks)
            if key not in made:  # one group for all axes through the same ranks
                world = len(ranks) == self.world_size
                made[key] = dist.group.WORLD if world else dist.new_group(ranks, group_desc=name)
                if self.rank in ranks and not world:
                    self._owned.append(made[key])
            if self.rank in ranks:
                mine = Axis(name, made[key], ranks, ranks.index(self.rank))
        return mine

    def __repr__(self) -> str:
        tp, pp, dp, cp = self.sizes
        ranks = f"tp {self.tp.rank}/{tp}, pp {self.pp.rank}/{pp}, dp {self.dp.rank}/{dp}"
        ranks += f", cp {self.cp.rank}/{cp}" if cp > 1 else ""
        ranks += f", ep {self.ep.rank}/{self.ep.size}" if self.ep.size > 1 else ""
        return f"MPU(rank {self.rank} of {self.world_size}: {ranks})"

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0 of the world, which prints and logs; reading data and saving need all ranks."""
        return self.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh as torch's ``DeviceMesh`` over the same groups, with axes ``("pp", "dp", "cp", "tp")``."""
        return self._mesh_of(_AXES, [self.pp, self.dp, self.cp, self.tp], range(self.world_size))

    @property
    def dp_cp_mesh(self) -> DeviceMesh:
        """Return the ranks that hold the same shard as a one-dimensional ``DeviceMesh``, for ``fully_shard``."""
        return self.mesh["dp"] if self.cp.size == 1 else self._line(self.dp_cp)

    @property
    def copies_mesh(self) -> DeviceMesh:
        """Return the ranks that hold the same experts as a one-dimensional ``DeviceMesh``, for ``fully_shard``."""
        return self.dp_cp_mesh if self.copies is self.dp_cp else self._line(self.copies)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Return the mesh for ``fully_shard``: one dim, or (copies, shards) if only a part of the ranks shards."""
        if self._hsdp is None:
            return self.dp_cp_mesh
        return self._mesh_of(("copies", "shards"), [self._hsdp, self.fsdp], self.dp_cp.ranks)

    @property
    def shards_mesh(self) -> DeviceMesh:
        """Return the ranks that together hold a stage's weights as a one-dimensional ``DeviceMesh``."""
        return self.mesh["tp"] if self.shards is self.tp else self._line(self.shards)

    @property
    def _carried(self) -> tuple[Axis, Axis, Axis]:
        return self.tp, self.dp_cp, self.copies  # whose collectives of CPU tensors a transport may carry

    def _line(self, axis: Axis) -> DeviceMesh:
        return self._mesh_of((axis.name,), [axis], axis.ranks)

    def _mesh_of(self, names: tuple[str, ...], axes: Sequence[Axis], ranks: Sequence[int]) -> DeviceMesh:
        """Return the mesh of ``ranks`` whose dims have the sizes and groups of ``axes``, always the same object."""
        if names not in self._meshes:
            placed = torch.tensor(ranks, dtype=torch.int).view(*(axis.size for axis in axes))
            groups: list[Any] = [axis.group for axis in axes]
            made = DeviceMesh.from_group(groups, self.device.type, mesh=placed, mesh_dim_names=names)
            self._meshes[names] = made
        return self._meshes[names]

    @property
    def saved_sizes(self) -> MeshSizes:
        """Return the sizes of an equivalent mesh without cp and ep, for a checkpoint.

        For weights, cp is part of dp. Experts over n ranks count as n tensor-parallel ranks, which hold the shards of
        the other layers several times.
        """
        return MeshSizes(self.shards.size, self.pp.size, self.copies.size)

    def places(self) -> list[tuple[int, int, int]]:
        """Return for each rank of the world its place in ``shards``, its stage, and its place in ``copies``."""
        groups = rank_groups(self.sizes, self.ep.size)
        names = ("ep" if self.shards is self.ep else "tp", "pp", "edp_cp")
        place = [{rank: at for group in groups[name] for at, rank in enumerate(group)} for name in names]
        return [(place[0][rank], place[1][rank], place[2][rank]) for rank in range(self.world_size)]

    def destroy(self) -> None:
        """Destroy the process groups of this MPU, but not the default group. Every rank calls it."""
        if self.alive:
            for axis in self._carried:
                if axis.transport is not None:
                    axis.transport.close()
                    axis.transport = None
            destroy(self._owned)
            self._owned.clear()
            self._meshes.clear()
            self.alive = False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"an MPU has no {name!r}.", name=name)
            for _, names in registry.entries("mesh_names"):
                if name in vars(names):
                    return vars(names)[name].__get__(self, type(self))
            hint = nearest(name, [one for one in dir(self) if not one.startswith("_")], cutoff=0.6)
            hint = hint or registry.missing("toolbox", "Names of Megatron-LM")
            raise AttributeError(f"an MPU has no {name!r}.{hint}", name=name)

    def __dir__(self) -> list[str]:
        names = (name for _, kind in registry.entries("mesh_names") for name in vars(kind))
        return sorted({*super().__dir__(), *names})


def new_pipeline_group(mpu: MPU, name: str, places: Iterable[int] | None = None, backend: str | None = None) -> Any:
    """Make a group of some places (default: all) of the pipeline axis; None on other ranks. Collective of the world."""
    mine = None
    for column in rank_groups(mpu.sizes)["pp"] if mpu.pp.size > 1 else ():
        ranks = column if places is None else [column[place] for place in places]
        group = dist.new_group(ranks, backend=backend, group_desc=name)
        if mpu.rank in ranks:
            mine = group
            mpu._owned.append(group)  # destroyed with the mesh
    return mine

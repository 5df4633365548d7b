"""Count the exact bytes of weights, gradients and optimizer state on each rank, from a plan's shards and stages."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from autopar.config import ParallelConfig
from autopar.data_parallel.precision import DTYPES, keeps_fp32
from autopar.data_parallel.whole_parameters import assign
from autopar.errors import ConfigError, nearest
from autopar.plan.plan import Plan
from autopar.plan.stages import StagePlan
from autopar.stored import Kind, StandIn

OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1}
"""Optimizer -> number of state tensors per parameter, each of the parameter's size. Adam also keeps a 4-byte step."""


class RankBytes(NamedTuple):
    """Bytes on one rank.

    Attributes:
        optimizer, host: The bytes of optimizer state on the GPU and in CPU memory, including fp32 master weights.
        parameters, stepped: The numbers of elements of the weights, and of elements that the rank's optimizer updates.
        largest: The bytes of the largest averaged gradient.
        expert_weights, expert_gradients: The bytes of experts that are distributed over replicas.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int = 0
    parameters: int = 0
    stepped: int = 0
    largest: int = 0
    expert_weights: int = 0
    expert_gradients: int = 0
    host: int = 0


class _Parameter(NamedTuple):
    name: str  # canonical
    shape: tuple[int, ...]
    dtype: torch.dtype  # before precision
    half: bool  # whether ``precision`` casts it to half precision
    trained: bool
    quantized: Kind | None = None


class ModelStates:
    """Count of a model's bytes on the ranks of a mesh. ``inner`` is the Hugging Face model inside ``model``."""

    def __init__(self, model: nn.Module, inner: nn.Module, plan: Plan, optimizer: str = "adamw") -> None:
        if optimizer not in OPTIMIZERS:
            known = f"one of {', '.join(OPTIMIZERS)}; got {optimizer!r}.{nearest(optimizer, OPTIMIZERS)}"
            raise ConfigError(f"optimizer must be {known}")
        self._inner, self.plan, self._optimizer = inner, plan, optimizer
        self._named = dict(model.named_parameters())
        buffers = ((name, b) for name, b in model.named_buffers() if b is not None)
        self._buffers = [(name, tuple(b.shape), b.element_size()) for name, b in buffers]
        self._shape = functools.cache(self._local_shape)

    def of_rank(
        self, stages: StagePlan, config: ParallelConfig, tp: int, pp: int, dp: int | None, replicas: int
    ) -> RankBytes:
        """Count the bytes of one rank.

        Args:
            tp, pp, dp: The place on each axis. With ``dp=None`` it is the replica with the highest memory.
            replicas: The data-parallel size times the context-parallel size.
        """
        self.plan.check_zero(config.zero_stage)
        held = self._held(stages, config, pp)
        copies = _Copies(self.plan.shards // self.plan.tp, config.context_parallel_size, replicas)
        shard = copies.sharer(dp) * self.plan.tp + tp
        shapes = [self._shape(parameter.name, parameter.shape, shard) for parameter in held]
        sizes = [*map(prod, shapes)]
        spread = [parameter.name in self.plan.experts for parameter in held]
        owned = [True] * len(held)
        if config.fully_sharded:
            at, of = (dp or 0) % (config.zero_shard_size or replicas), config.zero_shard_size or replicas
            whose = [(copies.copy(dp or 0), copies.size) if expert else (at, of) for expert in spread]
            sizes = [_rows(p, shape, at, of) for p, shape, (at, of) in zip(held, shapes, whose, strict=True)]
        elif config.zero_stage == 1 and replicas > 1:
            trained = [size if parameter.trained else 0 for parameter, size in zip(held, sizes, strict=True)]
            owned = copies.owned(trained, spread, dp)
        dtype = DTYPES.get(config.precision)
        weights = gradients = optimizer = stepped = largest = expert_weights = expert_gradients = 0
        for parameter, size, own, expert in zip(held, sizes, owned, spread, strict=True):
            if parameter.quantized is not None:
                planned = self.plan.tensors[parameter.name]
                rows, columns = planned.shape
                weights += parameter.quantized.nbytes((rows, columns), planned.layout, shard)
                continue
            width = dtype.itemsize if parameter.half and dtype is not None else parameter.dtype.itemsize
            if dtype is not None and not parameter.half and parameter.dtype.is_floating_point:
                width = 4  # kept in fp32
            weights += size * width
            expert_weights += size * width * expert
            if not parameter.trained:
                continue
            of_gradient = size * (4 if parameter.half else width)  # execute_pipeline sums them in fp32
            gradients, expert_gradients = gradients + of_gradient, expert_gradients + of_gradient * expert
            largest = max(largest, of_gradient if not expert or copies.size > 1 else 0)
            if own:
                stepped += size
                optimizer += OPTIMIZERS[self._optimizer] * of_gradient + 4 * size * parameter.half
                optimizer += 4 if self._optimizer.startswith("adam") else 0  # its step
        blocks = tuple(f"{path}." for place, path in enumerate(stages.elements) if place != stages.encoder)
        buffers = sum(
            prod(self._shape(name, shape, shard)) * width
            for name, shape, width in self._buffers
            if not name.startswith(blocks) or name not in stages.tensors or pp in stages.holders(name)
        )
        facts = (sum(sizes), stepped, largest, expert_weights, expert_gradients)
        host = optimizer if config.zero_optimizer_offload else 0
        return RankBytes(weights, gradients, optimizer - host, buffers, *facts, host)

    def unsharded(self, stages: StagePlan, pp: int, tp: int, replicas: int) -> tuple[int, int, int]:
        """Return the elements that FSDP2 gathers on a stage: of the largest block, all weights, and outside of blocks.

        Each replica has equally many rows of a weight.
        """
        elements, sizes = {*stages.elements}, Counter[str]()
        for name, parameter in self._named.items():
            if pp not in stages.holders(name):
                continue
            canonical = self.plan.names.get(name, name)
            rows, *rest = self._shape(canonical, tuple(parameter.shape), tp) or (1,)
            parts = name.split(".")
            block = next((path for end in range(1, len(parts)) if (path := ".".join(parts[:end])) in elements), "")
            sizes[block] += -(-rows // replicas) * replicas * prod(rest)
        outside = sizes.pop("", 0)
        return max(sizes.values(), default=0), sizes.total() + outside, outside

    def _held(self, stages: StagePlan, config: ParallelConfig, pp: int) -> list[_Parameter]:
        found: list[_Parameter] = []
        dtype = None if config.fully_sharded else DTYPES.get(config.precision)
        stays = None if dtype is None else keeps_fp32(self._inner, dtype)
        for name, parameter in self._named.items():
            if pp in stages.holders(name):
                half = stays is not None and parameter.is_floating_point() and not stays(name)
                kind = parameter.kind if isinstance(parameter, StandIn) else None
                shape, canonical = tuple(parameter.shape), self.plan.names.get(name, name)
                found.append(_Parameter(canonical, shape, parameter.dtype, half, parameter.requires_grad, kind))
        return found

    def _local_shape(self, name: str, shape: tuple[int, ...], shard: int) -> tuple[int, ...]:
        planned = self.plan.tensors.get(name)
        return shape if planned is None else planned.local_shape(shard)


def _rows(parameter: _Parameter, shape: tuple[int, ...], dp: int, replicas: int) -> int:
    """Return the elements of a replica's FSDP2 shard, in ``ceil(rows / replicas)`` rows; the last shards have fewer."""
    if not shape:
        raise ConfigError(
            f"zero.stage 2 and 3: FSDP2 does not support the scalar parameter {parameter.name}.\n  Use zero.stage 1."
        )
    rows = -(-shape[0] // replicas)
    return max(min(rows, shape[0] - rows * dp), 0) * prod(shape[1:])


class _Copies(NamedTuple):
    """The replicas of a mesh, which may share experts.

    Attributes:
        sharers: The number of replicas that share experts; 1: each replica holds all experts.
        cp, replicas: The numbers of ranks that hold the same weights, per replica and in all replicas.
    """

    sharers: int
    cp: int
    replicas: int

    @property
    def size(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.replicas // self.sharers

    def sharer(self, place: int | None) -> int:
        """Return the number of the rank's replica among its sharers. The first replica has the most experts."""
        return 0 if place is None else place // self.cp % self.sharers

    def copy(self, place: int) -> int:
        """Return the place among the ranks that hold the same experts."""
        return place // self.cp // self.sharers * self.cp + place % self.cp

    def owned(self, sizes: Sequence[int], spread: Sequence[bool], place: int | None) -> list[bool]:
        """Return for each parameter whether the rank at ``place`` owns it, with ZeRO-1.

        Args:
            spread: The flags of shared experts, whose owners are assigned separately.
            place: The place of a rank; None: the rank that owns the most elements.
        """
        owners, loads = [0] * len(sizes), {True: Counter[int](), False: Counter[int]()}
        for kind, ranks in ((False, self.replicas), (True, self.size)):
            theirs = [at for at, each in enumerate(spread) if each is kind]
            for at, owner in zip(theirs, assign([sizes[at] for at in theirs], ranks), strict=True):
                owners[at] = owner
                loads[kind][owner] += sizes[at]
        if place is None:
            places = [each for each in range(self.replicas) if self.sharer(each) == 0]
            place = max(places, key=lambda each: loads[False][each] + loads[True][self.copy(each)])
        mine = {False: place, True: self.copy(place)}
        return [owner == mine[kind] for owner, kind in zip(owners, spread, strict=True)]

"""Layouts: the sharding of the units of a tensor dim over the ranks of an axis.

A *unit* (an attention head, an ffn neuron, a vocabulary row) is on one rank and is never divided. A *layout* describes
the units along one dim of a stored tensor as consecutive blocks, each a run of equally wide units. GPT-2 stores
``q | k | v`` as three blocks of ``heads``; BLOOM stores one block of ``heads`` whose units are three head widths wide.

:meth:`Layout.ranges` returns the ``[start, stop)`` ranges of the stored dim that a rank holds. ``shard`` concatenates
these ranges, ``unshard`` writes them back, and a loader reads only them. No other module slices shards.

    >>> heads = even_shards(3, 2)                      # 3 heads over 2 ranks
    >>> heads
    ((0, 2), (2, 3))
    >>> Layout.of(dim=0, blocks=[Block("heads", 3, 4, heads)]).ranges(1)
    ((8, 12),)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

Range = tuple[int, int]
"""``[start, stop)``."""

UnitRanges = tuple[Range, ...]
"""The units ``[start, stop)`` of each rank of the axis."""


def even_shards(count: int, size: int) -> UnitRanges:
    """Shard ``count`` units evenly over ``size`` ranks. The first ranks may get one more; the last may get none."""
    each, extra = divmod(count, size)
    starts = [rank * each + min(rank, extra) for rank in range(size + 1)]
    return tuple((starts[rank], starts[rank + 1]) for rank in range(size))


def replica_rows(count: int, replica: int, replicas: int) -> Range:
    """Return the rows ``[start, stop)`` of a replica's shard of a DTensor; the last replicas may have fewer rows."""
    each = -(-count // replicas)
    return min(replica * each, count), min((replica + 1) * each, count)


def replicated_shards(count: int, size: int) -> UnitRanges:
    """Shard ``count`` units over more ranks than units: each rank holds one unit, and some ranks hold the same one.

    With ``count >= size`` this is :func:`even_shards`. With ``count=2, size=3`` ranks 0 and 1 hold unit 0, rank 2 unit
    1.
    """
    if count >= size or count == 0:
        return even_shards(count, size)
    ranges: list[Range] = []
    for unit, (start, stop) in enumerate(even_shards(size, count)):
        ranges += [(unit, unit + 1)] * (stop - start)
    return tuple(ranges)


def aligned_shards(count: int, leader_count: int, leaders: UnitRanges) -> UnitRanges:
    """Shard ``count`` units so that each unit is on a rank that holds its leader.

    Leader ``i`` owns units ``[i * n, (i + 1) * n)`` with ``n = count / leader_count`` (query heads and their KV head).
    Ranks that hold the same leader split its units among themselves. Raises ``ValueError`` if ``n`` is not an integer.
    """
    if leader_count == 0 or count % leader_count:
        raise ValueError(f"{count} units cannot follow {leader_count}: {count} / {leader_count} is not an integer")
    each = count // leader_count
    ranges: list[Range] = []
    for rank, (start, stop) in enumerate(leaders):
        holders = [r for r, held in enumerate(leaders) if held == (start, stop)]
        low, high = even_shards((stop - start) * each, len(holders))[holders.index(rank)]
        ranges.append((start * each + low, start * each + high))
    return tuple(ranges)


@dataclass(frozen=True)
class Block:
    """A run of ``count`` units of ``width`` elements, and the ``ranges`` of units that the ranks hold."""

    unit: str
    count: int
    width: int
    ranges: UnitRanges

    @property
    def size(self) -> int:
        """The number of elements along the dim."""
        return self.count * self.width

    @classmethod
    def alone(cls, unit: str, number: int, of: int, width: int, size: int) -> Block:
        """Return the block of a tensor that is one unit of several separate tensors, named ``unit 3 of 8``.

        Each unit is on the rank of ``size`` that would hold it in one tensor of all units.
        """
        ranges = tuple((0, int(start <= number < stop)) for start, stop in even_shards(of, size))
        return cls(f"{unit} {number} of {of}", 1, width, ranges)

    def over(self, size: int) -> Block:
        """Return the block over ``size`` ranks. With fewer units than ranks, several ranks hold the same unit."""
        named = re.fullmatch(r"(.*) (\d+) of (\d+)", self.unit)
        if named and self.count == 1:
            return Block.alone(named[1], int(named[2]), int(named[3]), self.width, size)
        return replace(self, ranges=replicated_shards(self.count, size))


@dataclass(frozen=True)
class Layout:
    """Consecutive blocks of units along ``dim`` of a stored tensor, and the ranks that hold them.

    Create it with :meth:`of`. ``dim`` is never negative. All sizes are in elements along ``dim``.
    """

    dim: int
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, dim: int, blocks: Sequence[Block]) -> Layout:
        """Make the layout of consecutive ``blocks`` along ``dim``. Raises ``ValueError`` if their axis sizes differ."""
        if len({len(block.ranges) for block in blocks}) != 1:
            raise ValueError("blocks of one layout must be sharded over the same axis")
        return cls(dim, tuple(blocks))

    @property
    def axis_size(self) -> int:
        """The number of ranks over which the units are sharded."""
        return len(self.blocks[0].ranges)

    @cached_property
    def size(self) -> int:
        """The number of elements along ``dim`` of the stored tensor."""
        return sum(block.size for block in self.blocks)

    @cached_property
    def _ranges(self) -> tuple[tuple[Range, ...], ...]:
        table: list[tuple[Range, ...]] = []
        for rank in range(self.axis_size):
            offset, ranges = 0, list[Range]()
            for block in self.blocks:
                start, stop = block.ranges[rank]
                low, high = offset + start * block.width, offset + stop * block.width
                if ranges and ranges[-1][1] == low:
                    ranges[-1] = (ranges[-1][0], high)  # touching ranges become one
                elif high > low:
                    ranges.append((low, high))
                offset += block.size
            table.append(tuple(ranges))
        return tuple(table)

    def repeated(self, times: int) -> Layout:
        """Return the layout over ``times * axis_size`` ranks, with all units on each run of ``axis_size`` ranks."""
        return Layout(self.dim, tuple(replace(block, ranges=block.ranges * times) for block in self.blocks))

    def of_first(self, ranks: int) -> Layout:
        """Return the layout over only the first ``ranks``; the inverse of :meth:`repeated`."""
        if ranks == self.axis_size:
            return self
        return Layout(self.dim, tuple(replace(block, ranges=block.ranges[:ranks]) for block in self.blocks))

    def in_steps(self, step: int) -> Layout:
        """Return the layout of entries of ``step`` elements. Raises ``ValueError`` if a rank holds half an entry."""
        if step == 1:
            return self
        blocks = []
        for block in self.blocks:
            ends = [end * block.width for end in (block.count, *(end for held in block.ranges for end in held))]
            if any(end % step for end in ends):
                raise ValueError(f"{block.count} {block.unit} of {block.width} cannot be sharded in steps of {step}")
            ranges = tuple((low * block.width // step, high * block.width // step) for low, high in block.ranges)
            blocks.append(Block(block.unit, block.size // step, 1, ranges))
        return Layout(self.dim, tuple(blocks))

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Return the ``[start, stop)`` ranges of the stored dim that ``rank`` holds, in the order of its shard."""
        return self._ranges[rank]

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the ranks that hold the same ranges, including itself."""
        found: dict[tuple[Range, ...], list[int]] = {}
        for rank, ranges in enumerate(self._ranges):
            found.setdefault(ranges, []).append(rank)
        shared = {ranges: tuple(ranks) for ranges, ranks in found.items()}
        return tuple(shared[ranges] for ranges in self._ranges)

    def local_size(self, rank: int) -> int:
        """Count the elements along ``dim`` on ``rank``."""
        return self._local_sizes[rank]

    @cached_property
    def _local_sizes(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self._ranges)

    @cached_property
    def replicated(self) -> bool:
        """Whether several ranks hold the same element (fewer KV heads than ranks)."""
        return sum(self._local_sizes) > self.size

    @cached_property
    def _owned(self) -> tuple[tuple[Range, ...], ...]:
        covered: list[Range] = []
        owned: list[tuple[Range, ...]] = []
        for rank in range(self.axis_size):
            mine: list[Range] = []
            for start, stop in self._ranges[rank]:
                pieces = [(start, stop)]
                for low, high in covered:
                    pieces = [
                        piece
                        for a, b in pieces
                        for piece in ((a, min(b, low)), (max(a, high), b))
                        if piece[0] < piece[1]
                    ]
                mine += pieces
            covered += mine
            owned.append(tuple(mine))
        return tuple(owned)

    def owned(self, rank: int) -> tuple[Range, ...]:
        """Return :meth:`ranges` without elements of lower ranks, so that each element is on exactly one rank."""
        return self._owned[rank]

    def owned_local(self, rank: int) -> tuple[Range, ...]:
        """Return :meth:`owned` in coordinates of the rank's shard."""
        result: list[Range] = []
        offset = 0
        for start, stop in self._ranges[rank]:
            for low, high in self._owned[rank]:
                a, b = max(start, low), min(stop, high)
                if a < b:
                    result.append((offset + a - start, offset + b - start))
            offset += stop - start
        return tuple(result)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of the shard that ``rank`` holds of a stored tensor of ``shape``."""
        return (*shape[: self.dim], self.local_size(rank), *shape[self.dim + 1 :])

    def shard(self, tensor: torch.Tensor, rank: int, dim: int | None = None) -> torch.Tensor:
        """Copy the shard of ``rank`` from the stored tensor into a new contiguous tensor.

        ``dim`` overrides the layout's dim, for activations. Raises ``ValueError`` if ``tensor`` does not have the
        layout's size along it.
        """
        dim = self.dim if dim is None else dim
        if tensor.shape[dim] != self.size:
            raise ValueError(f"dim {dim} must have {self.size} elements, as in the layout; got {tensor.shape[dim]}")
        pieces = [tensor.narrow(dim, start, stop - start) for start, stop in self._ranges[rank]]
        if not pieces:
            return tensor.narrow(dim, 0, 0).clone(memory_format=torch.contiguous_format)
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(pieces, dim)

    def write(self, full: torch.Tensor, shard: torch.Tensor, rank: int, dim: int | None = None) -> None:
        """Write the shard of ``rank`` into its place in ``full``. Raises ``ValueError`` for another size."""
        dim = self.dim if dim is None else dim
        if shard.shape[dim] != self.local_size(rank):
            raise ValueError(
                f"the shard of rank {rank} must have {self.local_size(rank)} elements along dim {dim}; "
                f"got {shard.shape[dim]}"
            )
        offset = 0
        for start, stop in self._ranges[rank]:
            full.narrow(dim, start, stop - start).copy_(shard.narrow(dim, offset, stop - start))
            offset += stop - start

    def unshard(self, shards: Sequence[torch.Tensor], dim: int | None = None) -> torch.Tensor:
        """Assemble the stored tensor from the shards of all ranks, in rank order; the inverse of :meth:`shard`."""
        dim = self.dim if dim is None else dim
        if len(shards) != self.axis_size:
            raise ValueError(f"{len(shards)} shards for an axis of size {self.axis_size}")
        shape = list(shards[0].shape)
        shape[dim] = self.size
        full = torch.empty(shape, dtype=shards[0].dtype, device=shards[0].device)
        for rank in reversed(range(self.axis_size)):  # for an element on several ranks, the lowest rank's value is kept
            self.write(full, shards[rank], rank, dim)
        return full

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain data, for manifests."""
        return {
            "dim": self.dim,
            "blocks": [
                {"unit": b.unit, "count": b.count, "width": b.width, "shares": [list(held) for held in b.ranges]}
                for b in self.blocks
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """Reverse :meth:`to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on malformed data."""
        blocks = []
        for b in data["blocks"]:
            ranges = tuple((int(start), int(stop)) for start, stop in b["shares"])
            count, width = int(b["count"]), int(b["width"])
            if count < 0 or width < 0 or any(not 0 <= start <= stop <= count for start, stop in ranges):
                raise ValueError(f"block {b} holds units outside [0, {count})")
            blocks.append(Block(str(b["unit"]), count, width, ranges))
        return cls.of(int(data["dim"]), blocks)


@lru_cache(maxsize=4096)
def rows_layout(length: int, ranks: int, *, zigzag: bool = False) -> Layout | None:
    """Return the layout of a sequence of ``length`` along dim 1; None if it is too short to be sharded.

    Each rank has at least two positions, because models treat a single query as a decoding step, which is not causal.

    Args:
        zigzag: True to give each rank two runs of positions, one from each end, which balances the work under a causal
            mask (Llama 3, arXiv 2407.21783, section 3.3.2). False for one run.

    >>> rows_layout(8, 2).ranges(1), rows_layout(8, 2, zigzag=True).ranges(1)
    (((4, 8),), ((2, 6),))
    """
    if length < 2 * ranks:
        return None
    back = length // 2 if zigzag else 0
    runs = [Block("row", length - back, 1, even_shards(length - back, ranks))]
    if zigzag:
        runs.append(Block("row", back, 1, tuple(reversed(even_shards(back, ranks)))))
    return Layout.of(1, runs)

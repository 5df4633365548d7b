"""What one forward keeps and does, unit by unit: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.planner.collective_calls import Collective
from autopar.planner.storages import Operation

__all__ = ["ForwardCount", "Unit"]


@dataclass(frozen=True)
class Unit:
    """What one block, or what lies before or behind the blocks, keeps and does.

    Attributes:
        saved: number of a storage -> its bytes: what autograd keeps.
        arguments: the same of what the block was called with: all that is kept of a block that is recomputed.
        output: bytes of what it returns.
        forward_peak, backward_peak: the most bytes beside ``saved`` while it runs forward, and backward.
        operations: of the forward.
        collectives: over tp, of forward and backward.
        recomputed: whether activation checkpointing recomputes it.
    """

    saved: dict[int, int] = field(default_factory=dict)
    arguments: dict[int, int] = field(default_factory=dict)
    output: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    operations: Sequence[Operation] = ()
    collectives: Sequence[Collective] = ()
    recomputed: bool = False


@dataclass
class ForwardCount:
    """One forward of one tp rank's shard, with what its loss keeps.

    Attributes:
        elements: :class:`Unit` of each element of the stage plan that was called, by its place.
        before, after: what runs before the first element and between them, and behind the last one: the head, the loss.
        has_loss: whether the model made a loss of the labels.
    """

    elements: dict[int, Unit]
    before: Unit
    after: Unit
    has_loss: bool

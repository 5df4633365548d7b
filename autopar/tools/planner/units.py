"""Memory and work of one forward, unit by unit: plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.tools.planner.collective_calls import Collective
from autopar.tools.planner.storages import Operation

__all__ = ["ForwardCount", "Unit"]


@dataclass(frozen=True)
class Unit:
    """Memory and work of one block, or of the modules before, between or behind the blocks.

    Attributes:
        saved: number of a storage -> its bytes: what autograd keeps.
        late: what is left of that, where the gradient of its input has been computed and those of its weights have not;
            None: it has no weights, or both are computed at once (``halves``).
        halves: whether the two can be computed one after the other.
        gradients: bytes of those that wait between them.
        arguments: as ``saved``, what the block was called with: all that is kept of a block that is recomputed.
        outputs: as ``saved``, what it returns.
        forward_peak, backward_peak: the most bytes beside ``saved`` while it runs forward, and backward.
        operations: of the forward.
        collectives: over tp, of forward and backward.
        recomputed: whether activation checkpointing recomputes it.
    """

    saved: Mapping[int, int] = field(default_factory=dict)
    late: Mapping[int, int] | None = None
    halves: bool = True
    gradients: int = 0
    arguments: Mapping[int, int] = field(default_factory=dict)
    outputs: Mapping[int, int] = field(default_factory=dict)
    forward_peak: int = 0
    backward_peak: int = 0
    operations: Sequence[Operation] = ()
    collectives: Sequence[Collective] = ()
    recomputed: bool = False

    @property
    def output(self) -> int:
        """Bytes of what it returns."""
        return sum(self.outputs.values())

    def followed_by(self, other: Unit) -> Unit:
        """Return both as one."""
        late = self.late if other.late is None else {**self.saved, **other.late}
        return Unit(
            {**self.saved, **other.saved},
            late,
            self.halves and other.halves,
            self.gradients + other.gradients,
            {**self.arguments, **other.arguments},
            other.outputs,
            max(self.forward_peak, other.forward_peak),
            max(self.backward_peak, other.backward_peak),
            [*self.operations, *other.operations],
            [*self.collectives, *other.collectives],
            self.recomputed and other.recomputed,
        )

    def renumbered(self, numbers: Mapping[int, int]) -> Unit:
        """Return the same of other storages: ``numbers`` are their new ones."""

        def renamed(sizes: Mapping[int, int]) -> dict[int, int]:
            return {numbers.get(number, number): size for number, size in sizes.items()}

        late = None if self.late is None else renamed(self.late)
        return replace(
            self,
            saved=renamed(self.saved),
            late=late,
            arguments=renamed(self.arguments),
            outputs=renamed(self.outputs),
        )


@dataclass
class ForwardCount:
    """One forward of one tp rank's shard, with what its loss keeps.

    Attributes:
        elements: :class:`Unit` of each element of the stage plan that was called, by its place; of an encoder, what it
            does behind its blocks.
        before, after: what runs before the first element, and behind the last one: the head, the loss.
        fronts: what runs in front of other elements, behind the one before.
        encoder: place of the encoder, whose output all later stages get.
        has_loss: whether the model made a loss of the labels.
    """

    elements: dict[int, Unit]
    before: Unit
    after: Unit
    has_loss: bool
    fronts: dict[int, Unit] = field(default_factory=dict)
    encoder: int | None = None

    def units(self) -> list[Unit]:
        """Return all units in the order of the forward."""
        return self.of_stage(range(max(self.elements, default=-1) + 1), first=True, last=True)

    def of_stage(self, places: Sequence[int], *, first: bool, last: bool) -> list[Unit]:
        """Return the units of a stage with these elements, in the order of the forward."""
        row = [self.before] if first else []
        for place in places:
            row += [units[place] for units in (self.fronts, self.elements) if place in units]
        return [*row, self.after] if last else row

    def sent(self, places: Sequence[int]) -> dict[int, int]:
        """Return what a stage that ends with these elements sends on: number of a storage -> its bytes."""
        called = [place for place in places if place in self.elements]
        found = dict(self.elements[called[-1]].outputs) if called else {}
        if self.encoder is not None and self.encoder in self.elements and places and self.encoder <= places[-1]:
            found.update(self.elements[self.encoder].outputs)
        return found

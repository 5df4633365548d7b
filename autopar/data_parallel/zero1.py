"""ZeRO-1: each data-parallel rank keeps the optimizer's state of some parameters, and broadcasts their updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.data_parallel.grad_sync import flattened
from autopar.distributed.axis import Axis
from autopar.errors import ConfigError


class OwnedParameters:
    """The parameters of an optimizer, each with the replica that owns it: keeps its state and its fp32 weight.

    Args:
        axis: the ranks over which ownership of a parameter is distributed, by its name: those that hold the same.
        sharded: False: every replica owns every parameter.

    Attributes:
        names: parameter -> name in the model.
    """

    def __init__(self, optimizer: Any, model: nn.Module, axis: Callable[[str], Axis], *, sharded: bool) -> None:
        self.optimizer, self.model, self._axis = optimizer, model, axis
        self.sharded = sharded
        self.names: dict[torch.Tensor, str] = {}
        self._owners: dict[torch.Tensor, int] = {}
        self._loads: dict[tuple[Axis, bool], list[int]] = {}
        self.update()

    def update(self) -> None:
        """Assign an owner to parameters that have none: all at first, later those of a new group."""
        new = [p for group in self.optimizer.param_groups for p in group["params"] if p not in self._owners]
        if not new:
            return
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter in new:
            if parameter not in names:
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)} in {type(self.optimizer).__name__} is not one of "
                    f"{type(self.model).__name__}: was it made or replaced after autopar.initialize?"
                )
        self.names.update((parameter, names[parameter]) for parameter in new)
        for trained in (True, False):  # those that are frozen, which have no state, by themselves: they may thaw
            for axis, theirs in self._by_axis(p for p in new if p.requires_grad is trained).items():
                loads = self._loads.setdefault((axis, trained), [0] * axis.size)
                sizes = [self.size_of(parameter, self.names[parameter]) for parameter in theirs]
                for parameter, size, owner in zip(theirs, sizes, assign(sizes, axis.size, loads), strict=True):
                    self._owners[parameter] = owner
                    loads[owner] += size

    def axis_of(self, parameter: torch.Tensor) -> Axis:
        """Return the ranks that hold the same of a parameter."""
        return self._axis(self.names[parameter])

    def _by_axis(self, parameters: Iterable[torch.Tensor]) -> dict[Axis, list[torch.Tensor]]:
        found: dict[Axis, list[torch.Tensor]] = {}
        for parameter in parameters:
            found.setdefault(self.axis_of(parameter), []).append(parameter)
        return found

    def size_of(self, parameter: torch.Tensor, name: str) -> int:
        """Return by how many elements an owner is loaded."""
        return parameter.numel()

    def owner(self, parameter: torch.Tensor) -> int | None:
        """Return the rank of its axis that owns ``parameter``; None if every replica does (no ZeRO-1)."""
        if parameter not in self._owners:  # of a group that was added since the last step
            self.update()
        return self._owners[parameter] if self.sharded and self.axis_of(parameter).size > 1 else None

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank owns ``parameter``."""
        return self.owner(parameter) in (None, self.axis_of(parameter).rank)

    def broadcast(self) -> None:
        """Broadcast each parameter that is trained from its owner, in place. A collective of each axis."""
        if self.sharded:
            for axis, theirs in self._by_axis(p for p in self._owners if p.requires_grad).items():
                if axis.size > 1:
                    broadcast_from_owners([p.data for p in theirs], [self._owners[p] for p in theirs], axis)


def assign(sizes: Sequence[int], ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """Assign an owner, a rank in ``[0, ranks)``, to each of ``sizes`` elements: largest first, to the least loaded.

    Deterministic: of equal sizes the first one comes first, of equally loaded ranks the lowest is taken. No rank gets
    more than the mean load plus the largest size.

    Args:
        loads: what the ranks own already.

    >>> assign([4, 1, 3, 2], 2)
    [0, 0, 1, 1]
    """
    owned = list(loads) or [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = owned.index(min(owned))
        owned[owners[index]] += sizes[index]
    return owners


@torch.no_grad()
def broadcast_from_owners(tensors: Sequence[torch.Tensor], owners: Sequence[int], axis: Axis) -> None:
    """Broadcast each tensor from its owner over ``axis``, in place. Every rank passes the same list.

    All tensors of one dtype that one rank owns travel flat, in pieces of at most 32 MiB (or one tensor).
    """
    if axis.size == 1:
        return
    kinds = {(owner, t.dtype, t.device): None for owner, t in zip(owners, tensors, strict=True)}
    for owner, dtype, device in kinds:
        mine = [t for o, t in zip(owners, tensors, strict=True) if (o, t.dtype, t.device) == (owner, dtype, device)]
        for flat in flattened(mine):
            dist.broadcast(flat, src=axis.ranks[owner], group=axis.group)

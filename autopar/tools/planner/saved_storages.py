"""Collect what autograd saves on the meta device: each storage once, no weights, while its graph lives."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from autopar.foreign.autograd import next_sequence_number
from autopar.tensor_tracking import storage_key
from autopar.tools.planner.storages import Storages

__all__ = ["Entry", "SavedStorages", "alive"]


class _Saved:
    """A tensor that waits for the backward; it dies with the last node that saved it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Entry(NamedTuple):
    """One tensor that a node of autograd's graph has saved.

    Attributes:
        number: of its storage; ``bytes``: of the whole of it.
        node: sequence number of the node.
    """

    saved: weakref.ref[_Saved]
    number: int
    bytes: int
    node: int


class SavedStorages:
    """The hooks of :class:`torch.autograd.graph.saved_tensors_hooks`, and what they see.

    Args:
        weights: storages that are not counted.
    """

    def __init__(self, storages: Storages, weights: Iterable[torch.Tensor]) -> None:
        self._storages = storages
        self._weights = {storage_key(tensor) for tensor in weights}
        self._entered: dict[int, int] = {}  # a copy of an argument -> the argument
        self._entries: list[Entry] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        """Note a tensor that is saved."""
        if self.is_weight(tensor) or not tensor.is_meta:
            return tensor
        saved = _Saved(tensor)
        node = next_sequence_number() - 1  # the node was made last
        entry = Entry(weakref.ref(saved), self.number(tensor), self._storages.bytes(tensor), node)
        self._entries.append(entry)
        return saved

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        """Return what was saved."""
        tensor: torch.Tensor = saved.tensor if isinstance(saved, _Saved) else saved
        return tensor

    def take(self) -> list[Entry]:
        """Return what was saved since the last call."""
        entries, self._entries = self._entries, []
        return entries

    def put(self, entries: list[Entry]) -> None:
        """Go on behind entries that were taken."""
        self._entries = [*entries, *self._entries]

    def enter(self, inside: torch.Tensor, argument: torch.Tensor) -> None:
        """Let a copy of an argument count as the argument."""
        self._entered[self._storages.number(inside)] = self.number(argument)

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a storage; of a copy, that of the argument."""
        number = self._storages.number(tensor)
        return self._entered.get(number, number)

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight, or a view of one."""
        return storage_key(tensor) in self._weights

    def numbered(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Return number and bytes of each storage among tensors that are no weights."""
        return {self.number(x): self._storages.bytes(x) for x in tensors if x.is_meta and not self.is_weight(x)}


def alive(entries: Iterable[Entry], freed: Collection[int] = ()) -> dict[int, int]:
    """Return number and bytes of the storages that are still saved, by other nodes than those that are ``freed``."""
    return dict(_alive(entries, freed))


def _alive(entries: Iterable[Entry], freed: Collection[int]) -> Iterator[tuple[int, int]]:
    for entry in entries:
        if entry.saved() is not None and entry.node not in freed:
            yield entry.number, entry.bytes

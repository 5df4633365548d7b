"""Components of numbered features: which of them a forward computes with one another (union and find, by arrays)."""

from __future__ import annotations

import torch

__all__ = ["Components", "unique_pairs"]


def unique_pairs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the different pairs of numbers at the same places of two tensors (that broadcast): ``[pairs, 2]``."""
    one, other = torch.broadcast_tensors(one, other)
    for dim in range(one.ndim):
        if one.shape[dim] > 1 and one.stride(dim) == 0 == other.stride(dim):
            one, other = one.narrow(dim, 0, 1), other.narrow(dim, 0, 1)
    a, b = one.reshape(-1).long(), other.reshape(-1).long()
    size = int(b.max()) + 1 if len(b) else 1
    keys = (a * size + b).unique()
    return torch.stack([keys // size, keys % size], 1)


class Components:
    """Features, numbered from 1, and which of them belong together. 0 is no feature.

    Arguments and results are integer tensors of any shape.
    """

    def __init__(self) -> None:
        self._root = torch.zeros(1, dtype=torch.int32)

    @property
    def count(self) -> int:
        """The number that the next feature gets."""
        return len(self._root)

    def new(self, count: int) -> int:
        """Make ``count`` features, each a component of its own; returns the number of the first."""
        first = len(self._root)
        self._root = torch.cat([self._root, torch.arange(first, first + count, dtype=torch.int32)])
        return first

    def of(self, features: torch.Tensor) -> torch.Tensor:
        """Return the component of each feature: the smallest number in it."""
        return self._root.index_select(0, features.reshape(-1)).reshape(features.shape)

    def join(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Put features at the same places of two tensors (that broadcast) into the same component, but for zeros."""
        one, other = torch.broadcast_tensors(self.of(one), self.of(other))
        differ = (one != other) & (one != 0) & (other != 0)
        if not differ.any():
            return
        pairs = unique_pairs(one[differ], other[differ])
        for left, right in pairs.tolist():
            a, b = self._find(left), self._find(right)
            if a != b:
                self._root[max(a, b)] = min(a, b)
        while True:
            flat = self.of(self._root)
            if torch.equal(flat, self._root):
                return
            self._root = flat

    def join_along(self, features: torch.Tensor, dims: list[int]) -> torch.Tensor:
        """Put all that lies along ``dims`` together; returns the component of each, with these dims 1 long."""
        found = self.of(features)
        dims = sorted(dim % found.ndim for dim in dims)
        if found.numel() == 0 or not dims:
            return found
        kept = [dim for dim in range(found.ndim) if dim not in dims]
        rows = found.permute(*kept, *dims).reshape(*(found.shape[dim] for dim in kept), -1)
        largest = rows.amax(-1, keepdim=True)
        self.join(rows, largest)
        shape = [1 if dim in dims else size for dim, size in enumerate(found.shape)]
        return self.of(largest).reshape(shape)

    def _find(self, feature: int) -> int:
        while (above := int(self._root[feature])) != feature:
            feature = above
        return feature

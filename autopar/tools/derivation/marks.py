"""Marks: what is known of a forward's tensors; the components of their features; and the events of a search.

Components say which numbered features a forward computes with one another (union and find, by arrays).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.dry_run.operators import ValuelessTracking


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
    """Features, numbered from 1, and which of them belong together. 0 stands for none.

    Arguments and results are integer tensors of any shape.

    Attributes:
        version: counts the changes of components.
    """

    def __init__(self) -> None:
        self._root = torch.zeros(1, dtype=torch.int32)
        self.version = 0

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
        self.version += 1
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


CONSTANT, INPUT, PARAMETER, ACTIVATION, INSIDE = range(5)
"""Kinds: of no gradient; the model's inputs; of parameters alone; replicated with a gradient; inside of a region."""


@dataclass(frozen=True)
class Mark:
    """Facts about a tensor.

    Attributes:
        features: the number of each element, 0 for none; of the tensor's shape. None: no element has one.
        producers: paths of the layers that it comes from, if it is an activation.
        places: parameter -> for each of its dims the index of each element; of the tensor's shape.
        fresh: nothing but moves and scaling happened since the layer that numbered the features.
        partial: the sum over ranks is still to come (behind a bare parameter).
        version: of the components when ``features`` were components, and not any of their features.
    """

    kind: int
    features: torch.Tensor | None = None
    producers: frozenset[str] = frozenset()
    places: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    fresh: bool = False
    partial: bool = False
    version: int = -1


@dataclass(frozen=True)
class Meeting:
    """A replicated activation met what is inside of a region.

    Attributes:
        features: some of what is inside, if they are numbered; ``before``: all that were numbered by then are below.
    """

    producers: frozenset[str]
    features: torch.Tensor
    where: str
    before: int


@dataclass(frozen=True)
class Spoiled:
    """Features that cannot be sharded, and why; ``before``: all that were numbered by then are below."""

    why: str
    features: torch.Tensor
    before: int


def places_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return for each dim the index of each element, without memory for them."""
    shape = parameter.shape
    return [
        torch.arange(size, dtype=torch.int32).reshape([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        for dim, size in enumerate(shape)
    ]


class MarkedTensors(ValuelessTracking):
    """A dispatch mode that gives each tensor its mark.

    Attributes:
        components: of all numbered features.
        suspended: above 0 nothing is tracked (inside of layers, which give their outputs marks by themselves).
        stack: paths of the modules that run.
        touched: parameter -> for each dim pairs of index and feature that were computed with one another.
        inside: parameters that work inside of a region; ``near``: a feature that each was computed with.
        once: parameters that are added to partial sums.
        operator: name of the operator that is followed; empty in a layer or norm that is taken as one.
        bare_source: asked whether a product with this parameter may number features.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.components = Components()
        self.suspended = 0
        self.stack: list[str] = []
        self.touched: dict[str, list[list[torch.Tensor]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.inside: set[str] = set()
        self.near: dict[str, int] = {}
        self.once: set[str] = set()
        self.events: list[Meeting | Spoiled] = []
        self.first_of: dict[str, int] = {}
        self.count_of: dict[str, int] = {}
        self.bare_sources: set[str] = set()
        self.bare_sinks: dict[str, torch.Tensor] = {}  # and the features that each sums over
        self.operator = ""
        self._names = names
        self._marks = WeakTensorKeyDictionary()

    def mark_of(self, tensor: torch.Tensor) -> Mark | None:
        """Return the mark of a tensor; of a parameter that nobody asked for yet, a new one."""
        known = self._marks.get(tensor)
        if known is None and (name := self._names.get(id(tensor))) is not None:
            known = Mark(PARAMETER, places={name: places_of(tensor)})
            self.shapes[name] = tuple(tensor.shape)
            self._marks[tensor] = known
        return known

    def set_mark(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Give a tensor a mark."""
        self._marks[tensor] = mark

    def number(self, source: str, count: int) -> int:
        """Number the features of a layer or bare parameter, once; returns the first number."""
        if source not in self.first_of:
            self.first_of[source], self.count_of[source] = self.components.new(count), count
        return self.first_of[source]

    def touch(self, name: str, dim: int, index: torch.Tensor, features: torch.Tensor) -> None:
        """Note that a parameter was computed with features: its places along ``dim``, and -1 for none."""
        pairs = unique_pairs(index + 1, features)
        pairs = pairs[(pairs[:, 0] != 0) & (pairs[:, 1] != 0)]
        pairs[:, 0] -= 1
        listed = self.touched.setdefault(name, [])
        while len(listed) <= dim:
            listed.append([])
        listed[dim].append(pairs)
        if len(pairs):
            self.near[name] = int(pairs[0, 1])
        self.inside.add(name)

    def meet(self, producers: frozenset[str], others: list[Mark]) -> None:
        """Note that a replicated activation meets what is inside."""
        some = next((m.features for m in others if m.features is not None), None)
        found = torch.zeros(0, dtype=torch.int32) if some is None else some[some != 0].unique()
        self.events.append(Meeting(producers, found, self.stack[-1] if self.stack else "", self.components.count))

    def spoil(self, why: str, features: torch.Tensor) -> None:
        """Note features that cannot be sharded."""
        self.events.append(Spoiled(why, features[features != 0].unique(), self.components.count))

    def features_of(self, tensor: Any) -> torch.Tensor | None:
        """Return the components of a tensor's elements; None if no element has one."""
        mark = self.mark_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if mark is None or mark.features is None:
            return None
        if mark.version != self.components.version:
            mark = replace(mark, features=self.components.of(mark.features), version=self.components.version)
            self._marks[tensor] = mark
        return mark.features

    def mark(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Give what an operator has made its mark; integers and whole tensors have no features."""
        if not tensor.is_floating_point() and not tensor.is_complex():
            mark = Mark(INPUT if mark.kind != CONSTANT else CONSTANT)
        elif mark.kind != INSIDE and mark.features is not None:
            mark = replace(mark, features=None)
        self._marks[tensor] = mark

    def write_into(self, whole: torch.Tensor, view: torch.Tensor, mark: Mark) -> None:
        """Give a tensor of which a part was written to the numbers of what was written."""
        known = self._marks.get(whole)
        if known is not None and known.features is not None:
            features = known.features.clone(memory_format=torch.contiguous_format)  # other tensors may have them too
        else:
            features = torch.zeros(whole.shape, dtype=torch.int32)
        if features.stride() == whole.stride() and mark.features is not None:
            features.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(mark.features)
            self._marks[whole] = replace(mark, features=features, fresh=False)

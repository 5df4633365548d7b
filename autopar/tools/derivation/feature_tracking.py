"""Track individual features of layers through a forward, to find the features that are computed together.

A column candidate numbers its output features. An operator that moves elements (a view, a slice, a concatenation) moves
the numbers. An operator that combines features joins them in one component: a product of queries and keys joins the
features of a head, and a softmax or mean joins all features of its dim. A layer with numbered input features may be a
row: its sum over ranks ends the region. At the end, the components are the units.

Each tensor has a *mark*: its kind (:data:`CONSTANT` to :data:`INSIDE`) and the numbers of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.compat.tensors import base_of, schema_of, tree_leaves, tree_map
from autopar.dry_run.operators import CONSTANT as FILLED, EMPTY, ValuelessTracking, name_of, reduced_dims
from autopar.tensor_tracking import tensors_in

RANDOM = frozenset(("rand_like", "randn_like"))
SHAPE_ONLY = FILLED | EMPTY | RANDOM
"""Operators whose result depends only on the shape of the argument."""

MOVES = frozenset({
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "expand", "slice", "select"),
    *("unsqueeze", "squeeze", "split", "split_with_sizes", "chunk", "unbind", "clone", "contiguous", "detach", "alias"),
    *("_to_copy", "repeat", "roll", "flip", "cat", "stack", "unfold", "as_strided", "constant_pad_nd", "index_select"),
    *("index", "gather", "repeat_interleave", "lift_fresh", "diagonal", "copy", "copy_", "embedding", "movedim"),
    *("slice_scatter", "select_scatter", "tril", "triu", "view_as_real", "view_as_complex", "index_put", "index_put_"),
    *("pixel_shuffle", "pixel_unshuffle", "scatter", "take_along_dim", "split_copy", "expand_copy", "narrow"),
    *("_adaptive_avg_pool2d", "im2col", "avg_pool1d", "avg_pool2d"),
})  # fmt: skip
"""Operators that move, drop or keep elements. Pooling averages neighbors, and keeps their order."""


def unique_pairs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the distinct pairs of numbers at the same index of two broadcast tensors: ``[pairs, 2]``."""
    one, other = torch.broadcast_tensors(one, other)
    a, b = one.reshape(-1).long(), other.reshape(-1).long()
    size = int(b.max()) + 1 if len(b) else 1
    keys = (a * size + b).unique()
    return torch.stack([keys // size, keys % size], 1)


class Components:
    """A union-find of features in components. Features are numbered from 1; 0 means no feature.

    Arguments and results are integer tensors of any shape. ``version`` counts the changes.
    """

    def __init__(self) -> None:
        self._root = torch.zeros(1, dtype=torch.int32)
        self.version = 0

    @property
    def count(self) -> int:
        """The number of the next feature."""
        return len(self._root)

    def new(self, count: int) -> int:
        """Create ``count`` features in separate components, and return the number of the first feature."""
        first = len(self._root)
        self._root = torch.cat([self._root, torch.arange(first, first + count, dtype=torch.int32)])
        return first

    def of(self, features: torch.Tensor) -> torch.Tensor:
        """Return the component of each feature, which is its smallest number."""
        return self._root.index_select(0, features.reshape(-1)).reshape(features.shape)

    def join(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Join the features at the same index of two broadcast tensors. Zeros are skipped."""
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
        """Join all features along ``dims``, and return their components with size 1 in these dims."""
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
"""Kinds: without gradient, model input, computed only from parameters, replicated with gradient, inside a region."""


@dataclass(frozen=True)
class Mark:
    """Facts about a tensor.

    Attributes:
        features: The feature number of each element (0: no feature), in the tensor's shape; None: no features.
        producers: The paths of the layers that computed an activation.
        places: Parameter -> for each dim the index of each element, in the tensor's shape.
        fresh: A flag, set if only moves and scaling follow the layer that numbered the features.
        partial: A flag, set if the tensor is a partial sum (after a product with a bare parameter).
        version: The ``Components.version`` of ``features``.
    """

    kind: int
    features: torch.Tensor | None = None
    producers: frozenset[str] = frozenset()
    places: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    fresh: bool = False
    partial: bool = False
    version: int = -1


@dataclass(frozen=True)
class Event:
    """Features that cannot be sharded.

    Attributes:
        features: The features inside the region; may be empty.
        before: The first free number at this time.
        producers: The layers of the replicated activation that was combined with the features.
        where: The path of the module that combined them.
    """

    features: torch.Tensor
    before: int
    producers: frozenset[str] = frozenset()
    where: str = ""


def places_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the index of each element along each dim, as expanded views."""
    shape = parameter.shape
    return [
        torch.arange(size, dtype=torch.int32).reshape([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        for dim, size in enumerate(shape)
    ]


_FORMS = ("dtype", "device", "layout", "pin_memory", "memory_format")
_LINEAR = {"mul", "div", "add", "sub", "mul_", "div_", "add_", "_to_copy", "clone", "neg"}


class FeatureTracking(ValuelessTracking):
    """A dispatch mode that assigns a mark to each tensor.

    Args:
        sources: The parameters that may number features in products.
        record: A callback after each operator. It gets the tracking, the operator, its arguments and its outputs.

    Attributes:
        suspended: The depth of layers. Above 0 operators are not tracked, because hooks mark the layer's outputs.
        stack: The paths of the running modules.
        touched: Parameter -> for each dim, pairs of an index and a feature that are computed together.
        inside: The parameters that are used inside a region.
        near: Parameter -> a feature that it is computed with.
        once: The parameters that are added to partial sums.
        bare_sinks: Parameter -> the features that a product with it sums over.
    """

    def __init__(self, names: dict[int, str], sources: set[str], record: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.components = Components()
        self.suspended = 0
        self.stack: list[str] = []
        self.touched: dict[str, list[list[torch.Tensor]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.inside: set[str] = set()
        self.near: dict[str, int] = {}
        self.once: set[str] = set()
        self.events: list[Event] = []
        self.first_of: dict[str, int] = {}
        self.count_of: dict[str, int] = {}
        self.bare_sources: set[str] = set()
        self.bare_sinks: dict[str, torch.Tensor] = {}
        self._names, self._sources, self._record = names, sources, record
        self.marks = WeakTensorKeyDictionary()

    def mark_of(self, tensor: torch.Tensor) -> Mark | None:
        """Return the mark of a tensor, or None. A parameter gets a new mark."""
        known = self.marks.get(tensor)
        if known is None and (name := self._names.get(id(tensor))) is not None:
            known = Mark(PARAMETER, places={name: places_of(tensor)})
            self.shapes[name] = tuple(tensor.shape)
            self.marks[tensor] = known
        return known

    def number(self, source: str, count: int) -> int:
        """Number the features of a layer or bare parameter on first use. Return the first number."""
        if source not in self.first_of:
            self.first_of[source], self.count_of[source] = self.components.new(count), count
        return self.first_of[source]

    def touch(self, name: str, dim: int, index: torch.Tensor, features: torch.Tensor) -> None:
        """Record that a parameter is computed with features, at ``index`` along ``dim`` (-1: no index)."""
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

    def spoil(self, features: torch.Tensor, producers: frozenset[str] = frozenset(), where: str = "") -> None:
        """Record features that cannot be sharded."""
        self.events.append(Event(features[features != 0].unique(), self.components.count, producers, where))

    def features_of(self, tensor: Any) -> torch.Tensor | None:
        """Return the components of a tensor's elements, or None."""
        mark = self.mark_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if mark is None or mark.features is None:
            return None
        if mark.version != self.components.version:
            mark = replace(mark, features=self.components.of(mark.features), version=self.components.version)
            self.marks[tensor] = mark
        return mark.features

    def mark(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Set the mark of an operator's output. Integers have no features."""
        if not tensor.is_floating_point() and not tensor.is_complex():
            mark = Mark(INPUT if mark.kind != CONSTANT else CONSTANT)
        self.marks[tensor] = mark

    def write_into(self, full: torch.Tensor, view: torch.Tensor, mark: Mark) -> None:
        """Copy the features of a view into the mark of its base tensor."""
        known = self.marks.get(full)
        if known is not None and known.features is not None:
            features = known.features.clone(memory_format=torch.contiguous_format)  # other marks may share them
        else:
            features = torch.zeros(full.shape, dtype=torch.int32)
        if features.stride() == full.stride() and mark.features is not None:
            features.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(mark.features)
            self.marks[full] = replace(mark, features=features, fresh=False)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.suspended or name_of(func) in SHAPE_ONLY:
            return
        with torch.device("cpu"):  # forwards of other libraries run with torch.device("meta")
            self._follow(func, args, kwargs, result)
        if self._record is not None:
            self._record(self, func, args, [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)])

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        marks = [mark for x in tensors_in((args, kwargs)) if (mark := self.mark_of(x)) is not None]
        if not marks:
            return
        kind = max(mark.kind for mark in marks)
        acts = [m for m in marks if m.kind == ACTIVATION]
        producers = frozenset().union(*(m.producers for m in marks))
        if kind == INSIDE and acts:
            inside = (m.features for m in marks if m.kind == INSIDE and m.features is not None)
            met = next(inside, torch.zeros(0, dtype=torch.int32))
            self.spoil(met, frozenset().union(*(m.producers for m in acts)), self.stack[-1] if self.stack else "")
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        base = Mark(kind, None, producers, partial=any(m.partial for m in marks))
        numbered = any(m.features is not None for m in marks)
        if kind == INSIDE and not numbered:
            for mark in marks:
                self.inside.update(mark.places)
                if base.partial and name_of(func) in ("add", "add_"):
                    self.once.update(mark.places)
        if not numbered and not any(m.places for m in marks):
            for output in outputs:
                self.mark(output, base)
            return
        for output, made in zip(outputs, self._marks_of(func, args, kwargs, outputs, base), strict=True):
            self.mark(output, made)
            if schema_of(func).is_mutable and base_of(output) is not None and made.features is not None:
                self.write_into(base_of(output), output, made)

    def _marks_of(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], base: Mark
    ) -> list[Mark]:
        name = name_of(func)
        if name in MOVES:
            return self._moved(func, args, kwargs, outputs, base)
        if name.startswith("upsample_"):
            return [self._resized(args[0], outputs[0], base)]
        if name == "convolution" and (made := self._per_channel(args, outputs[0], base)) is not None:
            return [made]
        if name in ("mm", "bmm"):
            return [self._product(args[0], args[1], None, outputs[0], base)]
        if name in ("addmm", "baddbmm"):
            return [self._product(args[1], args[2], args[0], outputs[0], base)]
        dims = reduced_dims(func, args, kwargs)
        if dims is not None:
            return self._reduced(args, dims, outputs, base)
        if torch.Tag.pointwise in func.tags:
            return [self._pointwise(name, args, kwargs, output, base) for output in outputs]
        return self._mixed_up(args, kwargs, outputs, base)

    def _moved(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], base: Mark
    ) -> list[Mark]:
        """Move the features in the same way as the operator moves the elements."""
        leaves = list(tensors_in((args, kwargs)))
        fresh = all(m is None or m.fresh or m.kind <= PARAMETER for m in map(self.mark_of, leaves))
        kept = {name: value for name, value in kwargs.items() if name not in _FORMS}

        def run(take: Callable[[torch.Tensor], torch.Tensor | None], none: int) -> list[torch.Tensor] | None:
            def stand_in(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                if not value.is_floating_point() and not value.is_complex():
                    return torch.zeros(value.shape, dtype=torch.long)
                found = take(value)
                return torch.full(value.shape, none, dtype=torch.int32) if found is None else found

            try:
                if name_of(func) in ("_to_copy", "clone", "contiguous"):
                    made: Any = stand_in(args[0])
                elif name_of(func) == "view_as_complex":
                    made = stand_in(args[0]).select(-1, 0)
                elif name_of(func) == "view_as_real":
                    made = stand_in(args[0])[..., None].expand(*args[0].shape, 2)
                elif name_of(func) == "constant_pad_nd":
                    made = func(stand_in(args[0]), args[1], none)
                else:
                    made = func(*tree_map(stand_in, args), **tree_map(stand_in, kept))
            except (RuntimeError, IndexError, TypeError, NotImplementedError):
                return None
            listed = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
            same = len(listed) == len(outputs) and all(a.shape == b.shape for a, b in zip(listed, outputs, strict=True))
            return listed if same else None

        indexed = _indexed_dims(func, args) or ([-1] if name_of(func) == "view_as_complex" else [])  # pairs

        def features(x: torch.Tensor) -> torch.Tensor | None:
            found = self.features_of(x)
            if found is not None and indexed and x is args[0]:
                return self.components.join_along(found, indexed).expand(found.shape).contiguous()
            if found is not None and schema_of(func).is_mutable:
                return found.clone(memory_format=torch.contiguous_format)  # the operator writes in place
            return found

        numbered = any(mark is not None and mark.features is not None for mark in map(self.mark_of, leaves))
        moved = run(features, 0) if numbered else None
        if numbered and moved is None:
            return self._mixed_up(args, kwargs, outputs, base)
        made = [
            replace(base, features=None if moved is None else moved[n], fresh=fresh, places={})
            for n in range(len(outputs))
        ]
        for name in {name for x in leaves for name in (self.mark_of(x) or base).places}:
            for dim in range(len(self.shapes[name])):

                def place(x: torch.Tensor, name: str = name, dim: int = dim) -> torch.Tensor | None:
                    known = (self.mark_of(x) or base).places
                    return known[name][dim] if name in known else None

                places = run(place, -1)
                for mark, found in zip(made, places or (), strict=False):
                    mark.places.setdefault(name, []).append(found)
        return made

    def _pointwise(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor, base: Mark
    ) -> Mark:
        found: torch.Tensor | None = None
        places: dict[str, list[torch.Tensor]] = {}
        fresh = name in _LINEAR
        for x in tensors_in((args, kwargs)):
            mark = self.mark_of(x)
            if mark is None or math.prod(x.shape) > output.numel():
                continue
            for parameter, indices in mark.places.items():
                places[parameter] = [index.expand(output.shape) for index in indices]
            if mark.features is None:
                fresh = fresh and mark.kind <= PARAMETER
                continue
            features = self.components.of(mark.features).expand(output.shape)
            if found is not None:
                self.components.join(found, features)
                fresh = False
                features = torch.where(found == 0, features, found)
            fresh, found = fresh and mark.fresh, features
        if found is not None:
            for parameter, indices in places.items():
                for dim, index in enumerate(indices):
                    self.touch(parameter, dim, index, found)
            return replace(base, features=found, fresh=fresh)
        if len(places) > 4 or base.kind > PARAMETER:
            places = {}
        return replace(base, places=places)

    def _reduced(self, args: tuple[Any, ...], dims: list[int], outputs: list[torch.Tensor], base: Mark) -> list[Mark]:
        features = self.features_of(args[0])
        for x in tensors_in(args[1:]):  # weights of a norm layer
            for name in (self.mark_of(x) or base).places if base.kind == INSIDE else ():
                self.inside.add(name)
        if features is None:
            return [replace(base) for _ in outputs]
        joined = self.components.join_along(features, dims)
        for name, places in (self.mark_of(args[0]) or base).places.items():  # parameters that are part of the tensor
            for dim, index in enumerate(places):
                self.touch(name, dim, index, joined.expand(index.shape))
        for x in tensors_in(args[1:]):
            self.near |= dict.fromkeys((self.mark_of(x) or base).places, int(joined.max()))
        made = []
        for output in outputs:
            if output.ndim == joined.ndim:
                fits = all(a in (1, b) for a, b in zip(joined.shape, output.shape, strict=True))
                own = joined.expand(output.shape) if fits else None
            else:
                own = joined.reshape(output.shape) if joined.numel() == output.numel() else None
            made.append(replace(base, features=own, fresh=False))
        return made

    def _product(
        self, one: torch.Tensor, other: torch.Tensor, added: torch.Tensor | None, output: torch.Tensor, base: Mark
    ) -> Mark:
        """Return the mark of a product of matrices ``[..., m, k]`` and ``[..., k, n]``."""
        marks = [self.mark_of(x) or Mark(CONSTANT) for x in (one, other)]
        for weight, mark in ((1, marks[1]), (0, marks[0])):
            if mark.kind == PARAMETER and marks[1 - weight].kind >= ACTIVATION:
                made = self._by_parameter(mark, marks[1 - weight], output, weight == 1, base)
                return made if added is None else self._pointwise("add", (added,), {}, output, made)
        rows, columns = self.features_of(one), self.features_of(other)
        total = torch.zeros(output.shape, dtype=torch.int32)
        joined = [None if x is None else self.components.join_along(x, [dim]) for x, dim in ((rows, -1), (columns, -2))]
        for part in joined:
            if part is not None:
                found = self.components.of(part).expand(output.shape)
                self.components.join(total, found)
                total = torch.where(total == 0, found, total)
        return replace(base, features=total if base.kind == INSIDE and bool((total != 0).any()) else None, fresh=False)

    def _by_parameter(self, weight: Mark, x: Mark, output: torch.Tensor, right: bool, base: Mark) -> Mark:
        """Return the mark of a product with a bare parameter, which numbers features, sums over them, or keeps them."""
        (name, places), *more = weight.places.items() or [("", [])]
        if more or not name:
            return replace(base, features=None)
        inner, outer = (-2, -1) if right else (-1, -2)  # dims of the weight; reversed for x and the output
        if x.features is not None:
            features = self.components.of(x.features)
            along = -1 if right else -2
            first = features.narrow(along, 0, 1)
            if bool((features != first).any()):  # a sum over numbered features
                features = self.components.of(features).select(-2 if right else -1, 0)  # [..., k]
                for dim, listed in enumerate(places):
                    index = listed.select(outer, 0)
                    if index.shape[-1] == features.shape[-1] and bool((index != index[..., :1]).any()):
                        self.touch(name, dim, index, features)
                self.bare_sinks[name] = features.unique()
                return Mark(INSIDE, None, base.producers, partial=True)
            self.inside.add(name)
            for dim, index in enumerate(places):
                self.touch(name, dim, index.flatten()[:, None], features.unique()[None])
            return replace(base, features=first.expand(output.shape), fresh=False)
        if name not in self._sources:
            if x.kind == INSIDE:
                self.inside.add(name)
            return replace(base, features=None)
        lines = [index.select(inner, 0) for index in places]  # [..., n]
        varying = [dim for dim, index in enumerate(lines) if bool((index != index[..., :1]).any())]
        if not varying:
            return replace(base, features=None)
        sizes = [self.shapes[name][dim] for dim in varying]
        number, stride = torch.zeros_like(lines[0]), 1
        for dim, size in reversed(list(zip(varying, sizes, strict=True))):
            number, stride = number + lines[dim] * stride, stride * size
        features = self.number(name, math.prod(sizes)) + number
        for dim in varying:
            self.touch(name, dim, lines[dim], features)
        self.bare_sources.add(name)
        features = features.unsqueeze(-2 if right else -1).expand(output.shape).to(torch.int32)
        return Mark(INSIDE, features, base.producers, fresh=True)

    def _per_channel(self, args: tuple[Any, ...], output: torch.Tensor, base: Mark) -> Mark | None:
        """Return the mark of a depthwise convolution; None for any other convolution."""
        x, weight, groups = args[0], args[1], args[8]
        features = self.features_of(x)
        if features is None or groups != x.shape[1] or weight.shape[0] != groups:
            return None
        line = self.components.join_along(features.movedim(1, -1).reshape(-1, groups), [0])[0]
        for parameter in args[1:3]:
            for name in (self.mark_of(parameter) or base).places if isinstance(parameter, torch.Tensor) else ():
                self.touch(name, 0, torch.arange(groups), line)
        shape = [-1 if dim == 1 else 1 for dim in range(output.ndim)]
        fresh = (self.mark_of(x) or base).fresh
        return replace(base, features=line.to(torch.int32).reshape(shape).expand(output.shape), fresh=fresh)

    def _resized(self, x: torch.Tensor, output: torch.Tensor, base: Mark) -> Mark:
        """Return the mark of an interpolation over all dims after the second. Indices that vary there are dropped."""
        features, spatial = self.features_of(x), list(range(2, x.ndim))
        if features is not None:
            features = self.components.join_along(features, spatial).expand(output.shape)
        places = {}
        for name, listed in (self.mark_of(x) or base).places.items():
            first = [index.flatten(2)[..., :1].reshape(*index.shape[:2], *[1] * len(spatial)) for index in listed]
            same = [bool((index == one).all()) for index, one in zip(listed, first, strict=True)]
            found = [one if alike else torch.full_like(one, -1) for one, alike in zip(first, same, strict=True)]
            places[name] = [one.expand(output.shape) for one in found]
        return replace(base, features=features, places=places, fresh=False)

    def _mixed_up(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], base: Mark
    ) -> list[Mark]:
        """Return marks for an unknown operator, which joins all features."""
        some = [x.flatten() for t in tensors_in((args, kwargs)) if (x := self.features_of(t)) is not None]
        for x in tensors_in((args, kwargs)):
            self.inside.update((self.mark_of(x) or base).places if base.kind == INSIDE else ())
        if not some:
            return [replace(base) for _ in outputs]
        joined = self.components.join_along(torch.cat(some), [0])
        return [replace(base, features=joined.reshape([1] * x.ndim).expand(x.shape), fresh=False) for x in outputs]


def _indexed_dims(func: Any, args: tuple[Any, ...]) -> list[int]:
    """Return the dims of the first argument that are indexed by a tensor without data."""
    name = name_of(func)
    if name in ("index", "index_put", "index_put_"):
        return [dim for dim, index in enumerate(args[1]) if index is not None]
    if name in ("gather", "index_select", "scatter", "scatter_add", "index_add", "take_along_dim"):
        return [args[1]] if isinstance(args[1], int) else []
    return []

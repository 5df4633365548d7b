"""Unit tracking: whether what runs between a column and its row works on each unit by itself, and in order.

A plan that was not written for this library says that features are sharded, and not what they are made of. Sharded in
runs of heads, ``[q | k | v]`` side by side has all the right shapes and is wrong. So the features that a column makes
are followed through the plain model and through a shard, on the meta device: their dim may be viewed, moved and
combined with others of the same units; it must not be cut, reduced, normalised or multiplied away, and must reach the
row as it began. Both forwards must do the same operations on the same shapes, but for that dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.dry_run.meta_results import ValuelessTracking
from autopar.dry_run.unit_dims import SHAPE_ONLY, VIEWS, Followed, SplitUnits, follow
from autopar.foreign.operators import schema_of
from autopar.foreign.tensors import base_of
from autopar.layout import Layout
from autopar.tensor_tracking import tensors_in

__all__ = ["SplitUnits", "Step", "UnitTracking", "differing"]


_COPIES = ("clone", "contiguous", "alias", "detach")


class Step(NamedTuple):
    """One operation on followed features: its name, scalars, and of each result the shape and what is followed."""

    name: str
    scalars: tuple[float, ...]
    results: tuple[tuple[tuple[int, ...], Followed | None], ...]
    place: str


class UnitTracking(ValuelessTracking):
    """A dispatch mode that follows units, and notes every operation on them.

    Args:
        rank: whose shard runs; None: the plain model.
        plain: steps of the plain model, which decide where a view leaves several dims to choose from.

    Attributes:
        steps: operations on followed features, in order.
        place: of the module that runs.

    Raises:
        SplitUnits: in the forward, at the operation.
    """

    def __init__(self, rank: int | None, plain: list[Step] | None = None) -> None:
        super().__init__()
        self.rank, self._plain = rank, plain
        self.steps: list[Step] = []
        self.place = ""
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._paused = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def pause(self, by: int) -> None:
        """Follow nothing from here on (1), or again (-1)."""
        self._paused += by

    def mark(self, tensor: torch.Tensor, layout: Layout, dim: int) -> None:
        """Follow a dim of a tensor, which is made of ``layout``, or of this rank's part of it."""
        counts = [block.count for block in layout.blocks]
        if self.rank is not None:
            spans = (block.ranges[self.rank] for block in layout.blocks)
            counts = [stop - start for start, stop in spans]
            share = None if layout.replicated else (layout.local_size(self.rank), layout.size)
        else:
            share = None if layout.replicated else (layout.size, layout.size)
        parts = len(layout.blocks) if len(set(counts)) == 1 else 0  # 0: parts of several sizes, which nothing may cut
        self._known[tensor] = Followed(dim % tensor.ndim, parts, counts[0], None, share)

    def of(self, value: Any) -> Followed | None:
        """Return what is followed in the first tensor of ``value``."""
        return next((self._known.get(tensor) for tensor in tensors_in(value)), None)

    def forget(self, value: Any) -> None:
        """Follow the tensors in ``value`` no longer."""
        for tensor in tensors_in(value):
            self._known.pop(tensor, None)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._paused:
            return
        given = [(tensor, self._known.get(tensor)) for tensor in tensors_in((args, kwargs))]
        name = func.overloadpacket.__name__
        if not any(followed for _, followed in given) or name in SHAPE_ONLY:
            return
        made = list(tensors_in(result))
        hints = self._hints()
        found = follow(func, name, args, kwargs, given, made, hints)
        scalars = tuple(float(x) for x in (*args, *kwargs.values()) if type(x) in (int, float)) if _scales(func) else ()
        if name not in _COPIES:  # whether something is copied depends on sizes
            results = tuple((tuple(tensor.shape), f) for tensor, f in zip(made, found, strict=True))
            self.steps.append(Step("view" if name in VIEWS else name, scalars, results, self.place))
        for tensor, followed in zip(made, found, strict=True):
            if followed is None:
                self._known.pop(tensor, None)
                continue
            self._known[tensor] = followed
            if base_of(tensor) is not None and schema_of(func).is_mutable and base_of(tensor).shape == tensor.shape:
                self._known[base_of(tensor)] = followed

    def _hints(self) -> list[Followed | None]:
        at = len(self.steps)
        if self._plain is None or at >= len(self._plain):
            return []
        return [followed for _, followed in self._plain[at].results]


def _scales(func: Any) -> bool:
    """Whether numbers among an operation's arguments are no sizes or dims: they must be those of the plain model."""
    return torch.Tag.pointwise in func.tags


def differing(plain: list[Step], shard: list[Step]) -> tuple[str, str] | None:
    """Return the place and the words of the first step in which a shard does something else than the plain model."""
    for one, other in zip(plain, shard, strict=False):
        if (one.name, len(one.results)) != (other.name, len(other.results)):
            return other.place, f"the shard does {other.name} where the full model does {one.name}"
        if one.scalars != other.scalars:
            return other.place, f"{one.name} with {other.scalars} on a shard, {one.scalars} in the full model"
        for (shape, followed), (local, here) in zip(one.results, other.results, strict=True):
            if not _alike(shape, followed, local, here):
                words = f"{one.name} makes {list(local)} of a shard and {list(shape)} of the full model"
                return other.place, f"{words}, which are not the same units"
    if len(plain) != len(shard):
        return "", f"a shard does {len(shard)} operations on sharded features, the full model {len(plain)}"
    return None


def _alike(shape: tuple[int, ...], whole: Followed | None, local: tuple[int, ...], here: Followed | None) -> bool:
    if whole is None or here is None:
        return whole is here
    if here.share is None:
        return len(shape) == len(local) and whole.dim == here.dim
    if len(shape) != len(local) or whole.dim != here.dim:
        return False
    own, every = here.share
    rest = [size for place, size in enumerate(shape) if place != whole.dim]
    return (
        rest == [size for place, size in enumerate(local) if place != here.dim]
        and prod((shape[whole.dim], own)) == local[here.dim] * every
    )

"""Sharded tensors as hooks of the user's see them: whole ones, of which parts are taken where a hook returns them.

The tensors of a module may be sharded over several axes, each of which has its own :class:`Seen`, the innermost first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from autopar.distributed import collectives, plain_collectives
from autopar.distributed.axis import Axis
from autopar.errors import ConfigError
from autopar.foreign.tensors import version_of
from autopar.layout import Layout

_HELD = "_autopar_full"  # attribute of a shard: the full tensor it was cut from, and its own version


class Seen:
    """Makes what a module is given, or makes, whole, and cuts what a hook returns as that was cut."""

    def __init__(self) -> None:
        self._gathered: list[tuple[torch.Tensor, int]] = []  # copies that a hook gets, and their versions

    def whole(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with whole tensors. Gradients have no gradient."""
        raise NotImplementedError

    def cut(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with this rank's parts of tensors that were whole."""
        raise NotImplementedError

    def is_written(self) -> bool:
        """Return whether the hook wrote into what it got, which then has to be taken as what it returns."""
        return self.loses_writes()

    def loses_writes(self) -> bool:
        """Return whether the hook wrote into a copy."""
        return any(version_of(x) != version for x, version in self._gathered)

    def is_kept(self) -> bool:
        """Return whether the hook may keep a copy for the backward: the module then continues with its shard."""
        return False

    def note(self, x: torch.Tensor) -> torch.Tensor:
        """Note a copy that a hook gets; returns it."""
        self._gathered.append((x, version_of(x)))
        return x


class Chain(Seen):
    """Several of them, one around the other: the innermost first."""

    def __init__(self, parts: Sequence[Seen]) -> None:
        self.parts = parts

    def whole(self, value: Any, *, gradient: bool = False) -> Any:
        """Gather over one axis after the other."""
        for part in self.parts:
            value = part.whole(value, gradient=gradient)
        return value

    def cut(self, value: Any, *, gradient: bool = False) -> Any:
        """Cut by the axes, the outermost first."""
        for part in reversed(self.parts):
            value = part.cut(value, gradient=gradient)
        return value

    def is_written(self) -> bool:
        """Return whether the hook wrote into what it got."""
        return any(part.is_written() for part in self.parts)

    def loses_writes(self) -> bool:
        """Return whether the hook wrote into a copy."""
        return any(part.loses_writes() for part in self.parts)

    def is_kept(self) -> bool:
        """Return whether the hook may keep a copy for the backward."""
        return any(part.is_kept() for part in self.parts)


class Shards(NamedTuple):
    """Facts about the tensors of one module.

    Attributes:
        path, module: of it.
        given, made: layouts of the features that its forward is given, and that it makes; None: they are whole.
        heads: tensors of four dims have heads as a dim of their own.
        over_rows: what its hooks see where ranks share sequences; None: whole ones.
    """

    path: str
    module: nn.Module
    given: Layout | None = None
    made: Layout | None = None
    heads: bool = False
    over_rows: Callable[[Any, bool, bool], Seen | None] | None = None  # by hook, of gradients? of outputs?


class SeenShards(Seen):
    """Shards of tensor parallelism, as a hook sees them."""

    def __init__(self, layout: Layout | None, shards: Shards, axis: Axis) -> None:
        super().__init__()
        self.layout, self.axis, self.heads, self.path = layout, axis, shards.heads, shards.path
        self._cuts: dict[torch.Size, tuple[int, Layout]] = {}  # shape of the whole -> how it is sharded
        self._kept: list[torch.Tensor] = []  # given as they are

    def whole(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with its first tensor whole: hidden states, beside which others are. Gradients have no gradient."""
        first = next(tensors_of(value), None)
        if first is None:
            return value
        held, version = getattr(first, _HELD, (None, 0))
        if held is not None and version_of(first) == version:
            return mapped(lambda x: self.note(held) if x is first else self._as_it_is(x), value)
        found = self._sharded(first)
        if found is None:
            return value
        full = self._gather(first, *found, gradient)
        return mapped(lambda x: full if x is first else self._as_it_is(x), value)

    def cut(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with this rank's parts of tensors that have the shape of one that was gathered."""
        return mapped(lambda x: self._own(x, gradient), value)

    def held(self, value: Any) -> Any:
        """Return what :meth:`cut` does; the shard remembers its full tensor, which later hooks get."""
        cut, full = self.cut(value), self._gathered[0][0]
        first = next(tensors_of(cut))
        setattr(first, _HELD, (full, version_of(first)))
        return cut

    def is_kept(self) -> bool:
        """Return whether a copy has a gradient, which the hook may ask for at any time before the backward."""
        return any(x.requires_grad for x, _ in self._gathered)

    def _as_it_is(self, x: torch.Tensor) -> torch.Tensor:
        self._kept.append(x)
        return x

    def _gather(self, x: torch.Tensor, dim: int, layout: Layout, gradient: bool) -> torch.Tensor:
        if not gradient:
            full = collectives.gather(x, self.axis, layout, dim)
        elif layout.replicated:  # each of several ranks has a part
            full = plain_collectives.sum_shards(x, self.axis, layout, dim)
        else:
            full = plain_collectives.all_gather(x, self.axis, layout, dim)
        self._cuts[full.shape] = dim, layout
        return self.note(full)

    def _own(self, x: torch.Tensor, gradient: bool) -> torch.Tensor:
        found = None if any(x is kept for kept in self._kept) else self._cuts.get(x.shape)
        if found is None:
            return x
        dim, layout = found
        if not gradient:
            return collectives.scatter(x, self.axis, layout, dim)
        return plain_collectives.owned(layout.shard(x, self.axis.rank, dim), self.axis, layout, dim)

    def _sharded(self, x: torch.Tensor) -> tuple[int, Layout] | None:
        """Return the dim along which a tensor is sharded, and how: features or heads; None if it is whole.

        Sizes say so. Where those of the ranks differ, one may match by chance, so it has to on all of them.
        """
        ways: list[tuple[int, int, Layout]] = []  # dim, size there, layout
        if self.layout is not None and self.heads and x.ndim == 4:  # [batch, heads/tp, seq, d], or seq before heads
            heads = _heads(self.layout)
            ways += [(dim, x.shape[dim], heads) for dim in (1, 2)]
        elif self.layout is not None:
            ways.append((x.ndim - 1, x.shape[-1], self.layout))
        fit = [int(size == layout.local_size(self.axis.rank)) for _, size, layout in ways]
        if any(len({layout.local_size(rank) for rank in range(self.axis.size)}) > 1 for _, _, layout in ways):
            _, fit = plain_collectives.extremes_over(self.axis, fit)
        found = [(dim, layout) for (dim, _, layout), fits in zip(ways, fit, strict=True) if fits]
        if len(found) > 1 and found[0][1] is found[1][1]:
            raise ConfigError(
                f"a hook on {self.path} would get whole heads, but {list(x.shape)} has as many positions as heads on "
                "this rank, and which\n  are which cannot be told. Use another length, a hook on q_proj or k_proj, or "
                "autopar.local_hooks(module)."
            )
        return found[0] if found else None


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of numbers in tuples, lists, dicts and outputs of models, with two dims or more."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.ndim > 1:
            yield value
    elif type(value) in (tuple, list, dict) or isinstance(value, ModelOutput):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(each)


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Change the tensors in tuples, lists, dicts and outputs; a cache, which is written into, stays the same object."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(function, each) for each in value)
    if isinstance(value, ModelOutput):
        return type(value)(**{key: mapped(function, each) for key, each in value.items()})
    if type(value) is dict:
        return {key: mapped(function, each) for key, each in value.items()}
    return value


@functools.lru_cache(maxsize=256)
def _heads(layout: Layout) -> Layout:
    """Return the layout of whole units, where features are a dim of their own: ``[batch, heads/tp, seq, d]``."""
    return Layout.of(1, [replace(block, width=1) for block in layout.blocks])

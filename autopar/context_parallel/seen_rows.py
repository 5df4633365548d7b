"""Tensors over rows of the sequence as hooks of the user's see them: all rows, in their order.

Sizes say whether a tensor holds rows: they have to on all ranks. A tensor in a block that has neither own rows nor all
of them is refused: tokens of one expert, a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autopar.context_parallel.lazy_rows import LazyRows
from autopar.context_parallel.rows import entered
from autopar.context_parallel.state import RowPlan, RowState
from autopar.distributed import collectives, plain_collectives
from autopar.distributed.axis import Axis
from autopar.distributed.derivatives import scale_gradient
from autopar.distributed.whole_on_read import WholeOnRead
from autopar.errors import ConfigError
from autopar.foreign.tensors import version_of
from autopar.layout import Layout
from autopar.tensor_parallel.seen_values import Seen, mapped, tensors_of
from autopar.tensor_parallel.whole_hooks import described


@dataclass(frozen=True)
class Place:
    """Where a module is in a model over rows.

    Attributes:
        path: of the module.
        number: of its list of blocks; None outside of blocks.
        whole: path of the module that needs all rows in which it lies.
    """

    path: str
    number: int | None = None
    whole: str = ""

    def is_beside(self, plan: RowPlan, *, made: bool) -> bool:
        """Return whether the module's first tensor was never rows in the rehearsal: another sequence, a table."""
        return plan.beside.get(f"{'made' if made else 'given'} {self.path}", False)


class SeenRows(Seen):
    """The tensors of one call of a module, as a hook sees them.

    Args:
        layout: of the rows that the module may have; None if its tensors are whole.
    """

    def __init__(self, state: RowState, place: Place, hook: Any, layout: Layout | None) -> None:
        super().__init__()
        self.state, self.axis, self.place, self.hook, self.layout = state, state.axis, place, hook, layout
        self._originals: list[tuple[torch.Tensor, int]] = []  # whole ones that a hook gets as they are
        self._own: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}  # id of the whole -> whole, version, own
        self._ways: dict[tuple[torch.Size, bool], _Way] = {}  # shape of a whole, whether of numbers -> where rows are
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of what was given -> itself, the whole

    def is_written(self) -> bool:
        """Return whether the hook wrote into what it got."""
        return self.loses_writes() or any(version_of(x) != version for x, version in self._originals)

    def whole(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with all rows: of hidden states, which come first, and of what is beside them."""
        first = next(tensors_of(value), None)
        return mapped(lambda x: self._once(x, first=x is first), value)

    def cut(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with this rank's rows."""
        return mapped(self._cut, value)

    def _once(self, x: torch.Tensor, *, first: bool) -> torch.Tensor:
        if id(x) not in self._seen:
            self._seen[id(x)] = x, self._whole(x, first=first)
        return self._seen[id(x)][1]

    def _whole(self, x: torch.Tensor, *, first: bool) -> torch.Tensor:
        layout = self.layout
        if isinstance(x, LazyRows):
            return self._as_it_is(x.whole())
        known = x if first or layout is None else self.state.whole_of(x)
        if known is not x and layout is not None:  # positions, rotary angles
            self._own[id(known)] = (known, version_of(known), x)
            dim = next(dim for dim, size in enumerate(x.shape) if size != known.shape[dim])
            self._ways.setdefault((known.shape, known.is_floating_point()), _Way(dim, False, layout))
            return self.note(known)
        if layout is None or not (first or _may_be_rows(x, self.state.plan)):
            return self._as_it_is(x)
        way, whole = self._way(x, layout)
        if way is None:
            if first and self.place.number is not None and not whole:
                raise ConfigError(_refusal(self.hook, self.place.path, x, layout, self.axis))
            return self._as_it_is(x)
        full = _all_rows(x.whole() if isinstance(x, WholeOnRead) else x, way, self.axis)  # sharded by vocabulary, too
        self._ways[full.shape, full.is_floating_point()] = way
        return self.note(full)

    def _way(self, x: torch.Tensor, layout: Layout) -> tuple[_Way | None, bool]:
        """Return where own rows lie, None if they do not, and whether all rows do; on all ranks."""
        number = len(self.state.plan.lists) - 1 if self.place.number is None else self.place.number
        batch, where = self.state.batches.get(number, 0), f"{described(self.hook)} on {self.place.path}"
        whole = layout.size in x.shape[1:] or (x.ndim == 2 and len(x) == batch * layout.size)
        return _found(x, [layout], batch, self.axis, where, whole=whole)

    def _as_it_is(self, x: torch.Tensor) -> torch.Tensor:
        self._originals.append((x, version_of(x)))
        return x

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        known, version, own = self._own.get(id(x), (None, 0, x))
        if known is x and version_of(x) == version:
            return own
        original = any(x is each for each, _ in self._originals)
        if original and any(x is each and version_of(x) == version for each, version in self._originals):
            return x
        if original and self.layout is not None and self.layout.size not in x.shape:  # rows, in a table
            return x
        way = None if original else self._ways.get((x.shape, x.is_floating_point()))
        if way is None:
            averaged: torch.Tensor = entered(x, self.axis)
            return x if averaged is x else averaged.clone()  # no view: code behind the hook may write into it
        return _own_rows(x, way, self.axis)


class GradientsOfRows(Seen):
    """Gradients as a backward hook sees them: the forward has ended, so their lengths say which rows they are of.

    Args:
        made: whether they are of what the module makes, not of what it is given.
    """

    def __init__(self, state: RowState, place: Place, hook: Any, *, made: bool) -> None:
        super().__init__()
        self.state, self.axis, self.place, self.hook, self.made = state, state.axis, place, hook, made
        self.alike = made and place.path == state.plan.head  # logits, which are whole for whoever reads them
        self._ways: dict[torch.Size, _Way] = {}

    def whole(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with the whole gradients."""
        if self.alike:
            return value
        first = next(tensors_of(value), None)
        return mapped(lambda x: self._whole(x, first=x is first), value)

    def cut(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with the gradients of own rows, as large as an average over the ranks needs them."""
        return mapped(self._cut, value)

    def _whole(self, x: torch.Tensor, *, first: bool) -> torch.Tensor:
        if not x.is_floating_point():  # of what has no gradient
            return x
        place, plan, lengths = self.place, self.state.plan, self.state.lengths()
        within = bool(place.whole) and (plan.whole[place.whole].states is None or place.whole in self.state.hooked)
        if within or (first and place.is_beside(plan, made=self.made)):
            return self._average(x)
        if not first and not _may_be_rows(x, plan):  # what it is of is not known
            return x if place.number is not None else self._average(x)
        layouts = [layout for layout in map(self.state.rows_of, lengths) if layout is not None]
        number = len(plan.lists) - 1 if place.number is None else place.number
        where, batch = f"{described(self.hook)} on {place.path}", self.state.batches.get(number, 0)
        way, whole = _found(x, layouts, batch, self.axis, where, whole=not {*x.shape[1:]}.isdisjoint(lengths))
        if way is None and place.number is not None and not whole:
            if first:
                raise ConfigError(_refusal(self.hook, place.path, x, layouts[-1], self.axis))
            return x
        if way is None:
            return self._average(x)
        y = x.unflatten(0, (-1, way.layout.local_size(self.axis.rank))) if way.flat else x
        full = plain_collectives.all_gather(y, self.axis, way.layout, way.dim) / self.axis.size
        full = full.flatten(0, 1) if way.flat else full
        self._ways[full.shape] = way
        return self.note(full)

    def _average(self, x: torch.Tensor) -> torch.Tensor:
        return plain_collectives.all_reduce(x, self.axis) / self.axis.size

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        way = self._ways.get(x.shape)
        if way is None:
            return x
        y = x.unflatten(0, (-1, way.layout.size)) if way.flat else x
        own = way.layout.shard(y, self.axis.rank, way.dim) * self.axis.size
        return own.flatten(0, 1) if way.flat else own


class _Way(NamedTuple):
    """Where a tensor holds rows.

    Attributes:
        flat: whether the batch lies in the same dim, in front of them; ``dim`` is counted without that.
    """

    dim: int
    flat: bool
    layout: Layout


def _may_be_rows(x: torch.Tensor, plan: RowPlan) -> bool:
    """Return whether a tensor beside hidden states may hold rows: no table of pairs, and no other sequence is there."""
    return x.ndim < 4 and len(plan.lists) == 1


def _found(
    x: torch.Tensor, layouts: list[Layout], batch: int, axis: Axis, where: str, *, whole: bool
) -> tuple[_Way | None, bool]:
    """Return where ``x`` holds own rows of one of the layouts, and whether it is ``whole``; on all ranks.

    Raises:
        ConfigError: two dims may be rows.
    """
    if x.ndim == 2:  # [batch * rows, features]
        sizes = [(1, len(x) // batch)] if batch and len(x) % batch == 0 else [(1, -1)]
    else:  # [batch, rows, features], [batch, rows, heads, d] or [batch, heads, rows, d]
        sizes = [(dim, x.shape[dim]) for dim in range(1, min(x.ndim - 1, 3))]
    ways = [(_Way(dim, x.ndim == 2, layout), size) for layout in layouts for dim, size in sizes]
    fit = [int(size == way.layout.local_size(axis.rank)) for way, size in ways]
    _, (*fits, all_whole) = plain_collectives.extremes_over(axis, [*fit, int(whole)])
    found = [way for (way, _), fitting in zip(ways, fits, strict=True) if fitting]
    if len(found) > 1:
        raise ConfigError(
            f"the hook {where} would get all rows of the sequence, but {list(x.shape)} has as many heads as rows on "
            f"this rank, and which\n  are which cannot be told: dims {' and '.join(str(way.dim) for way in found)}. "
            "Use another length, a hook on q_proj or k_proj, or autopar.local_hooks(module)."
        )
    return (found[0] if found else None), bool(all_whole)


def _all_rows(x: torch.Tensor, way: _Way, axis: Axis) -> torch.Tensor:
    """Gather rows, in their order: in front of it the gradient is that of own rows, behind it the whole one."""
    y = _scaled(x.unflatten(0, (-1, way.layout.local_size(axis.rank))) if way.flat else x, axis.size)
    full = collectives.gather(y, axis, way.layout, way.dim)
    return full.flatten(0, 1) if way.flat else full


def _own_rows(x: torch.Tensor, way: _Way, axis: Axis) -> torch.Tensor:
    """Keep own rows: in front of it the gradient is the whole one, behind it that of own rows."""
    y = _scaled(x.unflatten(0, (-1, way.layout.size)) if way.flat else x, 1 / axis.size)
    own = collectives.scatter(y, axis, way.layout, way.dim)
    return own.flatten(0, 1) if way.flat else own


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    made: torch.Tensor = scale_gradient(x, factor)
    return made


def _refusal(hook: Any, path: str, x: torch.Tensor, layout: Layout, axis: Axis) -> str:
    return (
        f"context_parallel_size={axis.size}: the hook {described(hook)} on {path} would get all {layout.size} rows of "
        f"the sequence, but\n  {list(x.shape)} has neither these nor the {layout.local_size(axis.rank)} rows of this "
        f"rank, and cannot be made whole. {WORKS}"
    )


WORKS = "Put the hook on the module around it,\n  or let hooks there see this rank's part: autopar.local_hooks(module)."

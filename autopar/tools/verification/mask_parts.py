"""Which part of the plain model's mask a rank has drawn, and the whole mask put together from all of them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import torch

from autopar.layout import Layout
from autopar.tools.verification.dropout_masks import DrawnMask

__all__ = ["Place", "Site", "kept_too_few_or_many", "sites_of", "whole_mask", "wrong_parts"]

RowsOf = Callable[[int], Layout | None]
"""Length of a sequence -> its rows on the ranks of cp; None if it is not cut."""


class Place(NamedTuple):
    """A rank of one replica."""

    pp: int
    cp: int
    tp: int


class _Part(NamedTuple):
    """What one rank drew of a mask.

    Attributes:
        where: for each dim of the whole mask the indices that it has; None: that is not known.
        keys: whether keys may be left out that no row sees.
    """

    place: Place
    drawn: DrawnMask
    where: tuple[tuple[int, ...], ...] | None
    keys: bool = False


@dataclass
class Site:
    """One draw of the plain model, and those of the ranks that stand for it.

    Attributes:
        number: how often its module has drawn before.
        problem: the numbers of draws do not fit.
    """

    plain: DrawnMask
    number: int
    parts: list[_Part] = field(default_factory=list)
    problem: str = ""


def sites_of(
    plain: Sequence[DrawnMask],
    everyone: Mapping[Place, Sequence[DrawnMask]],
    rows_of: RowsOf,
    batch: int,
    scattered: Callable[[str], bool] = lambda module: False,
) -> Iterator[Site]:
    """Yield the draws of the plain model with those of the ranks.

    Args:
        everyone: the draws of each rank, in their order.
        batch: samples: rows of all of them may lie in one dim.
        scattered: whether the heads of a rank do not lie side by side in a module.
    """
    for module in dict.fromkeys(draw.module for draw in plain):
        expected = [draw for draw in plain if draw.module == module]
        found = {place: [draw for draw in draws if draw.module == module] for place, draws in everyone.items()}
        counts = [len(draws) for draws in found.values()]
        if not any(counts) or any(count % len(expected) for count in counts):
            listed = ", ".join(map(str, counts))
            yield Site(expected[0], 0, problem=f"the ranks draw {listed} times, the plain model {len(expected)} times")
            continue
        for number, draw in enumerate(expected):
            pieces = {
                place: draws[number * (each := len(draws) // len(expected)) : (number + 1) * each]
                for place, draws in found.items()
                if draws
            }
            yield Site(draw, number, list(_parts(draw, pieces, rows_of, batch, scattered(module))))


def _parts(
    plain: DrawnMask, pieces: Mapping[Place, Sequence[DrawnMask]], rows_of: RowsOf, batch: int, scattered: bool
) -> Iterator[_Part]:
    found: list[_Part] = []
    pieces = {place: _unpacked(plain.shape, draws, place.cp, rows_of) for place, draws in pieces.items()}
    for place, draws in pieces.items():
        others = {at: each[0].shape for at, each in pieces.items() if at.pp == place.pp and not scattered}
        for number, draw in enumerate(draws):
            found.append(
                _Part(place, draw, *_where(plain.shape, draw, place, number, len(draws), others, rows_of, batch))
            )
    for part in found:
        same = (each for each in found if each.where == part.where and each.place.tp == part.place.tp)
        if part.where is not None and part.drawn.whole and any(_differ(part.drawn, each.drawn) for each in same):
            yield part._replace(where=_own_rows(part.where, plain.shape, part.place.cp, rows_of))
        else:
            yield part


def _unpacked(whole: tuple[int, ...], draws: Sequence[DrawnMask], cp: int, rows_of: RowsOf) -> list[DrawnMask]:
    """Of one row transformers computes attention with the heads of a group in the place of rows: put it right."""
    rows = rows_of(whole[2]) if len(whole) == 4 else None
    runs = rows.ranges(cp) if rows is not None else ()
    if len(runs) != len(draws):
        return list(draws)

    def unpacked(draw: DrawnMask, of_run: int) -> DrawnMask:
        if of_run != 1 or len(draw.shape) != 4 or draw.shape[2] in (1, whole[2]) or draw.kept is None:
            return draw
        batch, keys, groups, last = draw.shape
        shape = (batch, keys * groups, 1, last)
        return draw._replace(shape=shape, kept=draw.kept.reshape(shape))

    return [unpacked(draw, stop - start) for draw, (start, stop) in zip(draws, runs, strict=True)]


def _differ(one: DrawnMask, other: DrawnMask) -> bool:
    return one.kept is not None and other.kept is not None and not torch.equal(one.kept, other.kept)


def _own_rows(
    where: tuple[tuple[int, ...], ...], shape: tuple[int, ...], cp: int, rows_of: RowsOf
) -> tuple[tuple[int, ...], ...] | None:
    """Of a draw of all rows on each rank those that the rank keeps: along the first dim that is as long."""
    for dim in range(1, len(shape)):
        layout = rows_of(shape[dim])
        if layout is not None and len(where[dim]) == shape[dim]:
            return (*where[:dim], _indices(layout.ranges(cp)), *where[dim + 1 :])
    return None


def _where(
    whole: tuple[int, ...],
    draw: DrawnMask,
    place: Place,
    number: int,
    pieces: int,
    others: Mapping[Place, tuple[int, ...]],
    rows_of: RowsOf,
    batch: int,
) -> tuple[tuple[tuple[int, ...], ...] | None, bool]:
    """The indices of a draw, and whether it lacks keys."""
    if len(draw.shape) != len(whole) or any(len(shape) != len(whole) for shape in others.values()):
        return None, False
    found: list[tuple[int, ...]] = []
    run: tuple[int, int] | None = None
    for dim, (size, of) in enumerate(zip(draw.shape, whole, strict=True)):
        if size == of:
            found.append(tuple(range(of)))
            continue
        heads = dim == 1 and len(whole) == 4 and draw.shape[2] == whole[2]  # all queries, of some heads
        rows = None if heads else rows_of(of)
        runs = rows.ranges(place.cp) if rows is not None else ()
        if run is not None and dim == len(whole) - 1:
            start = _first_key(draw, run, size)
            if start is None:
                return None, False
            found.append(tuple(range(start, start + size)))
        elif rows is not None and pieces == 1 and size == rows.local_size(place.cp):
            found.append(_indices(runs))
            run = runs[0] if len(runs) == 1 and len(whole) == 4 else None
        elif pieces > 1 and len(runs) == pieces and size == runs[number][1] - runs[number][0]:
            run = runs[number]
            found.append(tuple(range(*run)))
        else:
            own = _of_batch(size, of, place.cp, rows_of, batch)
            if own is None:
                own = _share(dim, whole, place, others, batch if dim == 0 and of % batch == 0 else 1)
            if own is None:
                return None, False
            found.append(own)
    return tuple(found), run is not None and draw.shape[-1] < whole[-1]


def _first_key(draw: DrawnMask, run: tuple[int, int], size: int) -> int | None:
    """The first key that a run of rows was given; without a mask it is that of all rows."""
    starts = {start for low, start, stop in draw.keys if low == run[0] and stop - start == size}
    if not starts and size == run[1]:
        return 0
    return starts.pop() if len(starts) == 1 else None


def _of_batch(size: int, of: int, cp: int, rows_of: RowsOf, batch: int) -> tuple[int, ...] | None:
    """Rows of all samples in one dim, the samples one after the other."""
    rows = rows_of(of // batch) if batch > 1 and of % batch == 0 else None
    if rows is None or size != batch * rows.local_size(cp):
        return None
    own = _indices(rows.ranges(cp))
    return tuple(sample * rows.size + row for sample in range(batch) for row in own)


def _share(
    dim: int, whole: tuple[int, ...], place: Place, others: Mapping[Place, tuple[int, ...]], samples: int
) -> tuple[int, ...] | None:
    """Heads, or the like, that ranks of tp hold one after the other; those of some of them may lie on ranks of cp.

    A rank that has some rows of the queries has all heads that are on its rank of tp.

    Args:
        samples: whose heads lie in the dim, one sample after the other.
    """
    held: dict[int, dict[int, int]] = {}
    rows = set[int]()
    for at, shape in others.items():
        held.setdefault(at.tp, {})[at.cp] = shape[dim]
        rows |= {at.tp} if len(whole) == 4 and shape[2] != whole[2] else set()
    for shared in itertools.product(*((False,) if tp in rows else (False, True) for tp in sorted(held))):
        sizes = [
            sum(each.values()) if split else each.get(place.cp, 0)
            for split, (_, each) in zip(shared, sorted(held.items()), strict=True)
        ]
        if sum(sizes) == whole[dim]:
            number = sorted(held).index(place.tp)
            before = sum(size for cp, size in held[place.tp].items() if cp < place.cp) if shared[number] else 0
            start, size, of = sum(sizes[:number]) + before, others[place][dim], whole[dim]
            starts = [sample * (of // samples) + start // samples for sample in range(samples)]
            return tuple(index for first in starts for index in range(first, first + size // samples))
    return None


def _indices(ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(index for start, stop in ranges for index in range(start, stop))


def wrong_parts(site: Site) -> str:
    """Return what is wrong with the draws of a site, alike or different where they must not be; or an empty text."""
    if site.problem:
        return site.problem
    rates = {part.drawn.rate for part in site.parts} - {site.plain.rate}
    if rates:
        return f"drops with a rate of {min(rates)}, in the plain model {site.plain.rate}"
    if not all(part.drawn.scaled for part in site.parts):
        return f"multiplies what is kept by another number than 1 / (1 - {site.plain.rate})"
    for one, other in combinations(site.parts, 2):
        if one.place == other.place:
            continue
        if one.where is None or other.where is None:
            same = one.drawn.shape == other.drawn.shape == site.plain.shape
        else:
            same = one.where == other.where
        ranks = _words(one.place, other.place)
        if same and _differ(one.drawn, other.drawn):
            return f"draws differently on {ranks}, which hold the same activation"
        if not same and one.drawn.state == other.drawn.state:
            return f"draws alike on {ranks}, which hold different parts {list(one.drawn.shape)}"
    return ""


def _words(one: Place, other: Place) -> str:
    axes = [axis for axis, a, b in zip(Place._fields, one, other, strict=True) if a != b]
    kinds = {"pp": "stages", "cp": "context-parallel ranks", "tp": "tensor-parallel ranks"}
    return " and ".join(kinds[axis] for axis in axes)


def whole_mask(site: Site) -> torch.Tensor | None:
    """Return the plain model's mask put together; None where a part is not known, or missing."""
    mask = torch.ones(site.plain.shape, dtype=torch.bool)
    covered = torch.zeros(site.plain.shape, dtype=torch.bool)
    for part in site.parts:
        if part.where is None or part.drawn.kept is None:
            return None
        kept, places = part.drawn.kept, torch.meshgrid(*map(torch.tensor, part.where), indexing="ij")
        for dim, indices in enumerate(part.where):
            if kept.shape[dim] > len(indices):  # a module had all rows
                kept = kept.index_select(dim, torch.tensor(indices))
        mask[places] = kept
        covered[places] = True
    return mask if covered.all() or any(part.keys for part in site.parts) else None


def kept_too_few_or_many(sites: Sequence[Site]) -> float:
    """Return how many standard deviations the number of kept elements is away from what the rates say."""
    excess = variance = 0.0
    for site in sites:
        for part in {part.where: part for part in site.parts}.values():
            if part.drawn.kept is not None:
                count, rate = part.drawn.kept.numel(), part.drawn.rate
                excess += int(part.drawn.kept.sum()) - count * (1 - rate)
                variance += count * rate * (1 - rate)
    return abs(excess) / variance**0.5 if variance else 0.0

"""Families: layers of a block whose features form the same units, and how the units lie along each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from autopar.tools.derivation.components import unique_pairs
from autopar.tools.derivation.decide import components
from autopar.tools.derivation.decisions import Trace

__all__ = ["Family", "Member", "families"]


@dataclass(eq=False)
class Member:
    """One dim of what a family shards.

    Attributes:
        path: of a layer or norm, or the name of a parameter.
        kind: column, row, norm, or parameter.
        line: the component of each place along the dim.
        dim: of a parameter.
        widths: of one unit, in each run of all units.
    """

    path: str
    kind: str
    line: torch.Tensor
    dim: int = 0
    widths: tuple[int, ...] = ()


@dataclass(eq=False)
class Family:
    """Members whose components are the same.

    Attributes:
        units: their components, in order.
        gathered: what forward does between them wants all units: they are sharded, and gathered for it.
    """

    block: str
    members: list[Member]
    units: list[int] = field(default_factory=list)
    gathered: bool = False

    @property
    def columns(self) -> list[str]:
        """The paths of its columns."""
        return [member.path for member in self.members if member.kind == "column"]


def families(seen: Trace, blocks: tuple[str, ...]) -> tuple[list[Family], list[str]]:
    """Return the families of all blocks, and the columns of those whose units lie in no order that a rule can say."""
    _tie(seen)
    found: list[Family] = []
    bad: list[str] = []
    members = list(_members(seen))
    for block in (*blocks, ""):
        own = [
            m for m in members if (m.path.startswith(block + ".") if block else not m.path.startswith(_dots(blocks)))
        ]
        for family in _grouped(block, own):
            if not block:  # a table outside the blocks: its units are those of some block
                near = next((f for f in found if set(f.units) & set(_units(family.members))), None)
                family.units = near.units if near is not None else []
            rows = [m for m in family.members if m.kind == "row"] or [
                m for m in family.members if m.kind == "parameter"
            ]
            family.units = family.units or list(dict.fromkeys(x for x in rows[0].line.tolist()) if rows else ())
            ok = len(family.units) > 1
            for member in family.members:
                widths = _widths(member.line.tolist(), family.units) if ok else None
                if widths is None:
                    ok = False
                    break
                member.widths = widths
            if ok:
                found.append(family)
            else:
                bad += [m.path for m in family.members if m.kind == "column" or m.path in seen.tracking.first_of]
    return found, bad


def _tie(seen: Trace) -> None:
    """Put together the units of blocks that read one parameter, each unit a place of its own."""
    tracking = seen.tracking
    for dims in tracking.touched.values():
        for events in dims:
            maps = []
            for pairs in events:
                own = unique_pairs(pairs[:, 0], tracking.components.of(pairs[:, 1]))
                if len(own[:, 0].unique()) == len(own) and len(own[:, 1].unique()) > 1:
                    maps.append(own)
            if len(maps) == len(events) > 1 and all(torch.equal(m[:, 0], maps[0][:, 0]) for m in maps):
                for other in maps[1:]:
                    tracking.components.join(maps[0][:, 1], other[:, 1])


def _dots(blocks: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(block + "." for block in blocks)


def _members(seen: Trace) -> Iterator[Member]:
    tracking = seen.tracking
    for path in seen.sources:
        yield Member(path, "column", components(seen, path))
    for path, line in seen.sinks.items():
        yield Member(path, "row", tracking.components.of(line))
    for path, line in seen.norms.items():
        yield Member(path, "norm", tracking.components.of(line))
    norms = {f"{path}." for path in seen.norms}
    for name, dims in tracking.touched.items():
        if any(name.startswith(norm) for norm in norms):
            continue
        found = [(dim, own) for dim in range(len(dims)) if (own := _line(seen, name, dim)) is not None]
        if len(found) == 1:
            yield Member(name, "parameter", found[0][1], found[0][0])


def _line(seen: Trace, name: str, dim: int) -> torch.Tensor | None:
    """The component at each place of a parameter along ``dim``; None if places have several, or all the same."""
    tracking = seen.tracking
    pairs = (
        torch.cat(tracking.touched[name][dim]) if tracking.touched[name][dim] else torch.zeros(0, 2, dtype=torch.long)
    )
    pairs = unique_pairs(pairs[:, 0], tracking.components.of(pairs[:, 1]))
    size = tracking.shapes[name][dim]
    if len(pairs) != size or not torch.equal(pairs[:, 0], torch.arange(size)) or len(pairs[:, 1].unique()) == 1:
        return None
    return pairs[:, 1]


def _units(members: list[Member]) -> list[int]:
    return list(dict.fromkeys(x for member in members for x in member.line.tolist()))


def _grouped(block: str, members: list[Member]) -> list[Family]:
    groups: list[tuple[set[int], list[Member]]] = []
    for member in members:
        own = set(member.line.tolist())
        touching = [group for group in groups if group[0] & own]
        for group in touching:
            groups.remove(group)
        groups.append((own.union(*(g[0] for g in touching)), [*(m for g in touching for m in g[1]), member]))
    return [Family(block, group[1]) for group in groups]


def _widths(line: list[int], units: list[int]) -> tuple[int, ...] | None:
    """How wide each unit is in each run of all units; None if the line is no such runs."""
    place, widths = 0, list[int]()
    while place < len(line):
        width = 0
        while place + width < len(line) and line[place + width] == units[0]:
            width += 1
        if width == 0:
            return None
        for unit in units:
            if line[place : place + width] != [unit] * width:
                return None
            place += width
        widths.append(width)
    return tuple(widths)

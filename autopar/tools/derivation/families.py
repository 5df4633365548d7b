"""Families: layers of a block whose features form the same units, how units lie along each, and names for the units.

Counts are written by the name of a config's attribute where one has the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.policy.match import config_of
from autopar.tools.derivation.block_lists import BlockList
from autopar.tools.derivation.decide import components
from autopar.tools.derivation.marks import unique_pairs
from autopar.tools.derivation.trace import Trace

_KEYS = ("key_value", "kv")
_SHORT = ("n_q", "n_kv")  # of heads


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
    members, inside = list(_members(seen)), tuple(f"{block}." for block in blocks)
    for block in (*blocks, ""):
        own = [m for m in members if (m.path.startswith(block + ".") if block else not m.path.startswith(inside))]
        for family in _grouped(block, own):
            units = {x for member in family.members for x in member.line.tolist()}
            if not block:  # a table outside the blocks: its units are those of some block
                near = next((f for f in found if set(f.units) & units), None)
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
    """Return how wide each unit is in each run of all units; None if the line does not consist of such runs."""
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


@dataclass
class Named:
    """A family of a list of blocks, with names for its units.

    Attributes:
        unit: of its components; ``heads``: of query heads where several follow one component.
        ratio: how many of those.
        counts: unit -> its entry under ``units``.
    """

    of_blocks: dict[str, Family]
    unit: str
    heads: str = ""
    ratio: int = 1
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Family:
        """The family in the first of the blocks that have it."""
        return next(iter(self.of_blocks.values()))

    @property
    def gathered(self) -> bool:
        """Whether all units are gathered between its columns and rows."""
        return self.first.gathered

    def parts(self, widths: tuple[int, ...]) -> list[str]:
        """Write runs of units as a rule does."""
        smallest = _smallest(self.first)
        wide = [bool(self.heads) and w % self.ratio == 0 and w >= self.ratio * smallest for w in widths]
        each = [w // self.ratio if big else w for w, big in zip(widths, wide, strict=True)]
        names = [self.heads if big else self.unit for big in wide]
        if len(set(each)) == 1:
            return names
        return [f"{name} * {w}" for name, w in zip(names, each, strict=True)]


def _smallest(family: Family) -> int:
    layers = [m for m in family.members if m.kind in ("column", "row")]
    return min(w for m in layers or family.members for w in m.widths)


def named_families(root: nn.Module, each: BlockList, found: list[Family], seen: Trace) -> list[Named]:
    """Return the families of a list of blocks, alike ones of all blocks together."""
    owner = root.get_submodule(each.owner)
    config = config_of(owner)
    result: list[Named] = []
    known: dict[str, Named] = {}
    for block in each.blocks:
        for family in (f for f in found if f.block == block):
            rows = [seen.names(m.path) for m in family.members if m.kind == "row"]
            rows = rows or [seen.names(m.path) for m in family.members if m.kind == "parameter"]
            other = next((known[row] for row in rows if row in known), None)
            if other is None:
                other = Named({block: family}, "")
            else:
                one = other.of_blocks.get(block)
                both = family if one is None else replace(one, members=[*one.members, *family.members])
                other.of_blocks[block] = both
            known |= dict.fromkeys(rows, other)
    for named in {id(named): named for named in known.values()}.values():
        _name(root, config, named, result)
        result.append(named)
    return result


def _name(root: nn.Module, config: Any, named: Named, others: list[Named]) -> None:
    blocks = [root.get_submodule(block) for block in named.of_blocks]
    counts = [len(family.units) for family in named.of_blocks.values()]
    first = named.first
    near = next((m.path[len(first.block) + 1 :] for m in first.members if m.kind == "column"), "")
    single = all(w == 1 for f in named.of_blocks.values() for m in f.members for w in m.widths)
    taken = {unit for other in others for unit in other.counts}
    if single:
        name = "expert_ffn" if any("expert" in m.path for m in first.members) else "ffn"
        named.unit = name if name not in taken else _free(name, taken)
        named.counts[named.unit] = "inferred"
        return
    row_path = next((m.path[len(first.block) + 1 :] for m in first.members if m.kind == "row" and m.widths == (1,)), "")
    if row_path and "in_features" in vars(blocks[0].get_submodule(row_path)):  # gate0 up0 gate1 up1 ...
        named.unit = _free("ffn", taken)
        named.counts[named.unit] = f"block.{row_path}.in_features"
        return
    keys_count = _count_of(counts, config, blocks, "heads", near, loose=True)
    row = next((m.widths[0] for m in first.members if m.kind == "row"), 0)
    smallest = _smallest(first)
    if row > smallest and row % smallest == 0:
        heads = [count * (row // smallest) for count in counts]
        written = _count_of(heads, config, blocks, "heads", near)
        if not written.isdigit():
            named.ratio = row // smallest
            named.unit, named.heads = _free("kv_heads", taken), _free("heads", taken)
            named.counts[named.unit] = {"count": _count_of(counts, config, blocks, "keys", near), "replicate": True}
            named.counts[named.heads] = {"count": written, "follows": named.unit}
            return
    named.unit = _free("heads", taken)
    named.counts[named.unit] = keys_count


def _free(name: str, taken: Iterable[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _integers(config: Any) -> dict[str, int]:
    """Return the integers of a config, also those that it knows under a second name."""
    found = {name: value for name, value in vars(config).items() if type(value) is int and value > 1 and name[0] != "_"}
    for other in getattr(config, "attribute_map", {}):
        value = getattr(config, other, None)
        if type(value) is int and value > 1:
            found.setdefault(other, value)
    return found


def _integers_of_modules(block: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Yield the integer attributes of the modules in a block: path, name, value."""
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if type(value) is int and value > 1 and not name.startswith("_"):
                yield path, name, value


def _count_of(
    value: Sequence[int], config: Any, blocks: Sequence[nn.Module], like: str, near: str = "", *, loose: bool = False
) -> str:
    """Return how a policy writes a count that is ``value`` in each block.

    Args:
        like: ``heads``, ``keys`` (heads of keys and values) or ``width``: which names are preferred.
        loose: any attribute will do that is the only one of that value.
        near: a path in the block; attributes of modules near it are preferred.
    """
    if len(set(value)) == 1:
        named = [name for name, number in _integers(config).items() if number == value[0] and _fits(name, like)]
        if named:
            return min(named, key=lambda name: _rank(name, like))
    known: set[tuple[str, str]] | None = None
    for number, block in zip(value, blocks, strict=True):
        own = {
            (path, name) for path, name, found in _integers_of_modules(block) if found == number and _fits(name, like)
        }
        known = own if known is None else known & own
    if known:
        path, name = min(known, key=lambda one: (_rank(one[1], like), -_common(one[0], near), one))
        return ".".join(part for part in ("block", path, name) if part)
    same = [name for name, number in _integers(config).items() if len(set(value)) == 1 and number == value[0]]
    if loose and len(same) == 1:
        return same[0]
    if len(set(value)) == 1 and (found := _quotient(value[0], _integers(config))):
        return found
    return str(value[0])


def _fits(name: str, like: str) -> bool:
    if like in ("heads", "keys"):
        return (
            (name in _SHORT or any(part in name for part in ("head", "group", "num_k", "num_v")))
            and "dim" not in name
            and "layer" not in name
        )
    return True


def _rank(name: str, like: str) -> tuple[bool, bool, int]:
    keys = any(part in name for part in _KEYS)
    return keys != (like == "keys"), not name.startswith(("num", "n_")), len(name)


def _common(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _quotient(value: int, known: dict[str, int]) -> str:
    for top, a in known.items():
        for bottom, b in known.items():
            if ("dim" in bottom or "size" in bottom) and a == value * b and b > 1 and "head" in bottom:
                return f"{top} / {bottom}"
    return ""

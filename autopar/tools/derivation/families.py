"""Choose the layers that become columns, and group layers with the same units into families.

At first all layers are candidates. Each trace excludes layers that cannot be columns, until no more are excluded. The
units of a family get a name and a count: a config attribute with this value, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import torch
from torch import nn

from autopar.compat.tensors import own_parameters
from autopar.plan.matching import around
from autopar.policy.match import config_of
from autopar.tools.derivation.feature_tracking import unique_pairs
from autopar.tools.derivation.trace import BlockList, Decisions, Trace, Traced, trace, underivable

_ROUNDS = 60
_MOST_ENTERED = 3


def decide(models: list[Traced], blocks: tuple[str, ...], decisions: Decisions) -> tuple[Trace, Decisions]:
    """Return a trace in which a row follows every column, and its decisions."""
    for _ in range(_ROUNDS):
        seen = trace(models, blocks, decisions)
        if seen.tracking.bare_sinks:  # trace again with joined features
            seen = trace(models, blocks, decisions, seen)
        other = _next(models[0].model, decisions, seen)
        if other is None:
            return seen, decisions
        decisions = other
    raise underivable(models[0].model, f"{_ROUNDS} traces did not determine which layers are columns")


def _next(root: nn.Module, decisions: Decisions, seen: Trace) -> Decisions | None:
    """Return the decisions to try next; None if the current decisions are consistent."""
    tracking = seen.tracking
    called = set(seen.order)
    around_it = {path: next((p for p in (path, *around(path)) if p in called), "") for path in tracking.first_of}
    if cut_off := [path for path, holder in around_it.items() if holder not in seen.proven]:
        return decisions.without(map(seen.names, cut_off))  # the surrounding model failed later
    idle = []  # regions with unused modules, whose partial sums are unknown
    for path in (p for p, _ in root.named_modules() if seen.names(p) in decisions.regions and p in called):
        if any(f"{path}.{below}" not in called for below, _ in root.get_submodule(path).named_modules() if below):
            idle.append(f"{path}.")
    if unknown := [path for path in tracking.first_of if path.startswith(tuple(idle))]:
        return decisions.without(map(seen.names, unknown))
    holders = {name: name.rpartition(".")[0] for name in tracking.bare_sinks}
    regions = {seen.names(holder) for holder in holders.values()} - decisions.regions
    if regions:
        dims = {name: [p.ndim for p in own_parameters(root.get_submodule(holder)).values() if p is not None]
                for name, holder in holders.items()}  # fmt: skip
        single = [name for name, own in dims.items() if max(own) < 3 and sum(ndim >= 2 for ndim in own) < 2]
        if single:
            features = torch.cat([tracking.bare_sinks[name] for name in single])
            return decisions.without(map(seen.names, sources_of(seen, features)))
        return replace(decisions, regions=decisions.regions | regions)
    enters: set[str] = set()
    for event in tracking.events:
        block = seen.names.block_of(event.where)
        few = block is not None and 0 < len(event.producers) <= _MOST_ENTERED
        if few and all(path.startswith(f"{block}.") for path in event.producers):
            enters |= {seen.names(path) for path in event.producers}
        elif enters - decisions.enters:
            break
        elif found := [p for p in sources_of(seen, event.features) if tracking.first_of[p] < event.before]:
            return decisions.without(map(seen.names, found))
        elif decisions.enters and block is not None:  # entered the region, but no row follows
            near = [path for path in tracking.first_of if path.startswith(block + ".")]
            return decisions.without(map(seen.names, near or list(tracking.first_of)))
    if enters - decisions.enters:
        return replace(decisions, enters=decisions.enters | enters)
    if contradictory := {seen.names(path) for path in seen.contradictory} - decisions.replicated:
        return replace(decisions, replicated=decisions.replicated | contradictory, enters=frozenset())
    if few_units := _too_few(seen):
        return decisions.without(map(seen.names, few_units))
    return None


def sources_of(seen: Trace, features: torch.Tensor) -> list[str]:
    """Return the columns and bare parameters with a feature in the components of ``features``."""
    tracking = seen.tracking
    wanted = tracking.components.of(features).unique()
    wanted = wanted[wanted != 0]
    return [path for path in tracking.first_of if bool(torch.isin(components(seen, path), wanted).any())]


def components(seen: Trace, source: str) -> torch.Tensor:
    """Return the component of each feature of a column."""
    tracking = seen.tracking
    first = tracking.first_of[source]
    return tracking.components.of(torch.arange(first, first + tracking.count_of[source]))


def _too_few(seen: Trace) -> list[str]:
    """Return columns that have a single unit, or that no row follows."""
    tracking = seen.tracking
    touched = [pairs[:, 1] for name in tracking.bare_sinks for dim in tracking.touched.get(name, []) for pairs in dim]
    closed = [tracking.components.of(line) for line in (*seen.sinks.values(), *touched)]
    for path in tracking.first_of:
        found = components(seen, path)
        if len(found.unique()) == 1 or not closed or not bool(torch.isin(found, torch.cat(closed)).all()):
            return sources_of(seen, found)
    return []


_KEYS = ("key_value", "kv")
_SHORT = ("n_q", "n_kv")  # short names of head counts


@dataclass(eq=False)
class Member:
    """One dim of a column, row, norm or parameter that a family shards.

    Attributes:
        line: The component of each index along the dim.
        widths: The width of one unit, for each run of all units.
    """

    path: str
    kind: str
    line: torch.Tensor
    dim: int = 0
    widths: tuple[int, ...] = ()


@dataclass(eq=False)
class Family:
    """Members with the same components.

    Attributes:
        units: The components, in order.
        gathered: A flag, set if all units are gathered between the sharded layers.
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
    """Return the families of all blocks, and the columns with an unsupported order of units."""
    _tie(seen)
    found: list[Family] = []
    bad: list[str] = []
    members, inside = list(_members(seen)), tuple(f"{block}." for block in blocks)
    for block in (*blocks, ""):
        own = [m for m in members if (m.path.startswith(block + ".") if block else not m.path.startswith(inside))]
        for family in _grouped(block, own):
            units = {x for member in family.members for x in member.line.tolist()}
            if not block:  # a parameter outside the blocks uses the units of a block
                family.units = next((f.units for f in found if set(f.units) & units), [])
            first = next((m for kind in ("row", "parameter") for m in family.members if m.kind == kind), None)
            family.units = family.units or list(dict.fromkeys(first.line.tolist()) if first is not None else ())
            widths = [_widths(m.line.tolist(), family.units) for m in family.members if len(family.units) > 1]
            if not widths or None in widths:
                bad += [m.path for m in family.members if m.kind == "column" or m.path in seen.tracking.first_of]
                continue
            for member, known in zip(family.members, widths, strict=True):
                member.widths = known or ()
            found.append(family)
    return found, bad


def _tie(seen: Trace) -> None:
    """Join the units of blocks that share a parameter, if each unit has a separate index in it."""
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
    for kind, lines in (("row", seen.sinks), ("norm", seen.norms)):
        for path, line in lines.items():
            yield Member(path, kind, tracking.components.of(line))
    norms = {f"{path}." for path in seen.norms}
    for name, dims in tracking.touched.items():
        if any(name.startswith(norm) for norm in norms):
            continue
        found: list[Member] = []  # dims with one component per index, and several components
        for dim, events in enumerate(dims):
            pairs = torch.cat([torch.zeros(0, 2, dtype=torch.long), *events])
            places, own = unique_pairs(pairs[:, 0], tracking.components.of(pairs[:, 1])).unbind(1)
            if torch.equal(places, torch.arange(tracking.shapes[name][dim])) and len(own.unique()) > 1:
                found.append(Member(name, "parameter", own, dim))
        if len(found) == 1:
            yield found[0]


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
    """Return the width of a unit in each run of all units; None if the line has a different form."""
    place, widths = 0, list[int]()
    while place < len(line):
        widths.append(next((n for n, unit in enumerate(line[place:]) if unit != units[0]), len(line) - place))
        run = [unit for unit in units for _ in range(widths[-1])]
        if not run or line[place : place + len(run)] != run:
            return None
        place += len(run)
    return tuple(widths)


@dataclass
class Named:
    """A family over a list of blocks, with names for its units.

    Attributes:
        unit: The name of a component.
        heads: The name of the query heads, if a component has ``ratio`` query heads.
        counts: Unit -> its value in the policy's section ``units``.
    """

    of_blocks: dict[str, Family]
    unit: str
    heads: str = ""
    ratio: int = 1
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Family:
        """The family of the first block."""
        return next(iter(self.of_blocks.values()))

    @property
    def gathered(self) -> bool:
        """Whether the units are gathered between columns and rows."""
        return self.first.gathered

    def parts(self, widths: tuple[int, ...]) -> list[str]:
        """Return the names of runs of units for a rule."""
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
    """Return the families of a list of blocks. Equal families of several blocks are one item."""
    owner = root.get_submodule(each.owner)
    config = config_of(owner)
    result: list[Named] = []
    known: dict[str, Named] = {}
    for block in each.blocks:
        for family in (f for f in found if f.block == block):
            rows = [seen.names(m.path) for m in family.members if m.kind == "row"]
            rows = rows or [seen.names(m.path) for m in family.members if m.kind == "parameter"]
            other = next((known[row] for row in rows if row in known), None) or Named({}, "")
            one = other.of_blocks.get(block)
            other.of_blocks[block] = family if one is None else replace(one, members=[*one.members, *family.members])
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
        named.unit = _free("expert_ffn" if any("expert" in m.path for m in first.members) else "ffn", taken)
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
    return next(free for free in chain((name,), (f"{name}_{number}" for number in count(2))) if free not in taken)


def _integers(config: Any) -> dict[str, int]:
    """Return the integers of a config by name, including names of its ``attribute_map``."""
    found = {name: value for name, value in vars(config).items() if type(value) is int and value > 1 and name[0] != "_"}
    for other in getattr(config, "attribute_map", {}):
        value = getattr(config, other, None)
        if type(value) is int and value > 1:
            found.setdefault(other, value)
    return found


def _count_of(
    value: Sequence[int], config: Any, blocks: Sequence[nn.Module], like: str, near: str = "", *, loose: bool = False
) -> str:
    """Return a policy expression for a count, which is ``value[n]`` in block ``n``.

    Args:
        like: The preferred names: ``heads``, or ``keys`` for key-value heads.
        near: A path in the block. Attributes of modules near it are preferred.
        loose: A flag to accept an attribute of any name, if it is the only attribute with this value.
    """
    integers = _integers(config) if len(set(value)) == 1 else {}
    same = [name for name, number in integers.items() if number == value[0]]
    if named := [name for name in same if _fits(name)]:
        return min(named, key=lambda name: _rank(name, like))
    known = set.intersection(*(_named_so(number, block) for number, block in zip(value, blocks, strict=True)))
    if known:
        path, name = min(known, key=lambda one: (_rank(one[1], like), -_common(one[0], near), one))
        return ".".join(part for part in ("block", path, name) if part)
    if loose and len(same) == 1:
        return same[0]
    quotients = (
        f"{top} / {bottom}"
        for top, a in integers.items()
        for bottom, b in integers.items()
        if "head" in bottom and ("dim" in bottom or "size" in bottom) and a == value[0] * b
    )
    return next(quotients, str(value[0]))


def _named_so(count: int, block: nn.Module) -> set[tuple[str, str]]:
    """Return path and name of the attributes in a block with this value."""
    return {
        (path, name)
        for path, module in block.named_modules()
        for name, found in vars(module).items()
        if type(found) is int and found == count > 1 and not name.startswith("_") and _fits(name)
    }


def _common(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _fits(name: str) -> bool:
    counts = name in _SHORT or any(part in name for part in ("head", "group", "num_k", "num_v"))
    return counts and "dim" not in name and "layer" not in name


def _rank(name: str, like: str) -> tuple[bool, bool, int]:
    keys = any(part in name for part in _KEYS)
    return keys != (like == "keys"), not name.startswith(("num", "n_")), len(name)

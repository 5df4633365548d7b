"""Families of a list of blocks with names for their units, as a policy writes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.policy.described_model import config_of
from autopar.tools.derivation.block_lists import BlockList
from autopar.tools.derivation.counts import count_of
from autopar.tools.derivation.decisions import Trace
from autopar.tools.derivation.families import Family

__all__ = ["Named", "named_families"]


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
                other.of_blocks[block] = _merged(other.of_blocks.get(block), family)
            known |= dict.fromkeys(rows, other)
    for named in {id(named): named for named in known.values()}.values():
        _name(root, config, named, result)
        result.append(named)
    return result


def _merged(one: Family | None, other: Family) -> Family:
    return other if one is None else replace(one, members=[*one.members, *other.members])


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
    keys_count = count_of(counts, config, blocks, "heads", near, loose=True)
    row = next((m.widths[0] for m in first.members if m.kind == "row"), 0)
    smallest = _smallest(first)
    if row > smallest and row % smallest == 0:
        heads = [count * (row // smallest) for count in counts]
        written = count_of(heads, config, blocks, "heads", near)
        if not written.isdigit():
            named.ratio = row // smallest
            named.unit, named.heads = _free("kv_heads", taken), _free("heads", taken)
            named.counts[named.unit] = {"count": count_of(counts, config, blocks, "keys", near), "replicate": True}
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

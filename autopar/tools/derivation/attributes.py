"""Numbers of modules that ``forward`` reads and that must become a rank's share: tried in the dry run, fewest first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.foreign.tensors import own_modules, own_parameters
from autopar.policy.match import config_of
from autopar.tools.derivation.block_lists import BlockList
from autopar.tools.derivation.decisions import Names
from autopar.tools.derivation.families import Named

_NEVER = re.compile(
    r"head_dim|head_size$|head_width|kernel|chunk|rank|layer|state|hidden_size|d_model|experts|top_k|window"
)
_MOST = 5  # candidates of one module of which all subsets are tried


@dataclass(frozen=True)
class Candidate:
    """An attribute that may be a count of units.

    Attributes:
        module: path below the block, with ``*``.
        name: of the attribute; ``config.NAME`` for one of the module's config.
        share: how a policy writes it.
        wide: it counts features, not units.
    """

    module: str
    name: str
    share: Any
    wide: bool

    @property
    def key(self) -> str:
        """The entry under ``attributes``."""
        return ".".join(part for part in (self.module, self.name) if part)


def candidates(root: nn.Module, each: BlockList, named: list[Named], names: Names) -> dict[str, list[Candidate]]:
    """Return the attributes of modules in the blocks that have the value of some count: module -> candidates."""
    found: dict[str, dict[str, Candidate]] = {}
    values: dict[str, set[int]] = {}
    for block in each.blocks:
        length = len(block.split("."))
        for path, module in root.get_submodule(block).named_modules():
            full = f"{block}.{path}" if path else block
            families = [n for n in named if block in n.of_blocks and not n.gathered and _around(full, block, n)]
            shown = ".".join(names(full).split(".")[length:])
            for attribute, value in _integers(module):
                key = f"{shown}.{attribute}"
                shares = [share for n in families if (share := _share(value, n, block, attribute)) is not None]
                if shares:
                    values.setdefault(key, set()).add(value)
                    found.setdefault(shown, {}).setdefault(attribute, Candidate(shown, attribute, *shares[0]))
    return {module: list(own.values()) for module, own in found.items()}


def _integers(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, value in vars(module).items() if own_modules(module) or not own_parameters(module) else ():
        if type(value) is int and value > 1 and not name.startswith("_") and not _NEVER.search(name):
            yield name, value
    if "config" in vars(module):
        for name, value in vars(config_of(module)).items():
            if type(value) is int and value > 1 and "head" in name and "dim" not in name:
                yield f"config.{name}", value


def _around(path: str, block: str, named: Named) -> bool:
    """Return whether a module holds layers of a family (or is one of those that do)."""
    members = [m.path for m in named.of_blocks[block].members]
    return any(member.startswith(path + ".") for member in members)


def _share(value: int, named: Named, block: str, name: str) -> tuple[Any, bool] | None:
    family = named.of_blocks[block]
    count = len(family.units)
    if named.heads and value == named.ratio and ("group" in name or "rep" in name):
        return f"{named.heads} / {named.unit}", False
    if value == count * named.ratio and named.heads:
        return named.heads, False
    if value == count and not all(w == 1 for m in family.members for w in m.widths):
        return named.unit, False
    if named.heads and value == named.ratio:
        return f"{named.heads} / {named.unit}", False
    for member in family.members:
        total = count * sum(member.widths)
        if value == total and len(member.widths) > 1:
            return named.parts(member.widths), True
        if value in {count * w for w in member.widths}:
            wide = (
                named.heads
                and value % (count * named.ratio) == 0
                and value == max(count * w for m in family.members for w in m.widths)
            )
            return (named.heads if wide else named.unit), True
    return None


def choices(own: list[Candidate]) -> Iterator[tuple[Candidate, ...]]:
    """Yield sets of attributes to divide: none, counts, counts and widths, then all others."""
    config = [c for c in own if c.name.startswith("config.")]
    own = [c for c in own if c not in config]
    counts = [c for c in own if not c.wide]
    wide = [c for c in own if c.wide]
    tried: list[tuple[Candidate, ...]] = []
    usual = [
        (),
        tuple(counts),
        tuple(counts + wide),
        tuple(wide),
        tuple(config),
        tuple(counts + config),
        tuple(counts + wide + config),
    ]
    rest = own if len(own) <= _MOST else []
    subsets = [s for size in range(1, len(rest) + 1) for s in itertools.combinations(rest, size)]
    for choice in (*usual, *subsets):
        if choice not in tried:
            tried.append(choice)
            yield choice

"""The rules of one block: of what its families shard, and of what is used whole inside of their regions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.foreign.modules import own_modules, own_parameters
from autopar.tools.derivation.decisions import Decisions, Trace, is_linear
from autopar.tools.derivation.families import Member, Named

__all__ = ["rule_of", "rules_of_block"]


def rules_of_block(
    root: nn.Module, block: str, named: list[Named], seen: Trace, decisions: Decisions
) -> dict[str, Any]:
    """Return path from the root -> rule, for what is not simply replicated in a block."""
    rules: dict[str, Any] = {}
    own = [n for n in named if block in n.of_blocks]
    for each in own:
        for member in each.of_blocks[block].members:
            rules.update(_gathered_rule(member, each) if each.gathered else rule_of(root, member, each, seen))
    own = [n for n in own if not n.gathered]
    for name in sorted(seen.tracking.inside):
        holder, _, _ = name.rpartition(".")
        if not name.startswith(block + ".") or name in rules or holder in rules or not own:
            continue
        unit = _nearest(own, block, name, seen).unit
        module = root.get_submodule(holder)
        listed = [f"{holder}.{n}" for n, p in own_parameters(module).items() if p is not None]
        if name in seen.tracking.once:
            rules[name] = {"once": unit}
        elif (
            not own_modules(module)
            and set(listed) <= seen.tracking.inside
            and not set(listed) & set(rules)
            and not set(listed) & seen.tracking.once
        ):
            rules[holder] = {"enter_output": unit} if holder in seen.entered else {"replicated": unit}
        else:
            rules[name] = {"replicated": unit}
    for path in seen.entered:
        if path.startswith(block + ".") and path not in rules and own:
            rules[path] = {"enter_output": _nearest(own, block, path, seen).unit}
    for path, _ in root.named_modules():
        if path.startswith(block + ".") and seen.names(path) in decisions.regions:
            near = [n for n in own if any(m.path.startswith(path + ".") for m in n.of_blocks[block].members)]
            if near:
                rules[path] = {"region": near[0].unit}
    return rules


def _nearest(named: list[Named], block: str, path: str, seen: Trace) -> Named:
    """The family that a module was computed with; else the one that lies beside it."""
    tracking = seen.tracking
    met = tracking.near.get(path, 0)
    unit = int(tracking.components.of(torch.tensor(met))) if met else 0
    if unit and (found := [each for each in named if unit in each.of_blocks[block].units]):
        return found[0]

    def common(each: Named) -> int:
        own = path.split(".")
        return max(
            sum(1 for a, b in zip(own, m.path.split("."), strict=False) if a == b)
            for m in each.of_blocks[block].members
        )

    return max(named, key=common)


def rule_of(root: nn.Module, member: Member, named: Named, seen: Trace) -> dict[str, Any]:
    """Return the rule of what a family shards, by its path from the root."""
    parts = named.parts(member.widths)
    listed: Any = parts[0] if len(parts) == 1 else parts
    if member.kind == "column":
        extra = {"inside": True} if seen.sources[member.path] else {}
        return {member.path: {"column": listed, **extra}}
    if member.kind == "row":
        extra = {"enter_output": True} if member.path in seen.entered else {}
        return {member.path: {"row": listed, **extra}}
    if member.kind == "norm":
        numbers = [v for k, v in vars(root.get_submodule(member.path)).items() if "group" in k and type(v) is int]
        count = len(named.first.units)
        grouped = any(value in (count, len(member.line) // count) and value > 1 for value in numbers)
        return {member.path: {"norm_over": listed, **({"within": named.unit} if grouped else {})}}
    holder, _, _ = member.path.rpartition(".")
    module = root.get_submodule(holder)
    if _is_leaf(module):
        return {holder: {"sharded": listed, **({"dim": member.dim} if member.dim else {})}}
    return {member.path: {"sharded": listed, **({"dim": member.dim} if member.dim else {})}}


def _gathered_rule(member: Member, named: Named) -> dict[str, Any]:
    parts = named.parts(member.widths)
    more = {"column": "gather_output", "row": "split_input"}.get(member.kind)
    return {member.path: {member.kind: parts[0] if len(parts) == 1 else parts, more: True}} if more else {}


def _is_leaf(module: nn.Module) -> bool:
    return not own_modules(module) and (is_linear(module) or isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d))

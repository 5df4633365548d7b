"""Regions, checked by names and counts alone: a column needs its row, and the row reads what the column makes."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import PolicyError
from autopar.plan.matching import RuleMatch
from autopar.plan.plan import ModulePlan
from autopar.policy.schema import Rule

__all__ = ["check_regions"]


def check_regions(matches: list[RuleMatch], modules: Mapping[str, ModulePlan]) -> None:
    """Check that inside one scope a row closes what a column opens, and that heads that follow each other agree.

    Raises:
        PolicyError: with the rule that stands alone.
    """
    scopes: dict[str, list[RuleMatch]] = {}
    for match in matches:
        scopes.setdefault(match.scope.name, []).append(match)
    of_towers = {(id(u.scope.table), u.scope.table.family(x)) for u in matches if _opens(u.rule) for x in u.rule.units}
    for name, inside in scopes.items():
        table = inside[0].scope.table
        families = [(table.family(unit), match) for match in inside for unit in match.rule.units]
        opened = {family: match for family, match in families if _opens(match.rule)}
        closed = {family: match for family, match in families if _closes(match.rule)}
        entered = {family for family, m in families if m.rule.kind in _ENTERS and not m.rule.closes} | {*opened}
        for family, match in opened.items():
            if family not in closed:
                raise _alone(
                    match, "opens a region sharded by", "that no row closes; add a row rule, or gather_output: true"
                )
        for family, match in closed.items():
            if family not in entered:
                advice = "that no column opens; add a column rule, or split_input: true"
                raise _alone(match, "closes a region sharded by", advice)
        for match in inside:
            if match.rule.kind in ("replicated", "once") and match.rule.units:
                family = table.family(match.rule.units[0])
                for_blocks = name.endswith("/every_stage") and (id(table), family) in of_towers
                if family not in entered and not for_blocks:
                    raise _alone(match, "works on activations sharded by", "but no column opens them", ",")
        _check_counts(inside, modules)


def _alone(match: RuleMatch, does: str, advice: str, comma: str = "") -> PolicyError:
    return PolicyError(f"{match.shown} {does} '{match.rule.units[0]}'{comma} {advice}", match.rule.where)


_ENTERS = ("region", "enter_output", "sharded")


def _check_counts(inside: list[RuleMatch], modules: Mapping[str, ModulePlan]) -> None:
    """Check that a row reads as many units as some column makes (counts are inferred where a config has none)."""
    opened: dict[str, dict[int, RuleMatch]] = {}
    for opening in (True, False):
        for match in inside:
            plan = modules.get(match.path)
            if plan is None or plan.layout is None or not (_opens(match.rule) if opening else _closes(match.rule)):
                continue
            for block in plan.layout.blocks:
                known = opened.setdefault(block.unit, {})
                if opening:
                    known.setdefault(block.count, match)
                elif known and block.count not in known:
                    count, first = next(iter(known.items()))
                    raise PolicyError(
                        f"{match.shown} reads {block.count} '{block.unit}', but {first.shown} makes {count} "
                        f"({first.rule.where})",
                        match.rule.where,
                    )


def _opens(rule: Rule) -> bool:
    return rule.opens or (rule.kind == "column" and not rule.gather_output)


def _closes(rule: Rule) -> bool:
    return rule.closes or (rule.kind == "row" and not rule.split_input)

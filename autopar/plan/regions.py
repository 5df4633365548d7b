"""What names alone can show about regions: a column needs its row, and reads what it makes."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import PolicyError
from autopar.plan.matching import Use
from autopar.plan.plan import ModulePlan
from autopar.policy.schema import Rule

__all__ = ["check_regions"]


def check_regions(uses: list[Use], modules: Mapping[str, ModulePlan]) -> None:
    """Inside one scope what a column opens a row must close, and heads that follow each other agree.

    Raises:
        PolicyError: with the rule that stands alone.
    """
    scopes: dict[str, list[Use]] = {}
    for use in uses:
        scopes.setdefault(use.scope.name, []).append(use)
    of_towers = {(id(u.scope.table), u.scope.table.family(x)) for u in uses if _opens(u.rule) for x in u.rule.units}
    for inside in scopes.values():
        table = inside[0].scope.table
        opened = {table.family(u): use for use in inside for u in use.rule.units if _opens(use.rule)}
        closed = {table.family(u): use for use in inside for u in use.rule.units if _closes(use.rule)}
        entered = {
            table.family(u)
            for use in inside
            for u in use.rule.units
            if use.rule.kind in _ENTERS and not use.rule.closes
        }
        for family, use in opened.items():
            if family not in closed:
                raise PolicyError(
                    f"{use.shown} opens a region shared out by '{use.rule.units[0]}' that no row closes; "
                    "add a row rule, or gather_output: true",
                    use.rule.where,
                )
        for family, use in closed.items():
            if family not in opened and family not in entered:
                raise PolicyError(
                    f"{use.shown} closes a region shared out by '{use.rule.units[0]}' that no column opens; "
                    "add a column rule, or split_input: true",
                    use.rule.where,
                )
        for use in inside:
            if use.rule.kind in ("replicated", "once") and use.rule.units:
                family = table.family(use.rule.units[0])
                for_blocks = use.scope.name.endswith("/every_stage") and (id(table), family) in of_towers
                if family not in opened and family not in entered and not for_blocks:
                    raise PolicyError(
                        f"{use.shown} works on activations shared out by '{use.rule.units[0]}', "
                        "but no column opens them",
                        use.rule.where,
                    )
        _check_counts(inside, modules)


_ENTERS = ("region", "enter_output", "cut")


def _check_counts(inside: list[Use], modules: Mapping[str, ModulePlan]) -> None:
    """What a row reads must be as many units as some column makes (counts are inferred where a config has none)."""
    opened: dict[str, dict[int, Use]] = {}
    for opening in (True, False):
        for use in inside:
            plan = modules.get(use.path)
            if plan is None or plan.layout is None or not (_opens(use.rule) if opening else _closes(use.rule)):
                continue
            for block in plan.layout.blocks:
                known = opened.setdefault(block.unit, {})
                if opening:
                    known.setdefault(block.count, use)
                elif known and block.count not in known:
                    count, first = next(iter(known.items()))
                    raise PolicyError(
                        f"{use.shown} reads {block.count} '{block.unit}', but {first.shown} makes {count} "
                        f"({first.rule.where})",
                        use.rule.where,
                    )


def _opens(rule: Rule) -> bool:
    return rule.opens or (rule.kind == "column" and not rule.gather_output)


def _closes(rule: Rule) -> bool:
    return rule.closes or (rule.kind == "row" and not rule.split_input)

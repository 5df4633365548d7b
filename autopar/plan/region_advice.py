"""Advice for a region that a column opens and no row closes: which row was probably meant, and what to write."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.plan.matching import RuleMatch


def advise(opening: RuleMatch, unit: str, inside: Sequence[RuleMatch]) -> str:
    """Return a line to end the error on ``opening`` with, from the rules of its scope; empty if none is likely.

    Args:
        unit: the one that no row has.
    """
    table = opening.scope.table
    family = table.family(unit)
    beside = [match for match in inside if _parent(match) == _parent(opening)]
    for row in beside:
        if row.rule.kind != "row":
            continue
        if table.family(row.rule.units[0]) == family:
            return (
                f"\n  {row.shown} is a row of '{row.rule.units[0]}' with split_input: true, which is for an input that "
                f"arrives whole ({row.rule.where}); without it this row closes the region."
            )
        if advice := _grouped(opening, unit, row):
            return advice
    widths = {_size(match, 0) for match in beside if match.rule.kind == "column" and match.rule.units[:1] == (unit,)}
    for match in beside:
        if match.rule.kind == "replicated" and not match.rule.units and _size(match, 1) in widths - {None}:
            return (
                f"\n  {match.shown} reads {_size(match, 1)} features, as many as the region has, and is replicated "
                f"({match.rule.where}); {{row: {unit}}} closes the region."
            )
    return ""


def _grouped(opening: RuleMatch, few: str, row: RuleMatch) -> str:
    """Say that query heads have to follow KV heads, if their numbers allow it."""
    many = row.rule.units[0]
    fewer, more = opening.count(few), row.count(many)
    if fewer is None or more is None or more % fewer:
        return ""
    spec = opening.scope.table.specs[many]
    return (
        f"\n  {row.shown} closes a region of '{many}' ({row.rule.where}). In grouped-query attention each of the "
        f"{fewer} '{few}' serves {more // fewer} of the {more} '{many}', so they must follow:"
        f"\n    {many}: {{count: {spec.count}, follows: {few}}}   ({spec.where})"
    )


def _parent(match: RuleMatch) -> str:
    return match.path.rpartition(".")[0]


def _size(match: RuleMatch, dim: int) -> int | None:
    """Return the output (0) or input features (1) of a linear layer; None of another module."""
    names = ("out_features", "nf") if dim == 0 else ("in_features", "nx")
    return next((getattr(match.module, name) for name in names if hasattr(match.module, name)), None)

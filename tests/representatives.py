"""Which model types and policies stand for others where real ranks are needed."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.policy.load import own_policies
from autopar.policy.schema import Rule, Tower
from tests.changed import touched_policies

REPRESENTATIVES: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
"""Model type -> what it stands for; ``make test-all`` compares them with the reference model."""

IN_EVERY_RUN = (
    *("gpt2", "llama", "phi3", "qwen3", "falcon", "bert", "deberta-v2", "t5", "mixtral", "deepseek_v3", "mamba2"),
    *("llava", "qwen2_vl", "whisper"),
)
"""Representatives that ``make test`` compares with the plain model."""


def first_types(first: Collection[str], model_types: Sequence[str], *, later: str) -> list[Any]:
    """Return model types as parameters: the first ones and changed ones in the test's tier, others in a later one."""
    touched = touched_policies()
    changed = {each for name, policy in own_policies().items() if name in touched for each in policy.model_types}
    return _split({*first, *(changed if touched else ())}, model_types, later)


def first_policies(first: Collection[str], names: Sequence[str], *, later: str) -> list[Any]:
    """Return names of policies as :func:`first_types` does."""
    return _split({*first, *touched_policies()}, names, later)


def _split(first: Collection[str], names: Sequence[str], later: str) -> list[Any]:
    return [name if name in first else pytest.param(name, marks=pytest.mark.tier(later)) for name in names]


def one_of_each_structure(model_types: Collection[str]) -> list[str]:
    """Policies of these model types that hold a tower of another structure than those before."""
    found, seen = [], set[Any]()
    for name, policy in own_policies().items():
        structures = {_structure(tower) for tower in policy.towers}
        if set(policy.model_types) & set(model_types) and not structures <= seen:
            found.append(name)
            seen |= structures
    return found


def every_fourth(names: Sequence[str], start: int) -> list[str]:
    """Return each fourth policy, from the one at ``start`` on; and those that have been changed."""
    return [*dict.fromkeys([*names[start::4], *(name for name in names if name in touched_policies())])]


def _structure(tower: Tower) -> Any:
    """What a tower says, without names of modules and config attributes: equal ones are cut and summed alike."""
    units = {(u.name, u.follows, u.replicate, u.or_whole, u.align) for u in tower.units.values()}
    rules = [{_rule(r) for r in rules.values()} for rules in (tower.blocks, tower.prefix, tower.suffix)]
    ratios = [{(r.parts, r.per) for r in rules.values()} for rules in (tower.block_attributes, tower.attributes)]
    inputs = [{(i.unit, i.dim) for i in rules.values()} for rules in (tower.block_inputs, tower.inputs)]
    return tuple(frozenset(part) for part in (units, *rules, *ratios, *inputs))


def _rule(rule: Rule) -> Any:
    facts = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    for name in ("by_expert", "within", "repeat"):  # paths and config attributes
        facts[name] = facts[name] is not None
    del facts["where"]
    parts = tuple((part.unit, part.width is None) for part in facts.pop("parts"))
    return (parts, *facts.values())

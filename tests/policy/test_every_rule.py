"""Every rule must matter: a policy with one rule weakened to ``replicated``, or one attribute or input left out, fails.

Most fail while the plan is made or rehearsed, so in one process and in milliseconds. What passes both either holds more
than before (a vocabulary left whole is right, too, only larger) or goes to two ranks, which must find wrong numbers.
A line of a fragment is tried with the first policy that uses it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

import autopar.api
from autopar.errors import AutoparError
from autopar.policy.load import load_policy, policy_files, policy_folder
from autopar.policy.plan import Plan
from autopar.policy.resolve import make_plan
from autopar.policy.schema import Policy, Rule
from autopar.policy.uses import all_scopes, uses_of
from autopar.tensor_parallel.rehearsal import rehearse
from tests.parity import check
from tests.random_models import Case, batches, build, cases, kind
from tests.worlds import spawn

POLICIES = [path.stem for path in policy_files()]
SECTIONS = ("prefix", "every_stage", "blocks", "suffix")
ATTRIBUTES = ("block_attributes", "attributes", "block_inputs", "inputs")

# Attributes that no tested forward reads, and why they are there.
READ_ELSEWHERE: dict[str, str] = {}


def _weakened(policy: Policy) -> Iterator[tuple[str, str, Policy]]:
    """Path and place of each rule that shares something out, each attribute and input, and the policy without it."""

    def without(path: str, section: str, rules: dict[str, object]) -> dict[str, dict[str, object]]:
        rest = {key: value for key, value in rules.items() if key != path}
        rule = rules[path]
        return {section: {**rest, path: Rule("replicated", rule.where)} if isinstance(rule, Rule) else rest}

    for number, tower in enumerate(policy.towers):
        for section in (*SECTIONS, *ATTRIBUTES):
            rules = getattr(tower, section)
            for path, rule in rules.items():
                if not isinstance(rule, Rule) or rule.units:
                    changed = dataclasses.replace(tower, **without(path, section, rules))
                    towers = (*policy.towers[:number], changed, *policy.towers[number + 1 :])
                    yield path, str(rule.where), dataclasses.replace(policy, towers=towers)
    for section in ("head", "head_attributes"):
        rules = getattr(policy, section)
        for path, rule in rules.items():
            if not isinstance(rule, Rule) or rule.units:
                yield path, str(rule.where), dataclasses.replace(policy, **without(path, section, rules))


@functools.cache
def _first_users() -> dict[str, str]:
    """Place of a rule -> the first policy that has it."""
    users: dict[str, str] = {}
    for name in POLICIES:
        for _, where, _ in _weakened(load_policy(policy_folder() / f"{name}.yaml")):
            users.setdefault(where, name)
    return users


def _cases(policy: Policy) -> list[Case]:
    """Cases of all its model types, those first that make text, and of each model type the plainest first."""

    def order(case: Case) -> tuple[int, bool, bool, str]:
        place = policy.model_types.index(case.model_type)
        return place, kind(case.head) not in ("causal", "masked", "seq2seq"), bool(case.variant), str(case)

    return sorted((case for kind_ in policy.model_types for case in cases(kind_)), key=order)


@pytest.mark.every
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_without_one_of_its_rules_fails(name: str) -> None:
    policy = load_policy(policy_folder() / f"{name}.yaml")
    open_ = {
        (path, where): weak
        for path, where, weak in _weakened(policy)
        if _first_users()[where] == name and where not in READ_ELSEWHERE
    }
    met: dict[tuple[str, str], Case] = {}
    for case in _cases(policy):
        for kv_heads in (2, 1):  # one KV head on two ranks: attributes that are quotients change
            if not open_:
                return
            try:
                model = build(case, 4, kv_heads)
                plan = make_plan(model, policy, 2)
            except (AutoparError, ValueError):
                continue  # another policy holds for this variant, or the sizes do not fit it
            places = _places(policy, model, plan)
            for (path, where), weak in list(open_.items()):
                if where not in places:
                    continue
                met.setdefault((path, where), case)
                if _refused(model, weak) or _elements(make_plan(model, weak, 2)) > _elements(plan):
                    del open_[path, where]
    never = [f"{path} ({where})" for path, where in open_ if (path, where) not in met]
    assert not never, f"no tested model of {name} has {never}"
    if open_:
        wanted = [(path, where, met[path, where]) for path, where in open_]
        spawn(__name__, "_wrong_in_numbers", 2, 300, (name, wanted))


def _places(policy: Policy, model: PreTrainedModel, plan: Plan) -> set[str]:
    """The rules, attributes and inputs that met something in this model."""
    uses = [use for scope in all_scopes(policy, "", model, 2) for use in uses_of(scope)]
    places = {str(use.rule.where) for use in uses} | {attribute.where for attribute in plan.attributes}
    return places | {cut.where for module in plan.modules.values() for cut in module.inputs}


def _elements(plan: Plan) -> int:
    return sum(math.prod(tensor.local_shape(0)) for tensor in plan.tensors.values())


def _refused(model: object, policy: Policy) -> bool:
    try:
        rehearse(model, "", make_plan(model, policy, 2))
    except AutoparError:
        return True
    return False


def _wrong_in_numbers(name: str, wanted: list[tuple[str, str, Case]]) -> None:
    autopar.api.rehearse = lambda *_: True
    weakened = {(path, where): weak for path, where, weak in _weakened(load_policy(policy_folder() / f"{name}.yaml"))}
    harmless = []
    for path, where, case in wanted:
        model = build(case, 4, 4 if "kv" not in path else 2)
        inputs = batches(case, model.config)
        try:
            check(lambda model=model: copy.deepcopy(model), inputs, 2, policy=weakened[path, where])
        except Exception:
            continue
        harmless.append(f"{path} ({where}, tried with {case})")
    assert not harmless, f"{name}: can be left out and nothing changes: {harmless}"

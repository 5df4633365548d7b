"""A policy with one rule weakened to ``replicated``, or one attribute or input left out, fails or holds more."""

import copy
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel

import autopar.dry_run.plan_model
from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import AutoparError
from autopar.plan.make_plan import make_plan
from autopar.plan.matching import all_scopes, matches_of
from autopar.plan.plan import Plan
from autopar.policy.load import own_policies
from autopar.policy.schema import Policy, Rule
from tests.harness.worlds import pooled
from tests.parity import check
from tests.random_models import Case, batches, build, cases, kind, of_type
from tests.representatives import first_policies

# Their merged checkpoints have the names in memory (NAMES_IN_MEMORY).
pytestmark = pytest.mark.filterwarnings("ignore:the conversion of Inkling2Loop:UserWarning")

POLICIES = list(own_policies())
SECTIONS = ("prefix", "every_stage", "blocks", "suffix")
ATTRIBUTES = ("block_attributes", "attributes", "block_inputs", "inputs")

# Rules for branches that no small model takes
UNTESTED = yaml.safe_load(Path(__file__).with_name("untested_rules.yaml").read_text())


def _policy(name: str) -> Policy:
    return own_policies()[name]


def _stands_alone(name: str) -> bool:
    return any(not of_type(kind_).inside for kind_ in _policy(name).model_types)


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
def _users() -> dict[str, list[str]]:
    """Place of a rule -> the policies that have it and are no parts, tested inside other models."""
    users: dict[str, list[str]] = {}
    for name in sorted(POLICIES, key=lambda name: (not _stands_alone(name), name)):
        for _, where, _ in _weakened(_policy(name)):
            listed = users.setdefault(where, [])
            if name not in listed:
                listed.append(name)
    return users


def _cases(policy: Policy) -> list[Case]:
    """Cases of all its model types, those first that make text, and of each model type the plainest first."""

    def order(case: Case) -> tuple[int, bool, bool, str]:
        place = policy.model_types.index(case.model_type)
        return place, kind(case.head) not in ("causal", "masked", "seq2seq"), bool(case.variant), str(case)

    return sorted((case for kind_ in policy.model_types for case in cases(kind_)), key=order)


@pytest.mark.ranks_if_needed
@pytest.mark.parametrize("name", first_policies((), [name for name in POLICIES if _stands_alone(name)], later="sweep"))
def test_a_policy_without_one_of_its_rules_fails(name: str) -> None:
    untested = tuple(UNTESTED[name]["paths"]) if name in UNTESTED else ("-",)
    wanted = [
        (path, where)
        for path, where, _ in _weakened(_policy(name))
        if _users()[where][0] == name and not path.startswith(untested)
    ]
    left = {key: (name, case) for key, case in _unnoticed(name, set(wanted)).items()}
    for key in list(left):  # a line of a fragment may be for another of its users
        for other in _users()[key[1]][1:]:
            found = _unnoticed(other, {key})
            if not found:
                del left[key]
                break
            if found[key] is not None:
                left[key] = (other, found[key])
    never = [f"{path} ({where})" for (path, where), (_, case) in left.items() if case is None]
    assert not never, f"no tested model of {name} has {never}"
    if left:
        _wrong_in_numbers([(user, *key, case) for key, (user, case) in left.items()])


def _unnoticed(name: str, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Of the wanted (path, place) those that planning and rehearsal do not miss: the case that has it, or None."""
    policy = _policy(name)
    open_ = {(path, where): weak for path, where, weak in _weakened(policy) if (path, where) in wanted}
    met: dict[tuple[str, str], Any] = dict.fromkeys(open_)
    for case in _cases(policy):
        seen: dict[str, Any] | None = None
        for kv_heads in (2, 1):  # one KV head on two ranks: attributes that are quotients change
            if not open_:
                return {}
            try:
                model = build(case, 4, kv_heads)
                if seen == (seen := model.config.to_dict()):
                    break  # it has no KV heads of its own, and is the same model
                plan = make_plan(model, policy, 2)
            except (AutoparError, ValueError):
                continue  # another policy holds for this variant, or the sizes do not fit it
            places = _places(policy, model, plan)
            for (path, where), weak in list(open_.items()):
                if where not in places:
                    continue
                met[path, where] = met[path, where] or case
                larger = _elements(make_plan(model, weak, 2)) > _elements(plan) if not _refused(model, weak) else True
                if larger or _read_in_another_branch(model, path, where, plan):
                    del open_[path, where]
    return {key: met[key] for key in open_}


def _read_in_another_branch(model: PreTrainedModel, path: str, where: str, plan: Plan) -> bool:
    """Whether an attribute is one that its class, or the function that computes attention, reads somewhere."""
    modules = dict(model.named_modules())
    for attribute in plan.attributes:
        if attribute.where == where:
            name = attribute.name.rpartition(".")[2]
            kind = type(modules[attribute.path])
            methods = [m for n, m in inspect.getmembers(kind, inspect.isfunction) if n != "__init__"]
            source = "".join(inspect.getsource(m) for m in methods if m.__module__.startswith("transformers."))
            file = inspect.getsource(sys.modules[kind.__module__])
            return f"self.{name}" in source or f"module.{name}" in file
    return False


def _places(policy: Policy, model: PreTrainedModel, plan: Plan) -> set[str]:
    uses = [use for scope in all_scopes(policy, "", model, 2) for use in matches_of(scope)]
    places = {str(use.rule.where) for use in uses} | {attribute.where for attribute in plan.attributes}
    return places | {cut.where for module in plan.modules.values() for cut in module.inputs}


def _elements(plan: Plan) -> int:
    return sum(math.prod(tensor.local_shape(0)) for tensor in plan.tensors.values())


def _refused(model: object, policy: Policy) -> bool:
    try:
        check_plan(model, "", make_plan(model, policy, 2))
    except AutoparError:
        return True
    return False


@pooled(world_size=2, timeout=300)
def _wrong_in_numbers(wanted: list[tuple[str, str, str, Case]]) -> None:
    autopar.dry_run.plan_model.check_plan = lambda *_: True
    harmless = []
    for name, path, where, case in wanted:
        weak = next(changed for *key, changed in _weakened(_policy(name)) if key == [path, where])
        model = build(case, 4, 4 if "kv" not in path else 2)
        inputs = batches(case, model.config)
        try:
            check(lambda model=model: copy.deepcopy(model), inputs, 2, policy=weak)
        except Exception:
            continue
        harmless.append(f"{path} ({where}, tried with {case})")
    assert not harmless, f"can be left out and nothing changes: {harmless}"

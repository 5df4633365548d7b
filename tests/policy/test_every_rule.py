"""Every rule must matter: a policy with one rule weakened to ``replicated``, or one attribute left out, must fail.

Most of them fail while the plan is made or rehearsed, so in one process and in milliseconds. The few that pass both
are listed in ``ONLY_IN_NUMBERS``; two ranks run those and must find wrong numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest

import autopar.api
from autopar.errors import AutoparError
from autopar.policy.load import load_policy, policy_files, policy_folder
from autopar.policy.plan import Plan
from autopar.policy.resolve import make_plan
from autopar.policy.schema import Policy, Rule
from autopar.tensor_parallel.rehearsal import rehearse
from tests.parity import check
from tests.random_models import Case, batches, build, cases, kind
from tests.worlds import distributed

POLICIES = [path.stem for path in policy_files()]

# Policy -> case, and the rules of which neither the plan nor its rehearsal can tell that they are missing.
ONLY_IN_NUMBERS: dict[str, tuple[Case, set[str]]] = {
    # x.view(..., n_head, width / n_head): fewer features in as many heads have a shape as well
    "openai_gpt": (Case("openai-gpt", "OpenAIGPTLMHeadModel"), {"attn.n_head"}),
}

# Policy -> rules that may be weakened: a vocabulary left whole is right too, only larger. Elsewhere the tie to the
# output layer makes it an error; RemBERT ties nothing.
ONLY_LARGER = {"rembert": {"embeddings.word_embeddings", "cls?.predictions.decoder"}}


def _policy(name: str) -> Policy:
    return load_policy(policy_folder() / f"{name}.yaml")


def _weakened(policy: Policy) -> Iterator[tuple[str, str, Policy]]:
    """Path and place of each rule that shares something out, or attribute, and the policy without it."""
    for section in ("prefix", "every_stage", "blocks", "suffix", "head"):
        rules = getattr(policy, section)
        for path, rule in rules.items():
            if rule.units:
                changed = {**rules, path: Rule("replicated", rule.where)}
                yield path, str(rule.where), dataclasses.replace(policy, **{section: changed})
    for path, ratio in policy.block_attributes.items():
        left = {key: value for key, value in policy.block_attributes.items() if key != path}
        yield path, str(ratio.where), dataclasses.replace(policy, block_attributes=left)


def _text_first(case: Case) -> tuple[bool, bool, str]:
    return kind(case.head) not in ("causal", "masked"), kind(case.head) != "causal", str(case)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_without_one_of_its_rules_is_refused(name: str) -> None:
    policy = _policy(name)
    unnoticed = {path: (where, weak) for path, where, weak in _weakened(policy)}
    larger, met = set(), set()
    for case in sorted(cases(policy.model_types[0], frozenset({"JevForDecision"})), key=_text_first):
        for kv_heads in (2, 1):  # one KV head on two ranks: attributes that are quotients change
            if not unnoticed:
                break
            model = build(case, 4, kv_heads)
            plan = make_plan(model, policy, 2)
            rehearse(model, "", plan)
            here = {module.where for module in plan.modules.values()} | {a.where for a in plan.attributes}
            met |= here
            for path, (where, weak) in list(unnoticed.items()):
                if where in here and _refused(model, weak):
                    del unnoticed[path]
                elif where in here and _elements(make_plan(model, weak, 2)) > _elements(plan):
                    larger.add(path)
    never = [f"{path} ({where})" for path, (where, _) in unnoticed.items() if where not in met]
    assert not never, f"no tested model of {name} has {never}"
    may_be_larger = ONLY_LARGER.get(name, set())
    assert may_be_larger <= larger
    assert set(unnoticed) - may_be_larger == ONLY_IN_NUMBERS.get(name, (None, set()))[1]


def _elements(plan: Plan) -> int:
    return sum(math.prod(tensor.local_shape(0)) for tensor in plan.tensors.values())


def _refused(model: object, policy: Policy) -> bool:
    try:
        rehearse(model, "", make_plan(model, policy, 2))
    except AutoparError:
        return True
    return False


@distributed(world_size=2, timeout=300)
def test_the_remaining_rules_show_in_the_numbers() -> None:
    autopar.api.rehearse = lambda *_: True
    for name, (case, paths) in ONLY_IN_NUMBERS.items():
        weak = {path: changed for path, _, changed in _weakened(_policy(name)) if path in paths}
        model = build(case, 4, 4)
        check(lambda case=case: build(case, 4, 4), batches(case, model.config), 2)
        for path, changed in weak.items():
            try:
                check(lambda case=case: build(case, 4, 4), batches(case, model.config), 2, policy=changed)
            except Exception:
                continue
            raise AssertionError(f"{name}: {path} can be left out and nothing changes")

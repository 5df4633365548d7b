"""Layers whose rules contradict those around them: the report names them, and their lines come first."""

from typing import Any

from autopar.config import ParallelConfig
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from autopar.tools.verification.unit_rules import _contradicting, contradicting_layers
from autopar.tools.verification.verify import checks_of, verify_on_ranks
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2, llama


def changed(name: str, **rules: Any) -> dict[str, Any]:
    modules = {path.replace("__", "."): rule for path, rule in rules.items()}
    return {"extends": name, "match": {"model_type": name}, "blocks": {"modules": modules}}


WRONG = {
    "two runs of heads": ("llama", {"self_attn__q_proj": {"column": ["heads", "heads"]}}, ["self_attn.q_proj"]),
    "one block for q, k, v": ("gpt2", {"attn__c_attn": {"column": ["heads"]}}, ["attn.c_attn"]),
    "a row of two runs": ("gpt2", {"attn__c_proj": {"row": ["heads", "heads"]}}, ["attn.c_proj"]),
}


def test_which_layers_contradict() -> None:
    for name, (model_type, rules, expected) in WRONG.items():
        model: Any = llama() if model_type == "llama" else gpt2()
        plan = make_plan(model, read_user_policy(changed(model_type, **rules)), 2)
        found = contradicting_layers(model, plan)
        assert [path for path in found if ".0." in path] == [
            ("model.layers.0." if model_type == "llama" else "transformer.h.0.") + path for path in expected
        ], (name, found)


def test_it_is_not_clear_which_of_two_layers_is_wrong() -> None:
    lines = [("column", [1, 1, 2, 2], [0, 0, 1, 1]), ("row", [1, 2], [1, 0])]
    assert _contradicting(lines) == ["column", "row"]
    assert _contradicting([*lines, ("norm", [1, 2], [1, 0])]) == ["column"]
    assert _contradicting([*lines, ("replicated", [1, 2], [])]) == []


def test_right_rules_do_not_contradict() -> None:
    for model in (llama(), llama(num_key_value_heads=1), gpt2()):
        for tp in (2, 3, 4):
            assert contradicting_layers(model, make_plan(model, find_policy(model), tp)) == []


@pooled(world_size=2)
def test_the_report_names_the_line() -> None:
    config = ParallelConfig.parse({"tp": 2})
    policy = changed("llama", self_attn__q_proj={"column": ["heads", "heads"]})
    report = verify_on_ranks(llama(), config, policy, language_batches(131, count=1), checks_of(["forward"]))
    assert report.culprit is not None
    first, second = str(report.culprit).splitlines()[1:3]
    assert first == (
        "  the rule of model.layers.0.self_attn.q_proj gives a rank different units than the rules of the layers it is "
        "combined with"
    )
    assert second == "  policy dict:blocks.modules.self_attn.q_proj: model.layers.0.self_attn.q_proj: column"

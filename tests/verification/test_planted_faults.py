"""Planted faults are caught and attributed to a module; layers whose rules contradict each other."""

import functools
from contextlib import ExitStack
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from autopar.config import ParallelConfig
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from autopar.tools.verification.report import VerificationReport
from autopar.tools.verification.unit_rules import _contradicting, contradicting_layers
from autopar.tools.verification.verify import checks_of, verify_on_ranks
from tests.harness.worlds import pooled
from tests.parity import language_batches, randomise
from tests.small import gpt2, llama
from tests.verification.faults import FAULTS, Fault, text_of

_EVEN = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 36, "vocab_size": 132}


@functools.cache
def _model(name: str) -> Any:
    if name == "gpt2":
        return gpt2(n_embd=32, n_head=4, vocab_size=132)
    if name == "qwen3":
        torch.manual_seed(0)
        return randomise(Qwen3ForCausalLM(Qwen3Config(**_EVEN, num_hidden_layers=2, num_key_value_heads=2, head_dim=8)))
    return llama(**_EVEN, num_key_value_heads=1 if name == "mqa" else 2)


def _verified(fault: Fault) -> VerificationReport:
    sizes = {name: size for name, size in fault.mesh.items() if name != "data_parallel_size"}
    config = ParallelConfig.parse({"model_parallelism": sizes})
    with ExitStack() as stack:
        if fault.before is not None:
            fault.before(stack)
        after = fault.after
        change = None if after is None else lambda session: after(session, stack)
        checks = [name for name in checks_of(fault.checks) if name != "weights" or fault.after is None]
        batches = language_batches(132, count=2)
        return verify_on_ranks(_model(fault.model), config, text_of(fault), batches, checks, change)


def _names(report: VerificationReport, fault: Fault) -> bool:
    """Whether the report says where the fault is; a refusal does it in its text."""
    if fault.refused:
        return report.rows[0].check == "plan" and fault.refused in report.rows[0].note
    return report.culprit is not None and report.culprit.module in fault.modules


@pooled(world_size=2, timeout=300)
def test_planted_faults_are_caught_and_attributed() -> None:
    reports = {fault: _verified(fault) for fault in FAULTS}
    missed = [fault.name for fault, report in reports.items() if report.ok]
    astray = {f.name: report.culprit for f, report in reports.items() if not _names(report, f)}
    assert len(FAULTS) >= 50 and not missed, missed
    assert len(astray) <= 2, astray
    lines = [line for report in reports.values() if report.culprit for line in report.culprit.lines]
    assert any(line.endswith("policies/gpt2.yaml:16: transformer.h.0.attn.c_attn: column") for line in lines)


@pooled(world_size=2)
def test_without_a_fault_all_of_it_holds() -> None:
    for mesh in ({"tensor_parallel_size": 2, "sequence_parallel": True}, {"pipeline_parallel_size": 2}, {}):
        config = ParallelConfig.parse({"model_parallelism": mesh})
        report = verify_on_ranks(_model("gpt2"), config, None, language_batches(132, count=2), checks_of(None))
        assert report.ok, str(report)


def changed(name: str, path: str, rule: Any) -> dict[str, Any]:
    return {"extends": name, "match": {"model_type": name}, "blocks": {"modules": {path: rule}}}


def test_which_layers_contradict() -> None:
    for build, path, rule in (
        (llama, "model.layers.0.self_attn.q_proj", {"column": ["heads", "heads"]}),
        (gpt2, "transformer.h.0.attn.c_attn", {"column": ["heads"]}),
        (gpt2, "transformer.h.0.attn.c_proj", {"row": ["heads", "heads"]}),
    ):
        model: Any = build()
        plan = make_plan(model, read_user_policy(changed(build.__name__, path.partition(".0.")[2], rule)), 2)
        assert [each for each in contradicting_layers(model, plan) if ".0." in each] == [path]

    lines = [("column", [1, 1, 2, 2], [0, 0, 1, 1]), ("row", [1, 2], [1, 0])]
    assert _contradicting(lines) == ["column", "row"]
    assert _contradicting([*lines, ("norm", [1, 2], [1, 0])]) == ["column"]
    assert _contradicting([*lines, ("replicated", [1, 2], [])]) == []

    for model in (llama(), llama(num_key_value_heads=1), gpt2()):
        for tp in (2, 3, 4):
            assert contradicting_layers(model, make_plan(model, find_policy(model), tp)) == []


@pooled(world_size=2)
def test_the_report_names_the_line() -> None:
    config = ParallelConfig.parse({"tp": 2})
    policy = changed("llama", "self_attn.q_proj", {"column": ["heads", "heads"]})
    report = verify_on_ranks(llama(), config, policy, language_batches(131, count=1), checks_of(["forward"]))
    first, second = str(report.culprit).splitlines()[1:3]
    assert first == (
        "  the rule of model.layers.0.self_attn.q_proj gives a rank different units than the rules of the layers it is "
        "combined with"
    )
    assert second == "  policy dict:blocks.modules.self_attn.q_proj: model.layers.0.self_attn.q_proj: column"

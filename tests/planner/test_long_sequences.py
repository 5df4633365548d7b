"""Sequence and context parallelism in the planner: what a block keeps and sends, what is searched, what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from transformers import OPTConfig, OPTForCausalLM

import autopar
from autopar.errors import ConfigError
from autopar.tools.planner.candidate import Candidate, Rows
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_gpu
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import Space, search
from autopar.tools.planner.stage_costs import volume
from tests.context_parallel.test_exactness import made
from tests.small import llama

BATCH, SEQUENCE, WIDTH, HEADS, KV_HEADS, HEAD = 3, 32, 64, 8, 4, 8
ELEMENT = 4


def model(**changes: Any) -> Any:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}
    return llama(**{**sizes, "num_hidden_layers": 3, "intermediate_size": 96, "max_position_embeddings": 64} | changes)


def middle(rows: Rows, **changes: Any) -> Any:
    """The second of three blocks: neither boundary is in it."""
    return PlannedModel(model(**changes), sequence=SEQUENCE, precision="fp32").count(rows, BATCH).elements[1]


def test_sequence_parallelism_sends_what_the_page_says() -> None:
    n = BATCH * SEQUENCE * WIDTH * ELEMENT
    for tp in (2, 4):
        calls = middle(Rows(tp, 1, True)).collectives
        norms = 2 * WIDTH * ELEMENT  # their gradients
        assert {call.bytes for call in calls} == {n, norms} and {call.axis for call in calls} == {"tp"}
        kinds = Counter((call.kind, call.backward) for call in calls if call.bytes == n)
        assert [(call.kind, call.backward) for call in calls if call.bytes == norms] == [("all_reduce", True)]
        assert kinds == {
            ("all_gather", False): 2,
            ("reduce_scatter", False): 2,
            ("all_gather", True): 4,  # two of them for the gradients of weights
            ("reduce_scatter", True): 2,
        }


@pytest.mark.parametrize(("kv_heads", "cp"), [(4, 2), (4, 4), (2, 4), (1, 2), (8, 4)])
def test_context_parallelism_sends_what_the_page_says(kv_heads: int, cp: int) -> None:
    calls = middle(Rows(1, cp), num_key_value_heads=kv_heads).collectives
    sent = sum(volume(call.kind, call.bytes, cp) for call in calls if call.axis == "cp")
    row = BATCH * SEQUENCE // cp * HEAD * ELEMENT
    ulysses, gather = 4 * row * (HEADS + kv_heads) * (cp - 1) // cp, 4 * row * kv_heads * (cp - 1)
    assert sent == (ulysses if kv_heads % cp == 0 else gather)
    assert not [call for call in calls if call.axis == "tp"]


def test_a_ring_sends_all_but_its_own_part_and_a_sum_sends_it_twice() -> None:
    for kind, rounds in {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}.items():
        assert [volume(kind, 1200, ranks) for ranks in (1, 2, 4)] == [0, rounds * 600, rounds * 900], kind


def test_a_block_keeps_rows() -> None:
    whole = sum(middle(Rows(1)).saved.values())
    for cp in (2, 4):
        kept = sum(middle(Rows(1, cp)).saved.values())
        output = BATCH * SEQUENCE // cp * WIDTH * ELEMENT  # of attention, once more
        assert whole / cp <= kept <= whole / cp + 1.1 * output, cp
    plain, rows = (sum(middle(Rows(4, 1, more)).saved.values()) for more in (False, True))
    n = BATCH * SEQUENCE * WIDTH * ELEMENT
    assert rows < plain - 3 * n, "norms, residuals and the inputs of both regions"


def test_modules_that_hand_on_states_keep_as_much_for_whatever_length() -> None:
    kept = []
    for cp in (2, 4):
        planned = PlannedModel(made("mamba2", "Mamba2ForCausalLM"), sequence=SEQUENCE * cp, precision="fp32")
        block = planned.count(Rows(1, cp), BATCH).elements[0]
        assert not block.collectives
        kept.append(sum(block.saved.values()))
    assert kept[0] == kept[1]


def test_the_search_tries_both() -> None:
    space = Space(4, 4, 4)
    meshes = {(tp, cp) for tp, cp, _, _ in space.meshes(16384)}
    assert meshes == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}, "16,384 rows on 4 ranks are 4,096"
    assert {cp for _, cp, _, _ in space.meshes(4096)} == {1}, "too short"
    listed = [c for mesh in space.meshes(16384) for each in space.candidates(mesh) for c in each]
    assert {(c.tp > 1, c.cp > 1) for c in listed if c.sequence_parallel} == {(True, False)}
    assert {c.sequence_parallel for c in listed if c.tp == 2 and c.cp == 1} == {True, False}
    estimator = Estimator(PlannedModel(model(max_position_embeddings=65536), sequence=16384), find_gpu("h100"))
    only = search(estimator, Space(4, 4, 4, cp=2))
    assert {e.candidate.cp for e in only.best} == {2}
    candidate = only.best[0].candidate
    assert candidate.gpus == 4 and candidate.config("bf16").context_parallel_size == 2
    assert f"tp {candidate.tp} x cp 2 x pp" in str(candidate)
    assert dict(only.best[0].bytes)["cp"] > 0 and dict(only.best[0].parts)["cp"] > 0


def test_what_the_rehearsal_refuses_is_not_searched() -> None:
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
    config = OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64, layerdrop=0.1)
    estimator = Estimator(PlannedModel(OPTForCausalLM(config), sequence=16), find_gpu("h100"))
    with pytest.raises(ConfigError, match="no mesh of 2 GPUs fits: context_parallel_size=2 does not fit OPT"):
        search(estimator, Space(2, 2, 2, cp=2))
    with pytest.raises(ConfigError, match="the sequences or the experts that were asked for do not fit"):
        search(estimator, Space(1, 1, 1, sequence_parallel=True))


def test_plan_memory_of_rows() -> None:
    plan = autopar.plan_memory(
        model(), {"model_parallelism": {"context_parallel_size": 2}, "zero": {"stage": 1}}, sequence=SEQUENCE, gpus=4
    )
    assert sorted(plan.ranks) == [(0, d, 0) for d in range(4)], "2 replicas with 2 ranks for each sequence"
    whole = autopar.plan_memory(model(), {"zero": {"stage": 1}}, sequence=SEQUENCE, gpus=4)
    assert plan.peak.optimizer == whole.peak.optimizer, "sharded over all four"
    assert plan.peak.activations < 0.6 * whole.peak.activations
    assert Candidate(1, 1, 2, "1f1b", 1, 1, 1, False, cp=2).replicas == 4

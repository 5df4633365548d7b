"""Sequence and context parallelism in the planner, and recomputed blocks that keep what fits."""

from dataclasses import replace

import pytest
from transformers import OPTConfig, OPTForCausalLM

import autopar
from autopar.errors import ConfigError
from autopar.tools.planner.candidate import Candidate, Rows
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.network import Group
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import Space, search, with_kept
from tests.features.context_parallel.test_exactness import made
from tests.small import llama

BATCH, SEQUENCE = 3, 32


def test_a_ring_sends_all_but_its_own_part_and_a_sum_sends_it_twice() -> None:
    for kind, rounds in {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}.items():
        assert [Group(ranks).sent(kind, 1200) for ranks in (1, 2, 4)] == [0, rounds * 600, rounds * 900], kind


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
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
    model = llama(**sizes, intermediate_size=96, max_position_embeddings=65536)
    estimator = Estimator(PlannedModel(model, sequence=16384), find_node("dgx-h100"))
    only = search(estimator, Space(4, 4, 4, cp=2))
    assert {e.candidate.cp for e in only.best} == {2}
    candidate = only.best[0].candidate
    assert candidate.gpus == 4 and candidate.config("bf16").context_parallel_size == 2
    assert f"tp {candidate.tp} x cp 2 x pp" in str(candidate)
    assert dict(only.best[0].bytes)["cp"] > 0 and dict(only.best[0].parts)["cp"] > 0


def test_what_the_rehearsal_refuses_is_not_searched() -> None:
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
    config = OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64, layerdrop=0.1)
    estimator = Estimator(PlannedModel(OPTForCausalLM(config), sequence=16), find_node("dgx-h100"))
    with pytest.raises(ConfigError, match="no mesh of 2 GPUs fits: context_parallel_size=2 does not fit OPT"):
        search(estimator, Space(2, 2, 2, cp=2))
    with pytest.raises(ConfigError, match="the sequences or the experts that were asked for do not fit"):
        search(estimator, Space(1, 1, 1, sequence_parallel=True))


def test_recomputed_blocks_keep_what_fits() -> None:
    planned = PlannedModel(llama(num_hidden_layers=4), sequence=64, precision="bf16")
    candidate = Candidate(2, 1, 1, "1f1b", 4, 1, 0, True, sequence_parallel=True)
    roomy = Estimator(planned, find_node("dgx-h100"))
    alone = roomy.estimate(candidate)
    found = with_kept(roomy, alone)
    assert found.candidate.saves and found.time < alone.time
    config = found.candidate.config("bf16")
    assert config.checkpoint_saves == found.candidate.saves
    assert autopar.ParallelConfig.parse(found.candidate.sections("bf16")) == config
    assert str(found.candidate).endswith("checkpointing but " + " and ".join(found.candidate.saves))
    full = Estimator(planned, find_node("dgx-h100", gpu_memory=(alone.peak.total + 1) / 1e9))
    assert with_kept(full, alone).candidate == candidate
    other = roomy.estimate(replace(candidate, checkpointing=False))
    assert with_kept(roomy, other) is other

"""Which stage holds what: pure, on the meta device or in one process."""

import itertools
import json
import random
from typing import Any

import pytest
import torch

from autopar.dry_run.pipeline_parallel import find_reads
from autopar.errors import ConfigError, UnsupportedModelError
from autopar.plan.stages import StagePlan, make_stages, partition, rank_of_stage
from autopar.policy.match import find_policy
from tests.features.experts.module_mixtures import nllb
from tests.pipeline_parallel.deep import deep
from tests.random_models import Case, build
from tests.small import llama


def _stages(model, ranks, **settings) -> StagePlan:
    policy = find_policy(model)
    return make_stages(model, policy, ranks, reads=find_reads(model, policy), **settings)


def test_partition_is_the_best_one() -> None:
    draw = random.Random(0)
    for _ in range(60):
        costs = [draw.randrange(1, 50) for _ in range(draw.randrange(1, 9))]
        stages = draw.randrange(1, len(costs) + 1)
        bounds = partition(costs, stages)
        assert bounds[0] == 0
        assert bounds[-1] == len(costs)
        assert all(start < stop for start, stop in itertools.pairwise(bounds))
        worst = max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))
        for inner in itertools.combinations(range(1, len(costs)), stages - 1):
            other = [0, *inner, len(costs)]
            assert worst <= max(sum(costs[a:b]) for a, b in itertools.pairwise(other))


def test_embedding_and_head_are_counted() -> None:
    """With a large vocabulary the first and the last stage get fewer blocks."""
    model = llama(num_hidden_layers=10, vocab_size=500)
    plan = _stages(model, 4)
    assert [stop - start for start, stop in itertools.pairwise(plan.bounds)] == [1, 4, 4, 1]
    assert sum(plan.costs) == sum(p.numel() for p in model.parameters())


def test_stages_by_hand() -> None:
    model = deep("gpt2", 5)
    assert _stages(model, 2, layers_per_stage=[1, 4]).bounds == (0, 1, 5)
    with pytest.raises(ConfigError, match=r"layers_per_stage=\[2, 2\] has 2 stages with 4 blocks in all; .* 5 blocks"):
        _stages(model, 2, layers_per_stage=[2, 2])
    with pytest.raises(ConfigError, match=r"has 3 stages with 5 blocks in all; there are 2 stages"):
        _stages(model, 2, layers_per_stage=[2, 2, 1])


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ConfigError, match=r"5 does not fit GPT2LMHeadModel .transformer.h.: 4 blocks cannot be split"):
        _stages(deep("gpt2", 4), 5)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 x chunks=3"):
        _stages(deep("gpt2", 4), 2, chunks=3)


def test_tied_weights_lie_on_both_ends() -> None:
    plan = _stages(deep("gpt2", 4), 4)
    assert plan.holders("transformer.wte.weight") == plan.holders("lm_head.weight") == (0, 3)
    assert plan.holders("transformer.wpe.weight") == (0,)
    assert plan.holders("transformer.ln_f.bias") == (3,)
    assert all(plan.holders(f"transformer.h.{block}.ln_1.weight") == (block,) for block in range(4))


def test_encoder_and_decoder_are_one_row() -> None:
    plan = _stages(deep("bart", 2), 4)
    assert plan.elements[2] == "model.encoder"
    assert plan.bounds == (0, 1, 3, 4, 5)  # the encoder ends with its last block
    assert plan.holders("model.encoder.layernorm_embedding.weight") == (0,)
    assert plan.holders("model.decoder.layernorm_embedding.weight") == (2,)
    assert plan.holders("model.shared.weight") == (0, 2, 3)
    assert _stages(deep("t5", 2), 4).holders("encoder.final_layer_norm.weight") == (1,)


def test_what_several_stages_read_lies_on_all_of_them() -> None:
    """No policy says so: DeBERTa's relative embeddings are read by every block, Zamba's words by every shared one."""
    model = build(Case("deberta", "DebertaForMaskedLM"), 6, 3)
    assert _stages(model, 2).holders("deberta.encoder.rel_embeddings.weight") == (0, 1)
    assert _stages(model, 2).holders("deberta.embeddings.LayerNorm.weight") == (0,)
    zamba = build(Case("zamba", "ZambaForCausalLM"), 6, 3)
    plan = _stages(zamba, 2)
    assert plan.holders("model.embed_tokens.weight") == (0, 1)
    shared = "shared_transf.feed_forward.down_proj.weight"
    assert {plan.holders(name) for name in plan.tensors if name.endswith(shared)} == {(0, 1)}


def test_a_dry_run_with_weights_leaves_the_attributes_of_modules() -> None:
    """Routers of NLLB-MoE, whose forward does not run without data, write their capacity for so many tokens."""
    model = nllb().train()
    before = {path: router.expert_capacity for path, router in routers_of(model)}
    reads = find_reads(model, find_policy(model))
    assert reads is not None and reads.dry_run is not None
    make_stages(model, find_policy(model), 2, reads=reads)
    assert before == {path: router.expert_capacity for path, router in routers_of(model)}
    assert len(before) > 1 and all(module.training for module in model.modules())


def routers_of(model: Any) -> list[tuple[str, Any]]:
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "expert_capacity")]


def test_models_that_are_no_chain_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"must call each block once, in order .it calls 0, 1, 0, 1"):
        _stages(build(Case("hrm_text", "HrmTextForCausalLM"), 6, 3), 2)
    gemma = build(Case("gemma3n_text", "Gemma3nForCausalLM"), 6, 3)  # later layers use keys of earlier ones
    with pytest.raises(ConfigError, match="read outputs of earlier blocks, which leaves 1 groups"):
        _stages(gemma, 4)


def test_placing_stages() -> None:
    assert rank_of_stage(2, 2) == (0, 1, 0, 1)
    assert rank_of_stage(3, 2, folded=True) == (0, 1, 2, 2, 1, 0)
    plan = _stages(deep("llama", 4), 2, chunks=2, folded=True)
    assert plan.stages_on(0) == (0, 3)
    assert plan.holders("lm_head.weight") == plan.holders("model.embed_tokens.weight") == (0,)


def test_plain_data_and_the_meta_device() -> None:
    with torch.device("meta"):
        model = deep("gpt2", 4)
    plan = _stages(model, 2)
    assert json.loads(json.dumps(plan.to_json()))["rank_of"] == [0, 1]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert plan == _stages(deep("gpt2", 4), 2)

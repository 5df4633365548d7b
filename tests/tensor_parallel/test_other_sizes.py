"""Sizes that are not the config's, inputs of one sample, experts whose width a grouped matmul refuses."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForSequenceClassification, MixtralConfig, MixtralForCausalLM

import autopar
from autopar.errors import PolicyError
from autopar.plan.units import UnitTable
from autopar.policy.schema import UnitSpec
from autopar.policy.yaml_reader import Where
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import check, close, language_batches, randomise
from tests.small import llama

IDS = torch.randint(5, 131, (4, 8), generator=torch.Generator().manual_seed(1))


def _resized() -> Any:
    model = llama().train()
    model.model.embed_tokens, model.lm_head = nn.Embedding(140, 24), nn.Linear(24, 7)
    return model


def of_features(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return outputs.logits.square().mean()


@pytest.mark.tier("test")
@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, {"context_parallel_size": 2}, {}])
@pooled(world_size=2)
def test_without_tensor_parallelism_sizes_need_not_be_those_of_the_config(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    plain = _resized()
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes, "pipeline": {"microbatch_size": 2}})
    of_features(plain(IDS), {}).backward()
    mine = IDS.chunk(model.mpu.dp.size)[model.mpu.dp.rank]
    close(model(IDS).logits if model.mpu.pp.size == 1 else plain(IDS).logits, plain(IDS).logits, "logits")
    model.execute_pipeline({"input_ids": mine}, of_features)
    same_gradients(model, plain)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_with_tensor_parallelism_the_error_says_the_line_of_a_policy() -> None:
    plain = _resized()
    with pytest.raises(PolicyError, match=r"embed_tokens has 140 features(.|\n)*prefix: {embed_tokens: replicated}"):
        autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}})
    policy: dict[str, Any] = {"extends": "llama", "prefix": {"embed_tokens": "replicated"}}
    with pytest.raises(PolicyError, match=r"lm_head has 7 features(.|\n)*head: {lm_head\?: replicated}"):
        autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}}, policy=policy)
    policy["head"] = {"lm_head?": "replicated"}
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}}, policy=policy)
    close(model(IDS).logits, plain(IDS).logits, "logits")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_classifier_without_padding_token_takes_one_sample() -> None:
    for sizes in ({"tensor_parallel_size": 2, "sequence_parallel": True}, {"context_parallel_size": 2}):
        config = llama().config
        config.pad_token_id, config.num_labels = None, 3
        torch.manual_seed(0)
        plain = LlamaForSequenceClassification(config).train()
        model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes})
        batch = {"input_ids": IDS[:1], "labels": torch.tensor([1])}
        expected, found = plain(**batch), model(**batch)
        close(found.loss, expected.loss, "loss")
        close(found.logits, expected.logits, "logits")
        assert model.config.pad_token_id is None
        model.mpu.destroy()


def _mixtral(ffn: int) -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=131, hidden_size=32, intermediate_size=ffn, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, initializer_range=0.1,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    assert model.config._experts_implementation == "grouped_mm"
    randomise(model)
    return model


def test_units_are_aligned_where_there_are_enough() -> None:
    spec = UnitSpec("ffn", "inferred", Where("p", 1), align=8)
    for count, size, shares in [(24, 2, ((0, 16), (16, 24))), (24, 4, ((0, 6), (6, 12), (12, 18), (18, 24)))]:
        assert UnitTable({"ffn": spec}, None, "Model", size, frozenset()).ranges("ffn", count, size) == shares


@pooled(world_size=4)
def test_a_share_that_is_not_aligned_runs_and_is_exact() -> None:
    for ffn in (24, 32):  # 6 a rank, which is no multiple of 16 bytes; 8 a rank
        plain = _mixtral(ffn)
        parallel = check(lambda plain=plain: copy.deepcopy(plain), language_batches(131), 4)
        experts = parallel.model.layers[0].mlp.experts
        assert experts.config._experts_implementation == ("eager" if ffn == 24 else "grouped_mm")
        whole = autopar.deparallelize(parallel)
        assert whole.model.layers[0].mlp.experts.config is whole.config
        dist.barrier()

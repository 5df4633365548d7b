"""Policies that are complete and still wrong are found before the model is touched."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import LlamaForCausalLM

from autopar.dry_run.tensor_parallel import check_plan, different_ranks
from autopar.errors import PolicyError
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import AttributePlan
from autopar.policy.files import policy_folder
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from tests.harness.worlds import pooled
from tests.policy.written import RIGHT
from tests.small import gpt2, llama
from tests.tensor_parallel.toys import MLP, MLP_RULES, REFUSED, checked_plan, toy, toy_policy

RULES = toy_policy({"ffn": "ffn"}, MLP_RULES)

LLAMA = RIGHT["models"]


def test_a_right_policy_passes_and_leaves_the_model_alone():
    model = llama()
    before = copy.deepcopy(model.state_dict())
    assert checked_plan(model, LLAMA, 3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize(("old", "new", "message"), REFUSED["rules"])
def test_a_wrong_rule_is_found(old: str, new: str, message: str):
    text = LLAMA.replace(old, new)
    assert text != LLAMA
    with pytest.raises(PolicyError, match=message) as info:
        checked_plan(llama(), text, 2)
    assert str(info.value).startswith("policy text:")
    assert isinstance(info.value.where, str)


def test_a_head_count_that_nobody_scaled_is_found():
    text = LLAMA.replace("  attributes:\n    self_attn.num_key_value_groups: heads / kv\n", "")
    model = llama(num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    assert checked_plan(model, LLAMA, 4)
    with pytest.raises(PolicyError, match=r"fails in model.layers.0.self_attn, where the full model does not"):
        checked_plan(model, text, 4)


def test_keys_that_are_cut_like_queries_are_found_where_that_makes_a_difference():
    text = LLAMA.replace("k_proj: {column: kv}", "k_proj: {column: heads}")
    assert checked_plan(llama(), text, 3)  # one KV head and its two query heads on each rank: the same cut
    with pytest.raises(PolicyError, match=r"fails in model.layers.0.self_attn, where the full model does not"):
        checked_plan(llama(), text, 4)


def test_a_partial_gradient_that_no_logit_shows_is_found():
    text = (policy_folder() / "gpt2.yaml").read_text()
    model = gpt2()
    for block in model.transformer.h:  # a norm between column and row
        block.attn.attn_dropout = nn.Identity()
        block.mlp.act = nn.Sequential(block.mlp.act, nn.PReLU(1))
    shared = text.replace("mlp.c_fc:", "mlp.act: replicated\n    mlp.c_fc:")
    with pytest.raises(PolicyError, match=r"act.1.weight works on sharded activations.*\n.*\{replicated: UNIT\}"):
        checked_plan(model, shared, 2)
    assert checked_plan(model, text.replace("mlp.c_fc:", "mlp.act: {replicated: ffn}\n    mlp.c_fc:"), 2)


def test_a_model_that_does_not_run_without_data_is_not_rehearsed():
    model = gpt2()
    model.transformer.drop.forward = lambda x: x * float(x.untyped_storage()[0])
    assert not check_plan(model, "", make_plan(model, find_policy(model), 2))


def test_a_fault_in_one_of_several_blocks_is_found():
    model = llama(num_hidden_layers=6)
    plan = make_plan(model, find_policy(model), 2)
    path = "model.layers.3.mlp.up_proj"
    modules = {name: rule for name, rule in plan.modules.items() if name != path}
    tensors = {**plan.tensors, f"{path}.weight": replace(plan.tensors[f"{path}.weight"], layout=None)}
    with pytest.raises(PolicyError, match=r"fails in model.layers.3.mlp, where the full model does not"):
        check_plan(model, "", replace(plan, modules=modules, tensors=tensors))


def test_the_last_rank_runs_where_it_is_another():
    def ranks(model: Any, tp: int) -> list[int]:
        policy = find_policy(model) if isinstance(model, LlamaForCausalLM) else read_user_policy(RULES)
        return different_ranks(make_plan(model, policy, tp))

    even = toy(MLP, ffn=4)
    assert ranks(even, 2) == [0]
    assert ranks(even, 3) == [0, 2]
    assert ranks(llama(num_attention_heads=8, num_key_value_heads=2, head_dim=4), 4) == [0, 3]  # KV heads
    plan = make_plan(even, read_user_policy(RULES), 2)
    assert different_ranks(replace(plan, attributes=(AttributePlan("", "n", "", 3, (2, 1)),))) == [0, 1]
    experts = replace(plan.modules["layers.0.up"], rule="experts")
    assert different_ranks(replace(plan, modules={**plan.modules, "layers.0.up": experts})) == [0, 1]


@pooled(world_size=2)
def test_initialize_refuses_it_on_every_rank():
    policy = yaml.safe_load(LLAMA)
    policy["blocks"]["modules"]["self_attn.q_proj"] = "replicated"
    import autopar

    model = llama()
    with pytest.raises(PolicyError, match=r"policy dict:blocks.modules.self_attn"):
        autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": 2}}, policy=policy)
    assert not hasattr(model, "mpu")
    assert autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": 2}}, policy=LLAMA) is model

"""``weight[id]`` of a sharded embedding or head is another token on each rank: the user's own code is told, once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import ConfigError
from tests.pool import pooled
from tests.small import gpt2, llama, parallel
from tests.worlds import raises_everywhere


@pooled(world_size=2)
def test_reading_rows_warns_once_and_changes_nothing() -> None:
    model, rank = parallel(llama(), 2), dist.get_rank()
    rows = ("0 to 65", "66 to 130")[rank]
    text = rf"model.embed_tokens.weight: this is tensor-parallel rank {rank} of 2 and has rows {rows} of 131"
    with pytest.warns(autopar.ShardWarning, match=text) as seen:
        model.get_input_embeddings().weight.data[5] = 1.0
    assert "autopar.deparallelize(model)" in str(seen[0].message) and seen[0].filename == __file__
    weight = model.get_input_embeddings().weight
    assert weight is model.model.embed_tokens._parameters["weight"]
    with pytest.warns(autopar.ShardWarning, match=r"lm_head.weight: this is tensor-parallel rank"):
        model.lm_head.weight[5].sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.shape[0] < 37  # no row of it has a number that a user knows
    plain = autopar.deparallelize(model)
    assert plain.lm_head.weight.shape == (131, 24) and type(plain.lm_head) is nn.Linear


@pooled(world_size=2)
def test_the_model_and_its_libraries_are_not_warned() -> None:
    ids = torch.arange(6).view(1, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for build in (llama, gpt2):
            model: Any = parallel(build(), 2)
            model(ids, labels=ids).loss.backward()
            model.tie_weights()
            model.generate(ids, max_new_tokens=2, pad_token_id=0, attention_mask=torch.ones_like(ids))
            assert autopar.clip_grad_norm_(model, 1.0) > 0
            model.get_input_embeddings()(ids)
            model.load_state_dict(model.state_dict())
            staged = autopar.initialize(build().eval(), {"model_parallelism": {"pipeline_parallel_size": 2}})
            assert hasattr(staged.lm_head, "weight") and staged.get_input_embeddings().weight.shape[0] == 131
            assert not hasattr(nn.Linear(2, 2), "rows")


@pooled(world_size=2)
def test_the_weight_of_a_sharded_layer_can_be_replaced() -> None:
    model = parallel(llama(), 2)
    head = model.lm_head
    new = nn.Parameter(torch.zeros(head.out_features, 24))
    head.weight = new
    assert head._parameters["weight"] is new
    del head.weight
    assert not hasattr(head, "weight")
    head.weight = torch.ones(head.out_features, 24)  # as weight normalization leaves it
    assert head.weight.shape == (head.out_features, 24)
    with raises_everywhere(ConfigError, "lm_head of LlamaForCausalLM, a ColumnParallelLinear since"):
        model(torch.arange(6).view(1, 6))

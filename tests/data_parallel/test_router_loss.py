"""The auxiliary loss of a mixture's routers over replicas: told, once, where it is on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.errors import ShardWarning
from tests.parity import randomise
from tests.pool import pooled

IDS = torch.arange(16).view(2, 8)


def mixtral(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=131, **sizes, num_hidden_layers=2, num_local_experts=4, **changes)
    return randomise(MixtralForCausalLM(config)).train()


def told(model: Any, **given: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(IDS, labels=IDS, **given).loss.backward()
    return [str(each.message) for each in found if issubclass(each.category, ShardWarning)]


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_it_is_told_where_replicas_or_rows_have_one_each() -> None:
    for size in ({}, {"context_parallel_size": 2}):
        for by_config in (True, False):
            model = autopar.initialize(mixtral(output_router_logits=by_config), {"model_parallelism": size})
            found = told(model) if by_config else told(model, output_router_logits=True)
            assert found == [
                "MixtralForCausalLM adds its routers' auxiliary loss (output_router_logits=True), which is no mean "
                "over samples: each of 2 ranks\n  balances the tokens of its own, so gradients of routers are others "
                "than on one process with all of them. A larger batch on each rank comes\n  closer; tensor parallelism "
                "changes nothing. output_router_logits=False leaves the loss out."
            ]
            model.mpu.destroy()
    for config, size in (({}, {}), ({"output_router_logits": True}, {"tensor_parallel_size": 2})):
        model = autopar.initialize(mixtral(**config), {"model_parallelism": size})
        assert told(model) == []
        model.mpu.destroy()

"""LoRA in front of, behind and around sharded layers: training equals one process with PEFT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.adapters.adapted import phi3, same_training, with_lora
from tests.pool import pooled
from tests.small import gpt2, llama

MODELS: dict[str, Callable[[], Any]] = {
    "llama, queries and values": lambda: with_lora(llama(), target_modules=["q_proj", "v_proj"]),
    "llama, all linear": lambda: with_lora(llama(), target_modules="all-linear", use_rslora=True, lora_bias=False),
    "gpt2, Conv1D": lambda: with_lora(gpt2(), target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    "phi3, fused": lambda: with_lora(phi3(), target_modules="all-linear"),
}


@pytest.mark.parametrize("name", MODELS)
@pooled(world_size=2)
def test_lora_trains_as_on_one_process(name: str):
    same_training(MODELS[name](), {"model_parallelism": {"tensor_parallel_size": 2}})

"""Adapters on a model that has no memory yet: their values are those that PEFT draws."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import autopar
from autopar.errors import ConfigError
from tests.adapters.adapted import batch, peft, whole_of
from tests.parity import close
from tests.pool import pooled
from tests.small import llama

_Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _lazy(folder: Path, inside: bool, **settings: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "embed_tokens"], **settings)
    with autopar.lazy_init():
        model = LlamaForCausalLM.from_pretrained(folder)
        if inside:
            return peft.get_peft_model(model, config)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("inside", [True, False])
@pooled(world_size=2)
def test_adapters_begin_as_peft_begins(tmp_path: Path, inside: bool):
    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path)
    dist.barrier()
    size = {"model_parallelism": {"tensor_parallel_size": 2}}
    with pytest.raises(ConfigError, match=r"adapter 'default' at .*embed_tokens is initialized by False.*\n.*True"):
        autopar.initialize(_lazy(tmp_path, inside, init_lora_weights=False), size)
    if not inside:  # values are for a model that has memory
        model = _lazy(tmp_path, inside)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            peft.set_peft_model_state_dict(model, {f"{_Q}.lora_A.weight": torch.ones(4, 24)})
        with pytest.raises(ConfigError, match=r"1 weights of PeftModel were written into before initialize: .*lora_A"):
            autopar.initialize(model, size)
    model = autopar.initialize(_lazy(tmp_path, inside, modules_to_save=["lm_head"]), size)
    found = whole_of(model, {name: p.data for name, p in model.named_parameters() if p.requires_grad})
    assert len(found) == 2 * 2 * 2 + 2 + 1
    for name, weight in found.items():
        if "lora_B" in name or "embedding_A" in name:
            assert not weight.any(), name
        elif "lora_A" in name:
            bound = 1 / math.sqrt(weight.shape[1])  # of the whole layer's inputs
            assert 0.8 * bound < weight.abs().max() <= bound, name
    plain = llama()
    close(model(**batch()).logits[:], plain(**batch()).logits, "logits")
    name = "base_model.model.lm_head.modules_to_save.default.weight"
    assert torch.equal(found[name], plain.lm_head.weight)

"""Adapters on a model that has no memory yet: their values are those that PEFT draws."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import autopar
from autopar.errors import ConfigError
from tests.exchange import raises_everywhere
from tests.features.peft.adapted import batch, peft, whole_of, with_lora
from tests.harness.worlds import pooled
from tests.parity import close
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


@pooled(world_size=2)
def test_zero_3_keeps_rows_of_the_same_adapters(tmp_path: Path):
    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path)
    dist.barrier()
    models = []
    for config in ({"model_parallelism": {"tensor_parallel_size": 1}}, {"zero": {"stage": 3}}):
        torch.manual_seed(4)
        models.append(autopar.initialize(_lazy(tmp_path, inside=True, modules_to_save=["lm_head"]), config))
    for (name, mine), whole in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert mine.requires_grad == whole.requires_grad, name
        assert torch.equal(mine.full_tensor(), whole), name
    close(models[1](**batch()).logits, llama()(**batch()).logits, "logits")


@pooled(world_size=2)
def test_files_of_an_adapter_are_for_a_parallelized_model(tmp_path: Path):
    base, folder, size = tmp_path / "base", tmp_path / "adapter", {"model_parallelism": {"tensor_parallel_size": 2}}
    if dist.get_rank() == 0:
        llama().save_pretrained(base)
        with_lora(LlamaForCausalLM.from_pretrained(base)).save_pretrained(folder)
    dist.barrier()

    def inside(load: Any) -> Any:
        with autopar.lazy_init():
            return load()

    def after() -> Any:
        model = inside(lambda: LlamaForCausalLM.from_pretrained(base))
        model.load_adapter(folder)
        return autopar.initialize(model, size)

    calls = [
        lambda: autopar.from_pretrained(AutoModelForCausalLM, folder, size),
        lambda: autopar.from_pretrained(peft.AutoPeftModelForCausalLM, folder, size),
        lambda: inside(lambda: AutoModelForCausalLM.from_pretrained(folder)),
        lambda: inside(lambda: LlamaForCausalLM.from_pretrained(base).load_adapter(folder)),
        lambda: inside(lambda: peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)),
        lambda: inside(lambda: peft.AutoPeftModelForCausalLM.from_pretrained(folder)),
        after,
    ]
    for call in calls:
        with raises_everywhere(
            ConfigError, "holds an adapter, which lazy_init does not support", "model.load_adapter(folder"
        ):
            call()
    model = inside(lambda: AutoModelForCausalLM.from_pretrained(base))  # as the error says
    model = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(folder))
    model = autopar.initialize(model, size)
    model.load_adapter(folder, "default")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    close(model.eval()(**batch()).logits[:], plain.eval()(**batch()).logits, "logits")

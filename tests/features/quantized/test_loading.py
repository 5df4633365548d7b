"""Weights sharded first and quantized then: the same bytes as of the whole weight that is quantized first."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import autopar
from autopar.errors import ConfigError
from autopar.stored import stored_weights
from tests.features.peft.adapted import randomise_adapters, whole_of, with_lora
from tests.features.quantized.models import FORMS, batches, how, quantized, write
from tests.features.quantized.test_training import gradients
from tests.harness.worlds import pooled
from tests.parity import close

peft = pytest.importorskip("peft")
MESHES: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {}]


def written(folder: Path, family: str = "llama") -> Path:
    if dist.get_rank() == 0:
        write(folder, family)
    dist.barrier()
    return folder


def same(model: Any, other: Any) -> None:
    one, two = model.state_dict(), other.state_dict()
    assert set(one) == set(two)
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype and torch.equal(tensor, two[name]), name
    held = stored_weights(model)
    assert held and all(stored.shape == stored_weights(other)[path].shape for path, stored in held.items())


@pooled(world_size=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.tier("test", only=("nf4 nested",))
def test_shards_are_quantized_to_the_same_bytes(form: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    for config in MESHES:
        due = autopar.initialize(quantized(form), config)
        settings = how(form)
        kept: dict[str, Any] = {"quantization_config": settings, "dtype": torch.float32}
        model = autopar.from_pretrained(AutoModelForCausalLM, folder, config, **kept)
        same(model, due)
        assert model.is_quantized and model.config.quantization_config.quant_method == settings.quant_method
        ids = batches(1)[0]["input_ids"]
        if config.get("pp", 1) == 1:
            close(model.train()(ids).logits[:], due.train()(ids).logits[:], "logits")


@pooled(world_size=2)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_adapters_of_a_model_that_no_process_holds(form: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    with autopar.lazy_init():
        model: Any = LlamaForCausalLM.from_pretrained(folder, quantization_config=how(form), dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    model = autopar.initialize(peft.get_peft_model(model, peft.LoraConfig(**settings)).train(), {"tp": 2})
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    with autopar.full_params(model, trained):  # PEFT begins with zeros
        randomise_adapters(model)
    plain = with_lora(quantized(form), target_modules="all-linear").train()
    start = whole_of(model, {n: p for n, p in model.named_parameters() if p.requires_grad})
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(start[name])
    batch = batches(1)[0]
    losses = [each(**batch).loss for each in (plain, model)]
    for loss in losses:
        loss.backward()
    close(losses[1].detach(), losses[0].detach(), "loss")
    found = whole_of(model, gradients(model))
    for name, gradient in gradients(plain).items():
        close(found[name], gradient, name)


@pooled(world_size=2)
def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    folder = written(tmp_path)
    with pytest.raises(
        ConfigError, match=r"does not support load_in_4bit: write quantization_config=BitsAndBytesConfig"
    ):
        autopar.from_pretrained(AutoModelForCausalLM, folder, {"tp": 2}, load_in_4bit=True)

"""Plain models with adapters, and a parallelized one against the plain one: only adapters have gradients."""

from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from tests.features.experts.mixtures import compare
from tests.parity import _everyones, randomise
from tests.small import llama

peft = pytest.importorskip("peft")


def phi3() -> Any:
    """2 layers, fused ``q | k | v`` of 6 + 2 + 2 heads, fused gate and up."""
    torch.manual_seed(0)
    settings = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
    settings |= {"intermediate_size": 38, "vocab_size": 131, "max_position_embeddings": 64, "pad_token_id": 0}
    return randomise(Phi3ForCausalLM(Phi3Config(**settings, initializer_range=0.1)))


def with_lora(model: Any, **settings: Any) -> Any:
    """A ``PeftModel`` with random ``B`` (PEFT's are zeros, whose adapters do nothing)."""
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **settings}
    return randomise_adapters(peft.get_peft_model(model, peft.LoraConfig(**settings)))


def randomise_adapters(model: Any, seed: int = 2) -> Any:
    """Give every parameter that is trained random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.device))
    return model


def two_adapters() -> Any:
    """A Llama with two adapters, of which the first is active."""
    targets = ["q_proj", "v_proj", "o_proj", "embed_tokens"]
    model = with_lora(llama(), target_modules=targets, modules_to_save=["lm_head"])
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["down_proj", "k_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("second")
    randomise_adapters(model, 5)
    model.set_adapter("default")
    return model


def batch(seed: int = 0, rows: int = 2, length: int = 7, vocabulary: int = 131) -> dict[str, torch.Tensor]:
    """Words and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def whole_of(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name -> whole tensor of some of a model's parameters; replicated ones must be equal. A collective of tp."""
    plan, axis = model._autopar.plan, model.mpu.tp
    everyone = _everyones({name: tensor.detach() for name, tensor in tensors.items()}, plan, axis)
    result = {}
    for name in tensors:
        parts = [held[name] for held in everyone]
        layout = plan.tensors[plan.canonical(name)].layout
        if layout is None:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between tp ranks"
        result[name] = parts[0] if layout is None else layout.unshard(parts)
    return result


def same_training(plain: Any, config: dict[str, Any]) -> Any:
    """Compare training in fp64 with one process, where only adapters have gradients; returns the parallelized model."""
    return compare(plain.double, config)[0]

"""Plain models with adapters, and a parallelized one against the plain one: only adapters have gradients."""

import copy
from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

import autopar
from tests.parity import _everyones, close, randomise

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


def same_training(plain: Any, config: dict[str, Any], steps: int = 2, **given: Any) -> Any:
    """Train both for some steps of two micro-batches each, and compare all of it; returns the parallelized model."""
    plain.train()
    model = copy.deepcopy(plain)
    adam = {"lr": 1e-2, "eps": 1e-3}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **adam)  # made before
    model = autopar.initialize(model, config, **given)
    expected = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **adam)
    for step in range(steps):
        for number in range(2):
            data = batch(10 * step + number, length=6 + number)
            ours, theirs = model(**data), plain(**data)
            close(ours.loss.detach(), theirs.loss.detach(), f"loss of step {step}")
            close(ours.logits.detach()[:], theirs.logits.detach(), f"logits of step {step}")
            (ours.loss / 2).backward()
            (theirs.loss / 2).backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        names = {name: p for name, p in plain.named_parameters() if p.requires_grad}
        assert trained.keys() == names.keys()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        gradients = whole_of(model, {name: p.grad for name, p in trained.items()})
        for name, parameter in names.items():
            close(gradients[name], parameter.grad, f"gradient of {name} in step {step}")
        norm = torch.nn.utils.clip_grad_norm_(names.values(), 0.5)
        close(autopar.clip_grad_norm_(model, 0.5), norm, f"norm of step {step}")
        optimizer.step()
        expected.step()
        for name, weight in whole_of(model, {name: p.data for name, p in trained.items()}).items():
            close(weight, names[name].data, f"{name} after step {step}")
        optimizer.zero_grad()
        expected.zero_grad()
    return model

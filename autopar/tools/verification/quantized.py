"""A model in memory as transformers quantizes it, and with adapters of random values."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.errors import ConfigError, in_one_line
from autopar.quantized.stored import Kind
from autopar.tools.planner.adapted import add_lora


def quantize(model: nn.Module, kind: Kind) -> nn.Module:
    """Return the model as ``from_pretrained(quantization_config=...)`` reads it.

    Raises:
        ConfigError: transformers does not have the model, or cannot quantize it here.
    """
    assert kind.config is not None
    own: Any = type(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"--quantization: transformers quantizes its own models, not a {own.__name__}")
    dtype = next(parameter.dtype for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            found: nn.Module = own.from_pretrained(folder, quantization_config=kind.config(), dtype=dtype)
        except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
            said = in_one_line(error, 120)
            raise ConfigError(f"--quantization: transformers cannot quantize a {own.__name__} here: {said}") from error
    return found


def fine_tuned(model: nn.Module, rank: int) -> nn.Module:
    """Return the model with LoRA whose ``B`` is random: PEFT's is zero, and the adapters do nothing."""
    adapted = add_lora(model, rank)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted

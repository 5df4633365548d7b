"""A model as it is fine-tuned, with or without weights: adapters on a frozen base, which is quantized if asked."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from autopar.errors import ConfigError, in_one_line, nearest
from autopar.foreign.tensors import own_parameters
from autopar.quantized.layers import KINDS, stand_in
from autopar.quantized.stored import Kind


def kind_of(name: str) -> Kind:
    """Return the form of weights that a name stands for. Raises ConfigError for another name."""
    if name not in KINDS:
        raise ConfigError(f"--quantization {name} must be one of {', '.join(KINDS)}.{nearest(name, KINDS)}")
    return KINDS[name]


def kind_in(config: Any) -> tuple[Kind | None, list[str] | None]:
    """Return the form that a folder's config says its weights are in, None if plain, and layers that it says are not.

    Raises:
        ConfigError: it is a form whose bytes are not known without the weights.
    """
    settings: Any = getattr(config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(settings.get("quant_method", ""))
    if method == "bitsandbytes":
        name = settings.get("bnb_4bit_quant_type", "fp4") + "-double" * bool(settings.get("bnb_4bit_use_double_quant"))
        return kind_of("int8" if settings.get("load_in_8bit") else name), settings.get("llm_int8_skip_modules")
    if method == "torchao":
        raise ConfigError(
            "config.json says torchao, whose bytes only the weights tell: autopar.plan_memory takes the model that\n"
            "  lazy_init() gives of the folder."
        )
    return None, None  # plain, or made plain while it is loaded


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Return ``model`` with LoRA on all linear layers but the head, as PEFT makes it of ``all-linear``.

    Raises:
        ConfigError: PEFT is not installed, or the model has no such layers.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("--lora is PEFT's: pip install 'autopar[quantized]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT asks transformers for what is deprecated
            return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
    except ValueError as error:
        raise ConfigError(f"--lora: PEFT finds no layers in a {type(model).__name__}: {error}") from error


def mark_quantized(model: nn.Module, kind: Kind, kept: list[str] | None = None) -> None:
    """Put what stands for quantized weights in the place of those that transformers would quantize.

    Args:
        model: on the meta device.
        kept: layers that stay plain, as transformers takes their names; by default those that it would leave.

    Raises:
        ConfigError: it has no linear layers.
    """
    inner: Any = model
    if kept is None:
        kept = get_keys_to_not_convert(inner) if isinstance(inner, PreTrainedModel) else []
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and should_convert_module(path, kept)
    ]
    if not found:
        raise ConfigError(f"--quantization: a {type(model).__name__} has no linear layers to be quantized")
    for path, module in found:
        weight: Any = module.weight
        layer = module  # GPT-2's keep their weights as [in, out]
        if not isinstance(layer, nn.Linear):
            layer = nn.Linear(weight.shape[0], weight.shape[1], device="meta", dtype=weight.dtype)
            weight = layer.weight
        own_parameters(layer)["weight"] = stand_in((weight.shape[0], weight.shape[1]), weight.dtype, kind)
        model.set_submodule(path, layer)


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

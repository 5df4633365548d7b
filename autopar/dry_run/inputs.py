"""Prepare a dry run: a copy of the model on the meta device, and small inputs."""

from __future__ import annotations

import copy
import inspect
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.compat.tensors import remove_forward_hooks
from autopar.compat.transformers import ATTENTION, EXPERTS
from autopar.policy.match import library_of

_BATCH, _SEQ, _FRAMES = 2, 5, 8

_OWN = frozenset(vars(nn.Module()))

Model = TypeVar("Model", bound=nn.Module)


def sample_inputs(model: PreTrainedModel, batch: int = _BATCH, length: int = _SEQ) -> dict[str, Any]:
    """Make inputs on the meta device: sequences of ``length`` tokens, images or audio.

    Raises:
        ValueError: The main input of the model is not supported.
    """
    library = library_of(model)
    if library is not None:
        return library.sample(model, batch, length)
    taken = inspect.signature(model.forward).parameters
    main, config = model.main_input_name, model.config
    if main == "input_ids" or "input_ids" in taken:
        inputs = _text(model, batch, length)
        if "pixel_values" in taken and taken["pixel_values"].default is inspect.Parameter.empty:
            inputs["pixel_values"] = _pixels(config, batch)
    elif main in ("pixel_values", "pixel_values_videos"):
        inputs = {main: _pixels(config, batch)}
    elif main in ("input_features", "input_values"):
        sound = _sound(main, getattr(config, "audio_config", None) or config, batch)
        inputs = {main: sound.unsqueeze(1) if "padding_mask" in taken else sound}  # with a mask, waves have channels
    elif main == "inputs_embeds" or "inputs_embeds" in taken:
        inputs = {"inputs_embeds": _empty(batch, length, config.hidden_size)}
    else:
        raise ValueError(f"no sample input is known for '{main}'")
    if "bbox" in taken and "input_ids" in inputs:
        inputs["bbox"] = _ids(*inputs["input_ids"].shape, 8 if hasattr(config, "bbox_projection") else 4)
    if "decoder_input_ids" in taken and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = _ids(batch, length)
    return {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def _text(model: PreTrainedModel, batch: int, length: int) -> dict[str, Any]:
    config = model.config
    shape = (batch, 3, length) if "MultipleChoice" in type(model).__name__ else (batch, length)
    inputs: dict[str, Any] = {"input_ids": _ids(*shape)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _ids(*shape)
    elif getattr(config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = _empty(batch, length, config.hidden_size)
    vision = getattr(config, "vision_config", None)
    if vision is not None and hasattr(model, "vision_model") and hasattr(model, "text_model"):
        inputs["pixel_values"] = _pixels(vision, batch)  # a model with two towers needs both inputs
    return inputs


def pixel_shape(config: Any, batch: int) -> list[int]:
    """Return the shape of images, or of frames of videos, for a model with this config."""
    config = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    size = getattr(config, "image_size", 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    frames = getattr(config, "num_frames", None)
    return [batch, *([frames] if frames else []), channels, height, width]


def _pixels(config: Any, batch: int) -> torch.Tensor:
    return _empty(*pixel_shape(config, batch))


def _sound(main: str, config: Any, batch: int) -> torch.Tensor:
    if main == "input_values" and hasattr(config, "conv_stride"):
        samples = 1
        for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
            samples = (samples - 1) * stride + kernel
        return _empty(batch, samples + 7 * torch.Size(config.conv_stride).numel())
    if main == "input_values" and not hasattr(config, "num_mel_bins"):
        return _empty(batch, 2000)
    if hasattr(config, "input_feat_per_channel"):
        return _empty(batch, 4 * _FRAMES, config.input_feat_per_channel * config.input_channels)
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return _empty(batch, config.num_mel_bins, 2 * config.max_source_positions)
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return _empty(batch, config.max_length, config.num_mel_bins)
    inner = getattr(config, "encoder_config", config)
    width: Any = getattr(config, "feature_projection_input_dim", None) or getattr(inner, "num_mel_bins", 80)
    channels = getattr(config, "subsampling_conv_channels", None)
    if isinstance(channels, list):
        width = channels[0]  # Gemma 4 stores its number of mel bins here
    return _empty(batch, 4 * _FRAMES, width)


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device="meta")


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def meta_copy(model: Model, *, gradients: bool = False) -> Model:
    """Copy a model to the meta device, in evaluation mode, without memory for its weights.

    ``gradients``: True if floating-point parameters require gradients.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=gradients and empty.is_floating_point())
    attributes = [value for module in model.modules() for name, value in vars(module).items() if name not in _OWN]
    for tensor in (*model.buffers(), *(value for value in attributes if isinstance(value, torch.Tensor))):
        memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    copied = copy.deepcopy(model, memo).eval()
    for config in {id(m.config): m.config for m in copied.modules() if hasattr(m, "config")}.values():
        if hasattr(config, ATTENTION):
            setattr(config, ATTENTION, "eager")  # supported by every model; runs without data and reads every size
        if "SequenceClassification" in type(model).__name__ and getattr(config, "pad_token_id", 0) is None:
            vars(config)["pad_token_id"] = 0  # without it the model supports only one sample at a time
        if hasattr(config, EXPERTS):
            setattr(config, EXPERTS, "batched_mm")  # the implementation that reads no values
    for module in copied.modules():  # the user's hooks must not run
        remove_forward_hooks(module, object)
    return copied

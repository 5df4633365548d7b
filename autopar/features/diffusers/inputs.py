"""Make inputs of a diffusion transformer for a dry run, by its arguments, its config and its first layers.

Classes of diffusers share the names of their arguments and of the widths in their configs, but not the form of latents:
tokens, images or videos. The layer that reads the latents shows it.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import torch
from torch import nn

from autopar.policy.match import config_of

_LONG, _WORDS = 1024, 512  # in plans, whose sequences are long: words of most texts in training
_CHANNELS = ("in_channels", "in_dim", "io_channels")
_TEXTS = (
    *("joint_attention_dim", "text_embed_dim", "text_dim", "caption_channels", "cap_feat_dim", "context_in_dim"),
    *("cross_attention_input_dim", "cond_token_dim", "encoder_hidden_size", "cross_attention_dim"),
)
_WIDTHS = {  # argument -> keys of configs that hold its width
    "encoder_hidden_states": _TEXTS,
    "cap_feats": _TEXTS,
    "pooled_projections": ("pooled_projection_dim",),
    "encoder_hidden_states_image": ("image_dim",),
    "encoder_hidden_states_2": ("text_embed_2_dim",),
    "image_embeds": ("image_embed_dim",),
    "encoder_hidden_states_t5": ("cross_attention_dim_t5",),
    "global_hidden_states": ("global_states_input_dim", "global_cond_dim"),
}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SHAPE = re.compile(r"`\(([\w ,]+)\)`")  # hidden_states (`torch.Tensor` of shape `(batch_size, ...)`): ...
_TIMES = ("timestep", "t", "r_timestep", "timestep_r", "timestep_cond")
_PAIRS = ("original_size", "target_size", "crop_coords")


class _Inputs:
    """The inputs of one model, by the names of its arguments."""

    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        self.model, self.batch, self.length = model, batch, length
        self.config = config_of(model)
        self.channels = self.first(*_CHANNELS)
        self.words = self.first("max_text_seq_length") or (_WORDS if length >= _LONG else _times(length))

    def first(self, *keys: str) -> Any:
        """Return the first value that the config has."""
        return next((value for key in keys if (value := getattr(self.config, key, None)) is not None), None)

    def patch(self) -> tuple[int, int]:
        """Return the patch sizes over frames and over pixels."""
        size, over_time = self.first("patch_size", "all_patch_size") or 1, self.first("patch_size_t") or 1
        return (size[0], size[-1]) if isinstance(size, list | tuple) and len(size) == 3 else (over_time, _number(size))

    def latents(self) -> torch.Tensor:
        """Return noisy latents: tokens, or images or videos of a few patches."""
        time, side = self.patch()
        if self.channels is None:
            raise ValueError("no sample input is known without channels in the config")
        layers = [layer for path, layer in self.model.named_modules() if "lora_" not in path]
        patched = any(isinstance(layer, _CONVOLUTIONS) and layer.in_channels == self.channels for layer in layers)
        read = {layer.in_features for layer in layers if isinstance(layer, nn.Linear)}
        if self.channels in read and not patched:
            return _empty(self.batch, self.length, self.channels)
        high = next(size for size in range(math.isqrt(self.length), 0, -1) if self.length % size == 0)
        wide = self.length // high
        if wide > _LONG or self.first("pos_embed_max_size"):  # tables of positions may be too small
            high = wide = math.isqrt(self.length - 1) + 1
        sizes = {"batch": self.batch, "channel": self.channels, "dim": self.channels, "frame": time}
        sizes |= {"height": side * high, "width": side * wide, "seq": self.length, "length": self.length}
        lines = (inspect.getdoc(self.model.forward) or "").splitlines()
        documented = [line for line in lines if line.strip().startswith("hidden_states (")]
        shapes = [names.split(",") for line in documented[:1] for names in _SHAPE.findall(line)]
        if self.channels * side * side in read:
            shapes.append(["batch", "channels", "height", "width"])
        for names in shapes:
            shape = [next((size for part, size in sizes.items() if part in name), 0) for name in names]
            if all(shape):
                return _empty(*shape)
        raise ValueError("no layer reads the latents")

    def of(self, name: str, needed: bool) -> Any:
        """Return the input for an argument; None if it is not known, or is optional and not used."""
        config, batch = self.config, self.batch
        if name in ("hidden_states", "x"):
            return self.latents()
        if name in _WIDTHS:
            width = self.first(*_WIDTHS[name])
            words = () if name in ("pooled_projections", "global_hidden_states") else (self.words,)
            return None if width is None else _empty(batch, *words, width)
        if name in _TIMES:
            return _empty(batch) if needed or name == "timestep" else None
        if name == "guidance":
            return _empty(batch) if self.first("guidance_embeds") else None
        if name in ("img_ids", "txt_ids"):
            return _empty(self.length if name == "img_ids" else self.words, len(config.axes_dims_rope))
        if "mask" in name:
            needed |= name == "encoder_hidden_states_mask"  # pipelines give it
            needed |= name.endswith("_2") and self.first("text_embed_2_dim") is not None
            tokens = self.words if name.startswith(("encoder", "text")) else self.length
            return torch.ones(batch, tokens, dtype=torch.bool, device="meta") if needed else None
        if name == "ofs":
            return _empty(1) if self.first("ofs_embed_dim") else None
        if name == "img_shapes":
            return [[(1, 1, self.length)]] * batch
        if name in ("num_frames", "height", "width"):
            return {"width": self.length}.get(name, 1)
        if name == "class_labels":
            return torch.zeros(batch, dtype=torch.long, device="meta") if self.first("num_embeds_ada_norm") else None
        if name == "added_cond_kwargs":
            return {"resolution": _empty(batch, 2), "aspect_ratio": _empty(batch, 1)}
        return _empty(batch, 2) if name in _PAIRS else None


def sample_inputs(model: Any, batch: int, length: int) -> dict[str, Any]:
    """Make small inputs on the meta device, with ``length`` tokens where the latents are tokens.

    Raises:
        ValueError: An argument is not known.
    """
    made, found = _Inputs(model, batch, length), {}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        needed = parameter.default is inspect.Parameter.empty
        value = made.of(name, needed)
        if value is None and needed and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            raise ValueError(f"no sample input is known for '{name}' of {type(model).__name__}")
        if value is not None:
            found[name] = value
    if "cap_feats" in found or "x" in found:  # lists with an entry for each sample
        images = found["x"].unsqueeze(2) if found["x"].ndim == 4 else found["x"]
        found |= {"x": list(images), "cap_feats": list(found["cap_feats"])}
    return {name: _as(model.dtype, value) for name, value in found.items()}


def _times(length: int) -> int:
    """Return a multiple of ``length`` by a factor that does not divide it: no text's shard is as long."""
    return length * next(factor for factor in range(2, length + 2) if length % factor)


def _number(size: Any) -> int:
    return int(size[0]) if isinstance(size, list | tuple) else int(size)


def _as(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, list) and isinstance(value[0], torch.Tensor):
        return [_as(dtype, each) for each in value]
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")

"""Small diffusion transformers: 4 blocks, 6 heads or another number, 37 features where the class lets one choose."""

from typing import Any

import torch

from tests.parity import randomise

_VIDEO = {"num_attention_heads": 0, "in_channels": 4, "out_channels": 4, "num_layers": 4}
_IMAGE = {"num_attention_heads": 0, "in_channels": 4, "num_layers": 4}
_PAIR = {"num_attention_heads": 0, "num_layers": 2, "num_single_layers": 2}  # two lists of blocks
_TEXT, _WORDS = 16, 5
# Policy or variant -> class, config (of which 0 is the number of heads, or "8*" that many features of 8 each), inputs
SMALL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "wan": (
        "WanTransformer3DModel",
        {**_VIDEO, "attention_head_dim": 12, "text_dim": _TEXT, "freq_dim": 16, "ffn_dim": 37, "rope_max_seq_len": 32},
        {"hidden_states": (2, 4, 2, 8, 8)},
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {**_IMAGE, "attention_head_dim": 8, "sample_size": 8, "out_channels": 4, "joint_attention_dim": _TEXT}
        | {"pos_embed_max_size": 12, "caption_projection_dim": "8*", "pooled_projection_dim": 12}
        | {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
        {"hidden_states": (2, 4, 8, 8), "pooled_projections": (2, 12), "encoder_hidden_states": (2, 7, _TEXT)},
    ),
    "flux": (
        "FluxTransformer2DModel",
        {**_PAIR, "in_channels": 4, "attention_head_dim": 8, "joint_attention_dim": _TEXT, "pooled_projection_dim": 12}
        | {"axes_dims_rope": (2, 2, 4), "guidance_embeds": True},
        {"hidden_states": (2, 7, 4), "pooled_projections": (2, 12), "img_ids": (7, 3), "txt_ids": (_WORDS, 3)}
        | {"guidance": (2,)},
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {**_PAIR, "in_channels": 4, "attention_head_dim": 8, "joint_attention_dim": _TEXT, "mlp_ratio": 1.3}
        | {"axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 16},
        {"hidden_states": (2, 7, 4), "img_ids": (7, 4), "txt_ids": (_WORDS, 4), "guidance": (2,)},
    ),
    "qwen_image": (
        "QwenImageTransformer2DModel",
        {
            **_IMAGE,
            "out_channels": 4,
            "attention_head_dim": 8,
            "joint_attention_dim": _TEXT,
            "axes_dims_rope": (2, 2, 4),
        },
        {"hidden_states": (2, 12, 4), "encoder_hidden_states": (2, 7, _TEXT), "encoder_hidden_states_mask": [1] * 7}
        | {"img_shapes": [[(1, 3, 4)]] * 2},
    ),
    "ltx_video": (
        "LTXVideoTransformer3DModel",
        {**_VIDEO, "attention_head_dim": 8, "cross_attention_dim": "8*", "caption_channels": _TEXT},
        {"hidden_states": (2, 16, 4), "encoder_attention_mask": [1] * _WORDS, "num_frames": 2, "height": 2, "width": 4},
    ),
    "hunyuan_video": (
        "HunyuanVideoTransformer3DModel",
        {**_PAIR, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8, "num_refiner_layers": 1}
        | {"mlp_ratio": 1.3, "text_embed_dim": _TEXT, "pooled_projection_dim": 12, "rope_axes_dim": (2, 2, 4)},
        {"hidden_states": (2, 4, 2, 4, 4), "pooled_projections": (2, 12), "guidance": (2,)}
        | {"encoder_attention_mask": [1, 1, 1, 1, 0]},
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {**_VIDEO, "attention_head_dim": 8, "text_embed_dim": _TEXT, "time_embed_dim": 12, "sample_width": 8}
        | {"sample_height": 8, "sample_frames": 5, "max_text_seq_length": _WORDS},
        {"hidden_states": (2, 2, 4, 8, 8)},
    ),
    "z_image": (
        "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": "8*", "n_layers": 4, "n_refiner_layers": 1, "n_heads": 0, "n_kv_heads": 0}
        | {"cap_feat_dim": _TEXT, "axes_dims": [2, 2, 4], "axes_lens": [64, 16, 16]},
        {"x": [(4, 1, 4, 8), (4, 1, 4, 4)], "t": (2,), "cap_feats": [(5, _TEXT), (3, _TEXT)]},
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {"sample_size": 8, "in_channels": 4, "hidden_size": "8*", "num_layers": 4, "num_refiner_layers": 1}
        | {"num_attention_heads": 0, "num_kv_heads": 2, "multiple_of": 1, "axes_dim_rope": (2, 2, 4)}
        | {"axes_lens": (64, 16, 16), "cap_feat_dim": _TEXT},
        {"hidden_states": (2, 4, 8, 8), "encoder_attention_mask": [1, 1, 1, 1, 0]},
    ),
    "sana": (
        "SanaTransformer2DModel",
        {**_IMAGE, "out_channels": 4, "attention_head_dim": 8, "num_cross_attention_heads": 0, "sample_size": 8}
        | {"cross_attention_head_dim": 8, "cross_attention_dim": "8*", "caption_channels": _TEXT, "mlp_ratio": 1.3}
        | {"qk_norm": "rms_norm_across_heads"},
        {"hidden_states": (2, 4, 8, 8), "encoder_attention_mask": [1] * _WORDS},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {**_IMAGE, "attention_head_dim": 8, "sample_size": 8, "cross_attention_dim": "8*", "caption_channels": _TEXT},
        {"hidden_states": (2, 4, 8, 8), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "aura_flow": (
        "AuraFlowTransformer2DModel",
        {"num_attention_heads": 0, "sample_size": 8, "num_mmdit_layers": 2, "num_single_dit_layers": 2}
        | {
            "attention_head_dim": 8,
            "joint_attention_dim": _TEXT,
            "caption_projection_dim": "8*",
            "pos_embed_max_size": 64,
        },
        {"hidden_states": (2, 4, 8, 8)},
    ),
}


def make(name: str, heads: int = 6) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and the inputs of two samples."""
    import diffusers

    torch.manual_seed(0)
    kind, sizes, shapes = SMALL[name]
    chosen = {key: {"0": heads, "8*": 8 * heads}.get(str(value), value) for key, value in sizes.items()}
    inputs = {key: _input(value) for key, value in shapes.items()}
    if "t" not in inputs:
        inputs = {"timestep": torch.tensor([3.0, 700.0]), "encoder_hidden_states": torch.randn(2, 5, _TEXT), **inputs}
    return randomise(getattr(diffusers, kind)(**chosen)), inputs


def _input(shape: Any) -> Any:
    if isinstance(shape, tuple):
        return torch.randn(shape)
    if isinstance(shape, list) and isinstance(shape[0], int):
        return torch.tensor([[1] * len(shape), shape]).bool()
    return [torch.randn(each) for each in shape] if isinstance(shape, list) and isinstance(shape[0], tuple) else shape

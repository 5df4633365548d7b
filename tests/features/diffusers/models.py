"""Small diffusion transformers: 6 heads (or another number), 4 blocks, 37 features where the class lets one choose."""

from collections.abc import Callable
from typing import Any

import torch

from tests.parity import randomise

SMALL: dict[str, Callable[..., Any]] = {}
"""Name of the policy or variant -> a function of the number of heads that returns a model and the inputs of a batch."""


def small(build: Callable[..., Any]) -> Callable[..., Any]:
    SMALL[build.__name__.replace("__", ".")] = build
    return build


def make(name: str, heads: int = 6) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and two samples."""
    torch.manual_seed(0)
    model, inputs = SMALL[name](heads)
    return randomise(model), {"timestep": torch.tensor([3.0, 700.0]), **inputs}


@small
def wan(heads: int) -> Any:
    from diffusers import WanTransformer3DModel

    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 37, "rope_max_seq_len": 32}
    model = WanTransformer3DModel(num_attention_heads=heads, attention_head_dim=12, num_layers=4, **sizes)
    return model, {"hidden_states": torch.randn(2, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 16)}


@small
def sd3(heads: int) -> Any:
    from diffusers import SD3Transformer2DModel

    sizes = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 16, "pos_embed_max_size": 12}
    sizes |= {"num_layers": 4, "caption_projection_dim": 8 * heads, "pooled_projection_dim": 12}
    options = {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
    model = SD3Transformer2DModel(num_attention_heads=heads, attention_head_dim=8, **sizes, **options)
    inputs = {"encoder_hidden_states": torch.randn(2, 5, 16), "pooled_projections": torch.randn(2, 12)}
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), **inputs}

"""A decoder with grouped queries whose config has short names: ``dim`` is a usual one, ``n_q`` is not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class ShortConfig(PretrainedConfig):
    """Six query heads over two heads of keys and values."""

    model_type = "short_names"

    def __init__(self, dim: int = 48, n_q: int = 6, n_kv: int = 2, inner: int = 40, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.dim, self.n_q, self.n_kv, self.inner = 101, dim, n_q, n_kv, inner


class ShortBlock(nn.Module):
    """Attention with queries, keys and values in one weight, and a gated MLP."""

    def __init__(self, config: ShortConfig) -> None:
        super().__init__()
        self.n_q, self.n_kv, self.wide = config.n_q, config.n_kv, config.dim // config.n_q
        self.norm1, self.norm2 = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.wqkv = nn.Linear(config.dim, (config.n_q + 2 * config.n_kv) * self.wide)
        self.wo = nn.Linear(config.dim, config.dim)
        self.gate_up, self.down = nn.Linear(config.dim, 2 * config.inner), nn.Linear(config.inner, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the MLP."""
        batch, length, _ = x.shape
        sizes = [self.n_q * self.wide, self.n_kv * self.wide, self.n_kv * self.wide]
        q, k, v = (
            each.view(batch, length, -1, self.wide).transpose(1, 2)
            for each in self.wqkv(self.norm1(x)).split(sizes, -1)
        )
        k, v = (each.repeat_interleave(self.n_q // self.n_kv, 1) for each in (k, v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(heads.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class ShortNames(PreTrainedModel):
    """Words, two blocks, logits."""

    config_class = ShortConfig

    def __init__(self, config: ShortConfig) -> None:
        super().__init__(config)
        self.words, self.out = nn.Embedding(config.vocab_size, config.dim), nn.Linear(config.dim, config.vocab_size)
        self.layers = nn.ModuleList(ShortBlock(config) for _ in range(2))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The logits."""
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)  # type: ignore[no-any-return]

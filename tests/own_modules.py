"""Modules that a user writes without transformers, with the policies that a user writes for them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.parity import randomise


@dataclass
class GPTConfig:
    vocab_size: int = 131
    block_size: int = 16
    n_layer: int = 2
    n_head: int = 9
    n_embd: int = 36
    dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(batch, seq, self.n_head, -1).transpose(1, 2) for y in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.c_proj(y.transpose(1, 2).reshape(batch, seq, self.n_embd))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 37)  # an odd number on purpose
        self.c_proj = nn.Linear(37, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """As in nanoGPT: tied embeddings, ``(logits, loss)``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts: Any = self.transformer
        places = torch.arange(idx.shape[1], device=idx.device)
        x = parts.drop(parts.wte(idx) + parts.wpe(places))
        for block in parts.h:
            x = block(x)
        logits = self.lm_head(parts.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)


GPT_POLICY = """
units:
  heads: n_head
  ffn: inferred
  vocab: vocab_size
prefix:
  transformer.wte: {embedding: vocab}
  transformer.wpe: replicated
blocks:
  path: transformer.h
  modules:
    ln_1: replicated
    attn.c_attn: {column: [heads, heads, heads]}
    attn.c_proj: {row: heads}
    ln_2: replicated
    mlp.c_fc: {column: ffn}
    mlp.c_proj: {row: ffn}
  attributes:
    attn.n_head: heads
    attn.n_embd: heads
suffix:
  transformer.ln_f: replicated
head:
  lm_head: {column: vocab, gather_output: true}
"""


def gpt(seed: int = 0, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    model = randomise(GPT(GPTConfig(**changes)))
    assert isinstance(model, GPT)
    return model


def tokens(seed: int = 1, batch: int = 2, seq: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 131, (batch, seq + 1), generator=generator)
    return {"idx": ids[:, :-1], "targets": ids[:, 1:]}

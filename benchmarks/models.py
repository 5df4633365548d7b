"""Models with random weights, of the sizes that are measured."""

from __future__ import annotations

from typing import Any

import torch

Size = dict[str, int]


def build(family: str, size: Size, **changes: Any) -> Any:
    """Build a Llama or a GPT-2 without dropout; the same weights on every rank.

    Args:
        size: ``hidden, layers, vocab``; ``ffn``, ``kv_heads`` and ``positions`` where they are not the usual ones.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

    torch.manual_seed(0)
    hidden, heads = size["hidden"], size.get("heads", max(4, size["hidden"] // 64))
    positions = size.get("positions", 2048)
    if family == "gpt2":
        config: Any = GPT2Config(
            n_embd=hidden,
            n_layer=size["layers"],
            n_head=heads,
            vocab_size=size["vocab"],
            n_positions=positions,
            bos_token_id=0,
            **changes,
        )
        config.eos_token_id = 0
        config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
        return GPT2LMHeadModel(config)
    return LlamaForCausalLM(llama_config(size, heads, positions, **changes))


def llama_config(size: Size, heads: int, positions: int, **changes: Any) -> Any:
    """Make the configuration of a Llama."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=heads,
        num_key_value_heads=size.get("kv_heads", heads),
        intermediate_size=size.get("ffn", size["hidden"] * 11 // 4 // 64 * 64),
        vocab_size=size["vocab"],
        max_position_embeddings=positions,
        **changes,
    )


def tokens(size: Size, batch: int | None = None, seq: int | None = None) -> torch.Tensor:
    """Draw token ids [batch, seq], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, size["vocab"], (batch or size["batch"], seq or size["seq"]), generator=generator)


def count(model: Any) -> int:
    """Count the parameters; tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())

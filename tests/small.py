"""Small random models that many tests share."""

import copy
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.parity import randomise


def gpt2(seed: int = 0, **changes: Any) -> GPT2LMHeadModel:
    """2 layers, 9 heads of width 4, vocabulary 131, no dropout."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "n_layer": 2,
        "n_embd": 36,
        "n_head": 9,
        "vocab_size": 131,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "initializer_range": 0.1,
    }
    return randomise(GPT2LMHeadModel(GPT2Config(**{**settings, **changes})))


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """2 layers, 6 query heads, 3 KV heads, ffn 37, vocabulary 131."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 37,
        "vocab_size": 131,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    }
    return randomise(LlamaForCausalLM(LlamaConfig(**{**settings, **changes})))


def grouped() -> LlamaForCausalLM:
    """A llama with one KV head for eight query heads, and a tied head."""
    return llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=1, tie_word_embeddings=True)


def parallel(model: Any, tp: int, **config: Any) -> Any:
    """``autopar.initialize`` with a tensor-parallel size."""
    import autopar

    return autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": tp}, **config})


def lazily(model: Any) -> Any:
    """Another model like this one, without memory."""
    import autopar

    with autopar.lazy_init():
        return type(model)(copy.deepcopy(model.config))


class Unshifted(LlamaForCausalLM):
    """A user's class with a loss of its own, a mean over labels that are not shifted."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, **kwargs)
        if labels is not None:
            outputs.loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return outputs

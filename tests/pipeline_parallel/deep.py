"""Small random models with as many blocks as a test wants."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.parity import randomise
from tests.small import gpt2, llama

VOCAB = 131


def _bert(layers: int) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=layers, num_attention_heads=6, intermediate_size=37,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _t5(layers: int) -> PreTrainedModel:
    config = T5Config(
        vocab_size=VOCAB, d_model=24, d_kv=4, d_ff=37, num_layers=layers, num_decoder_layers=layers, num_heads=6,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _bart(layers: int) -> PreTrainedModel:
    config = BartConfig(
        vocab_size=VOCAB, d_model=24, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=37, decoder_ffn_dim=37, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, init_std=0.1,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def _mixtral(layers: int) -> PreTrainedModel:
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=3, num_local_experts=4, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    return MixtralForCausalLM(config)


_MAKERS: dict[str, Callable[[int], Any]] = {
    "gpt2": lambda layers: gpt2(n_layer=layers),
    "llama": lambda layers: llama(num_hidden_layers=layers),
    "bert": _bert,
    "t5": _t5,
    "bart": _bart,
    "mixtral": _mixtral,
}
NAMES = tuple(_MAKERS)


def deep(name: str, layers: int) -> Any:
    """A model of that name; of an encoder-decoder, encoder and decoder have ``layers`` blocks each."""
    torch.manual_seed(0)
    return randomise(_MAKERS[name](layers))

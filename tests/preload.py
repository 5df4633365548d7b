"""Imported once by the fork server, so that every rank of every world starts with it."""

from transformers import (  # noqa: F401
    AutoConfig,
    BertForMaskedLM,
    GenerationMixin,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

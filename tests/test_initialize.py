from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.parity import check, language_batches, randomise
from tests.worlds import distributed


def gpt2(**changes):
    torch.manual_seed(0)
    settings = dict(n_layer=2, n_embd=36, n_head=9, vocab_size=131, n_positions=32, bos_token_id=0, eos_token_id=0)
    settings |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **changes}
    return randomise(GPT2LMHeadModel(GPT2Config(**settings)))


@distributed(world_size=2)
def test_gpt2_on_two():
    check(gpt2, language_batches(131), tp=2)


@distributed(world_size=4)
def test_gpt2_on_four():
    check(gpt2, language_batches(131), tp=4)

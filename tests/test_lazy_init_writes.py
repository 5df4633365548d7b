"""Weights without memory that are written into before initialize: refused, whatever way they are written."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM

import autopar
from autopar.errors import ConfigError
from tests.small import gpt2, llama

pytestmark = pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")


def lost(model: Any, other: Any) -> list[Callable[[], Any]]:
    """Ways to write into weights of a GPT-2."""
    wte, bias = model.transformer.wte.weight, model.transformer.h[0].ln_1.bias
    return [
        lambda: wte.mul_(2),
        lambda: wte.__imul__(2),
        wte[3].zero_,
        lambda: bias.fill_(3.0),
        lambda: nn.init.constant_(bias, 3.0),
        lambda: model.load_state_dict(other.state_dict()),
    ]


@pytest.fixture(params=["constructor", "files"])
def made(request, tmp_path):
    """A GPT-2 and how another one like it is made."""
    plain = gpt2()
    plain.save_pretrained(tmp_path)
    make = GPT2LMHeadModel if request.param == "constructor" else GPT2LMHeadModel.from_pretrained
    return plain, lambda: make(plain.config if request.param == "constructor" else tmp_path)


@pytest.mark.parametrize("number", range(6))
def test_writes_before_initialize_are_refused(made, number):
    plain, make = made
    with autopar.lazy_init():
        model = make()
    written = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        lost(written, plain)[number]()
    for wrong in (written, copy.deepcopy(written), written.to(torch.bfloat16)):
        with pytest.raises(ConfigError, match="were written into before initialize: transformer"):
            autopar.initialize(wrong)
    for right in (copy.deepcopy(model.double()), model):  # and nothing else counts as a write
        assert not any(parameter.is_meta for parameter in autopar.initialize(right).parameters())


@pytest.mark.parametrize("number", range(8))
def test_writes_inside_are_refused(made, number):
    plain, make = made
    with autopar.lazy_init():
        model = make()
        ways = lost(model, plain)
        ways += [lambda: model.transformer.wte.weight.data.mul_(3), lambda: model.lm_head.weight.data[:2].add_(1)]
        with pytest.raises((ConfigError, RuntimeError), match="has no value inside lazy_init"), torch.no_grad():
            ways[number]()


def test_values_that_a_constructor_computed_are_no_better_and_a_new_head_may_be_written(tmp_path):
    config = llama().config
    with autopar.lazy_init():
        model = LlamaForCausalLM(config)
        assert not model.model.norm.weight.is_meta  # torch.ones; initialization has the last word
        with pytest.raises(ConfigError, match=r"model\.norm.weight of LlamaForCausalLM has no value"):
            model.model.norm.weight.data.fill_(3.0)
    gpt2().transformer.save_pretrained(tmp_path)
    with autopar.lazy_init():
        model = GPT2ForSequenceClassification.from_pretrained(tmp_path, num_labels=3, pad_token_id=0)
        model.score.weight.data.fill_(3.0)
    assert (autopar.initialize(model).score.weight == 3).all()


def test_initialize_inside_is_refused(tmp_path):
    plain = gpt2()
    plain.save_pretrained(tmp_path)
    with autopar.lazy_init():
        model = GPT2LMHeadModel(plain.config)
        with pytest.raises(ConfigError, match=r"initialize is not supported inside of lazy_init"):
            autopar.initialize(model)
        with pytest.raises(ConfigError, match=r"from_pretrained is not supported inside of lazy_init"):
            autopar.from_pretrained(GPT2LMHeadModel, tmp_path)
    autopar.initialize(model)

"""Which policy a model gets, and what a user reads if there is none or more than one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from autopar.errors import PolicyError, UnsupportedModelError
from autopar.policy import match
from autopar.policy.load import policy_files
from autopar.policy.match import find_policy, supported_model_types
from tests.small import gpt2, llama

TEXT = "match: {model_type: [gpt2, gpt3]%s}\nunits: {}\nblocks: {path: h, modules: {}}\n"


def of_type(model_type: str) -> PreTrainedModel:
    class Config(GPT2Config):
        pass

    Config.model_type = model_type
    with torch.device("meta"):
        return GPT2LMHeadModel(Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0))


def test_the_file_that_lists_the_model_type() -> None:
    assert find_policy(gpt2()).name == "gpt2"
    assert find_policy(llama()).name == "llama"
    kinds = supported_model_types()
    assert (kinds["mistral"], kinds["camembert"], kinds["gemma3_text"]) == ("llama", "roberta", "gemma3")


def test_no_model_type_is_listed_twice() -> None:
    from autopar.policy.load import load_policy

    listed = [
        (kind, str(load_policy(path).config)) for path in policy_files() for kind in load_policy(path).model_types
    ]
    assert len(set(listed)) == len(listed)


def test_a_model_type_that_no_file_lists() -> None:
    with pytest.raises(UnsupportedModelError) as info:
        find_policy(of_type("gpt_bigcode"))
    lines = str(info.value).splitlines()
    assert lines[0].startswith("no policy lists model_type 'gpt_bigcode' of GPT2LMHeadModel.")
    assert "  Listed: apertus, arcee, bert, " in lines[1]
    assert "policies/README.md" in lines[2]
    with pytest.raises(UnsupportedModelError, match=r"Did you mean 'mistral'\?"):
        find_policy(of_type("mistrall"))


def test_a_config_that_the_policies_of_a_model_type_leave_out() -> None:
    with torch.device("meta"):
        small = {
            "hidden_size": 16,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 11,
        }
        plain = CohereForCausalLM(CohereConfig(**small))
        normed = CohereForCausalLM(CohereConfig(**small, use_qk_norm=True))
    assert find_policy(plain).name == "cohere"
    with pytest.raises(
        UnsupportedModelError,
        match=r"no policy fits this config of model_type 'cohere': cohere wants {'use_qk_norm': False}",
    ):
        find_policy(normed)


def test_a_users_policy() -> None:
    assert find_policy(gpt2(), TEXT % "").model_types == ("gpt2", "gpt3")
    with pytest.raises(PolicyError) as info:
        find_policy(llama(), TEXT % "")
    assert (
        str(info.value)
        == "policy text:1: the policy is for model_type gpt2, gpt3, LlamaForCausalLM has model_type llama"
    )
    with pytest.raises(UnsupportedModelError, match=r"holds for transformers <5, installed is 5\..* \(policy text:1\)"):
        find_policy(gpt2(), TEXT % ', transformers: "<5"')
    with pytest.raises(PolicyError, match="policy text:1: 'five' is no version range"):
        find_policy(gpt2(), TEXT % ", transformers: five")


def test_two_files_that_match_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for name, config in (("one", ""), ("two", ", config: {n_layer: 2}"), ("three", ", config: {n_layer: 3}")):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(TEXT % config)
    monkeypatch.setattr(match, "policy_files", lambda: tuple(paths))
    with pytest.raises(
        PolicyError, match=r"one\.yaml:1 and .*two\.yaml:1 both match model_type gpt2: narrow one of them"
    ):
        find_policy(gpt2(n_layer=2))
    monkeypatch.setattr(match, "policy_files", lambda: tuple(paths[1:]))
    assert find_policy(gpt2(n_layer=3)).name == "three"

"""Which policy a model gets, once in an initialize; the errors if there is none or more than one."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import autopar
from autopar.errors import PolicyError, UnsupportedModelError
from autopar.policy import match
from autopar.policy.files import policy_folder
from autopar.policy.load import load_policies, own_policies
from autopar.policy.match import find_policy, model_inside, supported_model_types
from autopar.policy.schema import Policy
from tests.harness.worlds import pooled
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
    policies = list(own_policies().values())
    listed = [(kind, str(policy.config), policy.classes) for policy in policies for kind in policy.model_types]
    assert len(set(listed)) == len(listed)


def test_only_the_files_that_hold_the_word_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = list(own_policies().values())
    for kind in supported_model_types():
        listed = [policy.name for policy in policies if kind in policy.model_types]
        assert sorted(policy.name for policy in match.policies_of(kind)) == listed
    parsed: list[str] = []

    def load(path: Path) -> tuple[Policy, ...]:
        parsed.append(path.stem)
        return load_policies(path)

    monkeypatch.setattr(match, "load_policies", load)
    assert find_policy(gpt2()).name == "gpt2" and "gpt2" in parsed
    assert len(parsed) < 10 and not {"bert", "llama", "t5"} & {*parsed}
    (tmp_path / "base.yaml").write_text(TEXT % "")
    (tmp_path / "inherits.yaml").write_text("extends: base\n")  # its own text does not hold the word
    (tmp_path / "broken.yaml").write_text("match: {model_type: [gpt2")
    paths = [tmp_path / f"{name}.yaml" for name in ("base", "inherits", "broken")]
    monkeypatch.setattr(match, "policy_files", lambda: tuple(paths[:2]))
    with pytest.raises(PolicyError, match=r"base\.yaml:1 and .*inherits\.yaml:1 both match model_type gpt2"):
        find_policy(gpt2())
    monkeypatch.setattr(match, "policy_files", lambda: (paths[0], paths[2]))
    with pytest.raises(PolicyError, match=r"broken\.yaml:1: cannot be parsed as YAML"):
        find_policy(gpt2())


def test_a_model_type_that_no_file_lists() -> None:
    with pytest.raises(UnsupportedModelError) as info:
        find_policy(of_type("nobodys_model"))
    assert str(info.value) == (
        "no policy lists model_type 'nobodys_model' of GPT2LMHeadModel.\n"
        "  autopar.initialize(model, config, policy='derive') derives a policy from the computations of forward;\n"
        "  'autopar policy new MODEL' (a folder or a name on the hub) also verifies and saves it.\n"
        "  'autopar policy check my.yaml' checks a policy without weights; its form is in "
        f"{policy_folder() / 'README.md'}\n"
        "  'autopar policy list' prints the model types with a policy."
    )
    model = of_type("nobodys_model")
    assert find_policy(model, {"extends": "gpt2", "match": {"model_type": "nobodys_model"}}).name == "user"
    with pytest.raises(UnsupportedModelError, match=r"\n  Did you mean 'mistral'\?\n"):
        find_policy(of_type("mistrall"))


def test_a_config_that_the_policies_of_a_model_type_leave_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scaled.yaml").write_text(TEXT % ", config: {scale_attn_weights: true, n_inner: 5}")
    (tmp_path / "plain.yaml").write_text(TEXT % ", config: {scale_attn_weights: false}, class: [GPT2Model, GPT2Pair]")
    monkeypatch.setattr(match, "policy_files", lambda: (tmp_path / "plain.yaml", tmp_path / "scaled.yaml"))
    assert find_policy(gpt2(n_inner=5)).name == "scaled"
    with pytest.raises(UnsupportedModelError) as info:
        find_policy(gpt2(scale_attn_weights=False))
    assert (
        str(info.value)
        .splitlines()[0]
        .startswith(
            "no policy supports this config of model_type 'gpt2': plain needs {'scale_attn_weights': False} and "
            "class GPT2Model or GPT2Pair; scaled needs {'scale_attn_weights': True, 'n_inner': 5}."
        )
    )


def test_models_of_one_type_whose_classes_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kinds in (("heads", "GPT2LMHeadModel"), ("bare", "GPT2Model")):
        (tmp_path / f"{name}.yaml").write_text(TEXT % f", class: {kinds}")
    monkeypatch.setattr(match, "policy_files", lambda: (tmp_path / "heads.yaml", tmp_path / "bare.yaml"))
    assert find_policy(gpt2()).name == "heads"
    assert find_policy(gpt2().transformer).name == "bare"


def test_a_users_policy() -> None:
    assert find_policy(gpt2(), TEXT % "").model_types == ("gpt2", "gpt3")
    with pytest.raises(PolicyError) as info:
        find_policy(llama(), TEXT % "")
    assert (
        str(info.value)
        == "policy text:1: the policy is for model_type gpt2, gpt3, LlamaForCausalLM has model_type llama"
    )
    with pytest.raises(UnsupportedModelError, match=r"needs transformers <5, got 5\..* \(policy text:1\)"):
        find_policy(gpt2(), TEXT % ', transformers: "<5"')
    with pytest.raises(PolicyError, match="policy text:1: 'five' is not a version range"):
        find_policy(gpt2(), TEXT % ", transformers: five")


def test_two_files_that_match_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for name, config in (("one", ""), ("two", ", config: {n_layer: 2}"), ("three", ", config: {n_layer: 3}")):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(TEXT % config)
    monkeypatch.setattr(match, "policy_files", lambda: tuple(paths))
    with pytest.raises(
        PolicyError, match=r"one\.yaml:1 and .*two\.yaml:1 both match model_type gpt2: restrict one of them"
    ):
        find_policy(gpt2(n_layer=2))
    monkeypatch.setattr(match, "policy_files", lambda: tuple(paths[1:]))
    assert find_policy(gpt2(n_layer=3)).name == "three"


COUNTED = {function.__code__ for function in (find_policy, model_inside)}


def composite() -> Any:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    encoder = BertConfig(**sizes, vocab_size=24)
    decoder = BertConfig(**sizes, vocab_size=24, is_decoder=True, add_cross_attention=True)
    return EncoderDecoderModel(encoder=BertModel(encoder), decoder=BertLMHeadModel(decoder))


def calls_in(model: Any, mesh: dict[str, int]) -> Counter[str]:
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in COUNTED:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        autopar.initialize(model, {"model_parallelism": mesh})
    finally:
        sys.setprofile(None)
    return calls


@pooled(world_size=2)
def test_policies_are_found_once() -> None:
    for mesh in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        assert calls_in(gpt2(), {mesh: 2}) == {"find_policy": 1, "model_inside": 1}, mesh
    assert calls_in(composite(), {"tensor_parallel_size": 2}) == {"find_policy": 3, "model_inside": 1}

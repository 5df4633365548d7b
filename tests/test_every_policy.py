"""Every policy file, by itself: each model type, each task head, small and random, against the plain model.

The first model type of each file runs in every test run, the further ones are ``slow``. Many cases share one world;
a failure names its case. That each single rule matters is in tests/policy/test_every_rule.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
import transformers
from torch import nn

import autopar.api
from autopar.policy.load import load_policy, policy_files, policy_folder
from autopar.policy.match import find_policy, supported_model_types
from autopar.policy.resolve import make_plan
from autopar.tensor_parallel.rehearsal import rehearse
from tests.parity import check
from tests.random_models import Case, auto_heads, batches, build, cases, heads_of, kind
from tests.worlds import distributed

# Heads that no test builds, and why.
EXCLUDED = {
    "JevForDecision": "its config is of model_type jev, with a whole language model of another model type inside",
}

# Heads and KV heads at each size: shared out unevenly (6 as 4 + 2), unevenly with replicas, fewer KV heads than ranks.
SIZES = {2: (6, 3), 3: (8, 2), 4: (8, 2)}

POLICIES = [path.stem for path in policy_files()]
SEVERAL = [name for name in POLICIES if len(load_policy(policy_folder() / f"{name}.yaml").model_types) > 1]


def _types(name: str) -> tuple[str, ...]:
    return load_policy(policy_folder() / f"{name}.yaml").model_types


def _cases(model_type: str, *, words: bool | None = None) -> list[Case]:
    """Cases of a model type; ``words`` picks those of heads that make text (or work on none), or the others."""
    listed = cases(model_type, frozenset(EXCLUDED))
    return [case for case in listed if words is None or words == (kind(case.head) in ("causal", "masked"))]


def _run(wanted: Iterable[Case], tp: int, heads: int = 0, kv_heads: int = 0, vocab: int = 131) -> None:
    """Check each case; the first failure names its case on every rank."""
    transformers.logging.set_verbosity_error()
    autopar.api.rehearse = lambda *_: True  # test_every_head_can_be_rehearsed has it, without a world
    heads, kv_heads = (heads, kv_heads) if heads else SIZES[tp]
    for case in wanted:
        try:
            model = build(case, heads, kv_heads, vocab=vocab)
            inputs = batches(case, model.config)
            generates = kind(case.head) == "causal" and vocab > 3
            parallel = check(
                lambda model=model: copy.deepcopy(model), inputs, tp, first=_same_tokens if generates else None
            )
            parallel.mpu.destroy()
        except Exception as error:
            raise AssertionError(f"{case} at tp {tp}, {heads} heads, {kv_heads} KV heads: {error}") from error


def _same_tokens(plain: nn.Module, parallel: nn.Module) -> None:
    """Greedy generation with a KV cache, from a batch with padding on the left."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, plain.config.vocab_size, (2, 5), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    extra = {}
    if getattr(plain.config, "add_cross_attention", False):
        if plain.config.model_type != "gpt2":
            return  # the plain ones generate only inside an EncoderDecoderModel
        extra["encoder_hidden_states"] = torch.randn(2, 5, plain.config.hidden_size, generator=generator)
    lengths = {"max_new_tokens": 6, "min_new_tokens": 6}
    tokens = []
    for model in (plain, parallel):
        model.eval()
        tokens.append(model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths, **extra))
        model.train()
    assert torch.equal(*tokens), f"generated {tokens[1].tolist()}, the plain model {tokens[0].tolist()}"


@pytest.mark.parametrize("name", POLICIES)
@distributed(world_size=2, timeout=300)
def test_every_head_on_two(name: str) -> None:
    _run(_cases(_types(name)[0]), 2)


@pytest.mark.parametrize("name", POLICIES)
@distributed(world_size=4, timeout=300)
def test_the_head_that_makes_text_on_four(name: str) -> None:
    _run(_cases(_types(name)[0], words=True), 4)


@distributed(world_size=3, timeout=300)
def test_one_of_each_family_on_three() -> None:
    for model_type in ("gpt2", "llama", "phi3", "qwen3", "bert", "distilbert"):
        _run(_cases(model_type, words=True), 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@distributed(world_size=4, timeout=600)
def test_the_other_heads_on_four(name: str) -> None:
    _run(_cases(_types(name)[0], words=False), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
@distributed(world_size=2, timeout=900)
def test_further_model_types_on_two(name: str) -> None:
    for model_type in _types(name)[1:]:
        _run(_cases(model_type), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
@distributed(world_size=4, timeout=900)
def test_further_model_types_on_four(name: str) -> None:
    for model_type in _types(name)[1:]:
        _run(_cases(model_type), 4)


# -- sizes --------------------------------------------------------------------------------------------------------

LLAMA, QWEN3, PHI3 = (
    Case("llama", "LlamaForCausalLM"),
    Case("qwen3", "Qwen3ForCausalLM"),
    Case("phi3", "Phi3ForCausalLM"),
)
GPT2, BERT = Case("gpt2", "GPT2LMHeadModel"), Case("bert", "BertForMaskedLM")


@distributed(world_size=2, timeout=300)
def test_one_two_and_three_kv_heads_on_two() -> None:
    for heads, kv_heads in [(4, 1), (5, 1), (6, 2), (9, 3)]:
        _run([LLAMA, QWEN3, PHI3], 2, heads, kv_heads)


@distributed(world_size=3, timeout=300)
def test_one_two_and_three_kv_heads_on_three() -> None:
    for heads, kv_heads in [(4, 1), (6, 2), (8, 2), (9, 3)]:
        _run([LLAMA, QWEN3, PHI3], 3, heads, kv_heads)


@distributed(world_size=4, timeout=300)
def test_one_two_and_three_kv_heads_on_four() -> None:
    for heads, kv_heads in [(6, 1), (8, 2), (9, 3)]:
        _run([LLAMA, QWEN3, PHI3], 4, heads, kv_heads)


@distributed(world_size=4, timeout=300)
def test_25_heads_on_four() -> None:
    for kv_heads in (1, 5, 25):
        _run([LLAMA, PHI3], 4, 25, kv_heads)
    _run([GPT2, BERT], 4, 25)


@distributed(world_size=4, timeout=300)
def test_small_and_odd_vocabularies_on_four() -> None:
    for vocab in (17, 5, 3):  # 3 leaves the last rank without a row
        _run([GPT2, LLAMA, BERT, Case("llama", "LlamaForCausalLM", "other tie")], 4, 4, 2, vocab)


# -- nothing is left out ------------------------------------------------------------------------------------------


def test_every_head_that_transformers_has_is_tested_or_listed_with_a_reason() -> None:
    seen = set()
    for model_type in supported_model_types():
        heads = set(heads_of(model_type))
        assert auto_heads(model_type) <= heads
        for head in heads - set(EXCLUDED):
            assert kind(head) is not None, f"{model_type}: no inputs for {head}; add them to tests/random_models.py"
        tested = {case.head for case in _cases(model_type)}
        assert tested == heads - set(EXCLUDED), model_type
        seen |= heads
    assert set(EXCLUDED) <= seen, "a head is excluded that no supported model type has"


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_every_head_can_be_rehearsed(name: str) -> None:
    """What initialize does before it touches a model neither refuses nor skips one of them."""
    for model_type in _types(name):
        for case in _cases(model_type):
            model = build(case, *SIZES[2])
            assert rehearse(model, "", make_plan(model, find_policy(model), 2)), case


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_says_what_is_special_and_for_which_transformers(name: str) -> None:
    path = policy_folder() / f"{name}.yaml"
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ") and first.endswith(".") and len(first) > 20, first
    assert load_policy(path).transformers == ">=5.23,<6"

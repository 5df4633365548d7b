"""Every policy file, by itself: each model type, each task head, small and random, against the plain model."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autopar.policy.load import load_policy, policy_files, policy_folder
from autopar.policy.match import find_policy
from autopar.policy.resolve import make_plan
from autopar.policy.schema import Policy
from tests.parity import check
from tests.random_models import Case, auto_heads, batches, build, cases, kind
from tests.worlds import distributed

# Heads that no test builds, and why.
EXCLUDED = {
    "JevForDecision": "belongs to model_type jev, which holds a whole language model of another model type inside",
}

# heads, KV heads at each size: uneven (6 over 2 ranks as 4 + 2), uneven with replicas, and fewer KV heads than ranks.
SIZES = {2: (6, 3), 3: (8, 2), 4: (8, 2)}

POLICIES = [path.stem for path in policy_files()]
FAMILIES = ["gpt2", "llama", "bert"]
_TYPES = {name: load_policy(policy_folder() / f"{name}.yaml").model_types for name in POLICIES}


def _cases(model_types: tuple[str, ...]) -> Iterator[Case]:
    for model_type in model_types:
        yield from cases(model_type, frozenset(EXCLUDED))


def _run(wanted: Iterator[Case], tp: int) -> None:
    """Check each case; the first failure names its case on every rank."""
    heads, kv_heads = SIZES[tp]
    for case in wanted:
        try:
            model = build(case, heads, kv_heads)
            parallel = check(
                lambda model=model: copy.deepcopy(model),
                batches(case, model.config),
                tp,
                first=_same_tokens if kind(case.head) == "causal" else None,
            )
            parallel.mpu.destroy()
        except Exception as error:
            raise AssertionError(f"{case} at tp {tp}: {error}") from error


def _same_tokens(plain: nn.Module, parallel: nn.Module) -> None:
    """Greedy generation with a KV cache, from a padded batch."""
    ids = torch.randint(3, plain.config.vocab_size, (2, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    extra = {}
    if getattr(plain.config, "add_cross_attention", False):
        extra["encoder_hidden_states"] = torch.randn(2, 5, plain.config.hidden_size, generator=torch.Generator().manual_seed(4))
    tokens = []
    for model in (plain, parallel):
        model.eval()
        with torch.no_grad():
            tokens.append(
                model.generate(
                    ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, **extra
                )
            )
        model.train()
    assert torch.equal(*tokens), f"generated {tokens[1].tolist()}, the plain model {tokens[0].tolist()}"


@pytest.mark.parametrize("name", POLICIES)
@distributed(world_size=2, timeout=300)
def test_every_head_on_two(name: str) -> None:
    _run(_cases(_TYPES[name][:1]), 2)


@pytest.mark.parametrize("name", POLICIES)
@distributed(world_size=4, timeout=300)
def test_every_head_on_four(name: str) -> None:
    _run(_cases(_TYPES[name][:1]), 4)


@pytest.mark.parametrize("name", FAMILIES)
@distributed(world_size=3, timeout=300)
def test_every_head_on_three(name: str) -> None:
    _run(_cases(_TYPES[name][:1]), 3)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", [name for name in POLICIES if len(_TYPES[name]) > 1])
def test_every_further_model_type(name: str, tp: int) -> None:
    {2: _further_on_two, 4: _further_on_four}[tp](name)


@distributed(world_size=2, timeout=600)
def _further_on_two(name: str) -> None:
    _run(_cases(_TYPES[name][1:]), 2)


@distributed(world_size=4, timeout=600)
def _further_on_four(name: str) -> None:
    _run(_cases(_TYPES[name][1:]), 4)


def _all(name: str, tp: int) -> None:
    failures = []
    for case in _cases(_TYPES[name]):
        try:
            _run(iter([case]), tp)
        except AssertionError as e:
            failures.append(str(e))
    assert not failures, ' || '.join(failures)

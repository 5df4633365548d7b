"""Every model type whose experts ranks can hold whole, over replicas of one rank and of two, against one process."""

import copy
from typing import Any

import pytest
import torch

import autopar
from autopar.policy.load import own_policies
from autopar.policy.schema import Policy
from tests.features.experts.mixtures import wholes
from tests.harness.tiers import in_tier
from tests.harness.worlds import pooled
from tests.random_models import batches, build, cases, kind, of_type

FIRST = (  # one of each structure
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "jamba", "qwen3_next"),
    *("dbrx", "jetmoe", "llama4_text", "longcat_flash"),
)
DOUBLE = ("deepseek_v4", "hy_v4")  # in float32 rounding alone takes gradients behind hyper-connections 2e-5 apart
ROUNDED = {
    "deepseek_v4": 2e-5,  # its head sums in float32 whatever the weights are: tp 2 alone is 7.3e-6 apart
    "nllb-moe": 2e-5,  # biases of keys, whose gradient is rounding, are 1.1e-5 apart
}
BALANCED = ("nllb-moe",)  # each batch by itself in one process, unless replicas are told so
DENSE = ("gemma4_text", "gemma4_unified_text")  # what is small of them has no experts


def _by_expert(policy: Policy) -> bool:
    sections = [policy.head]
    for tower in policy.towers:
        sections += [tower.prefix, tower.every_stage, tower.suffix, tower.blocks]
    return any(rule.by_expert for section in sections for rule in section.values())


def _types() -> list[Any]:
    found = {name for policy in own_policies().values() if _by_expert(policy) for name in policy.model_types}
    whole = sorted(name for name in found if not of_type(name).inside and name not in DENSE)
    assert set(FIRST) <= set(whole)
    return [*in_tier("all", FIRST), *in_tier("sweep", [name for name in whole if name not in FIRST])]


def _loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    out = model(**batch)
    loss: torch.Tensor | None = getattr(out, "loss", None)
    return out[0].float().pow(2).mean() if loss is None else loss


def _compare(model_type: str, config: dict[str, Any]) -> None:
    listed = cases(model_type)
    case = next((each for each in listed if kind(each.head) == "causal"), listed[0])
    plain = build(case, 6, 3, vocab=131).train()
    plain = plain.double() if model_type in DOUBLE else plain
    for module in plain.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if model_type in BALANCED:
        config = {**config, "loss": {"router_aux": "replica"}}
    model = autopar.initialize(copy.deepcopy(plain), config)
    data = batches(case, plain.config, 2)
    for batch in data:
        (_loss(plain, batch) / 2).backward()
    _loss(model, data[model.mpu.dp.rank]).backward()
    autopar.average_gradients(model)
    due = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    largest = max(float(gradient.norm()) for gradient in due.values())
    found = wholes(model, gradients=True)
    for name, gradient in due.items():
        apart = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-4 * largest)
        assert apart < ROUNDED.get(model_type, 1e-5), (name, float(apart))
    if "zero" in config:  # FSDP2 cannot be undone
        model.mpu.destroy()
    else:
        autopar.deparallelize(model)


@pytest.mark.parametrize("model_type", _types())
@pooled(world_size=2)
def test_two_replicas(model_type: str) -> None:
    _compare(model_type, {"ep": 2})


@pytest.mark.parametrize("model_type", _types())
@pooled(world_size=4)
def test_two_replicas_of_two_ranks(model_type: str) -> None:
    _compare(model_type, {"tp": 2, "ep": 4})


@pytest.mark.parametrize("model_type", _types())
@pooled(world_size=2)
def test_two_replicas_with_zero_3(model_type: str) -> None:
    _compare(model_type, {"ep": 2, "zero": {"stage": 3}})

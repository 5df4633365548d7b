"""Norms whose mean runs over sharded features, in groups or over all, in each way that such norms are written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import PolicyError
from tests.harness.worlds import pooled
from tests.parity import check
from tests.tensor_parallel.toys import (
    MLP,
    MLP_RULES,
    REFUSED,
    GroupedMean,
    Mean,
    ToyConfig,
    batches,
    checked_plan,
    toy,
    toy_policy,
)

NORMED = toy_policy({"ffn": "ffn"}, {**MLP_RULES, "between": {"norm_over": "ffn"}})


class MeanOfAll(Mean):
    """The mean with ``dim`` as a list, without ``keepdim``, by the function."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(torch.mean(x * x, dim=[-1], dtype=torch.float32) + 1e-6).unsqueeze(-1)


class Centred(nn.Module):
    """LayerNorm, spelled out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(x.ndim - 1, keepdim=True)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() + self.bias


class Bare(nn.Module):
    """Without any parameter; ``F.layer_norm`` as some models call it."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), eps=1e-3)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "Mean": Mean,
    "MeanOfAll": MeanOfAll,
    "Centred": Centred,
    "Bare": Bare,
    "LayerNorm": lambda width: nn.LayerNorm(width, eps=1e-2),
    "LayerNorm without bias": lambda width: nn.LayerNorm(width, bias=False),
    "LayerNorm without weight": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "RMSNorm": nn.RMSNorm,
    "RMSNorm with eps": lambda width: nn.RMSNorm(width, eps=1e-2),
}


def normed(name: str) -> Any:
    return toy(lambda config: MLP(config, NORMS[name](config.ffn)))


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_norm_over_all_sharded_features_in_each_way_it_is_written() -> None:
    for name in NORMS:
        check(lambda name=name: normed(name), batches(), 2, policy=NORMED)


@pooled(world_size=2)
def test_in_half_precision_the_sums_are_taken_in_full() -> None:
    for name in ("LayerNorm", "RMSNorm", "Mean"):
        plain, model = normed(name).bfloat16(), normed(name).bfloat16()
        autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": 2}}, policy=NORMED)
        x = batches()[0]["inputs_embeds"].bfloat16()
        y = model.layers[0].up(x)
        assert y.dtype is torch.bfloat16
        normed_y = model.layers[0].between(y.detach())
        start = 0 if model.mpu.tp.rank == 0 else 3
        expected = plain.layers[0].between(plain.layers[0].up(x))[..., start : start + y.shape[-1]]
        assert normed_y.dtype == expected.dtype
        assert torch.allclose(normed_y.float(), expected.float(), rtol=2**-6, atol=2**-6)


class Keys(nn.Module):
    """Queries and keys normed over all their heads (OLMo 2), with fewer key heads than query heads."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.repeats = config.heads // config.groups
        self.q = nn.Linear(config.hidden_size, config.heads * 2)
        self.k = nn.Linear(config.hidden_size, config.groups * 2)
        self.q_norm, self.k_norm = Mean(config.heads * 2), nn.LayerNorm(config.groups * 2)
        self.o = nn.Linear(config.heads * 2, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (part.unflatten(-1, (-1, 2)) for part in (self.q_norm(self.q(x)), self.k_norm(self.k(x))))
        k = k.repeat_interleave(self.repeats, 2)
        return self.o(torch.tanh(q * k).flatten(-2))


KEYS = toy_policy(
    {"kv": {"count": "groups", "replicate": True}, "heads": {"count": "heads", "follows": "kv"}},
    {
        "q": {"column": "heads"},
        "k": {"column": "kv"},
        "q_norm": {"norm_over": "heads"},
        "k_norm": {"norm_over": "kv"},
        "o": {"row": "heads"},
    },
    attributes={"repeats": "heads / kv"},
)


@pooled(world_size=4)
def test_what_several_ranks_hold_counts_once_in_the_mean() -> None:
    check(lambda: toy(Keys), batches(), 4, policy=KEYS)
    check(lambda: toy(Keys, groups=1), batches(), 4, policy=KEYS)
    check(lambda: toy(Keys, heads=6, groups=3), batches(), 4, policy=KEYS)


class Grouped(nn.Module):
    """A mixer's end: a norm over each group, of which several heads are made."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        width = config.heads * 3
        self.up, self.down = nn.Linear(config.hidden_size, width), nn.Linear(width, config.hidden_size)
        self.norm = GroupedMean(width, width // config.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


GROUPED = toy_policy(
    {"groups": {"count": "groups", "replicate": True}, "heads": {"count": "heads", "follows": "groups"}},
    {"up": {"column": "heads"}, "norm": {"norm_over": "heads", "within": "groups"}, "down": {"row": "heads"}},
    attributes={"norm.group_size": "heads * 3 / groups"},
)


@pooled(world_size=4)
def test_groups_that_ranks_share_and_groups_that_a_rank_holds_alone() -> None:
    for heads, groups in ((4, 2), (4, 1), (8, 4), (8, 2), (6, 3), (10, 5)):
        check(lambda h=heads, g=groups: toy(Grouped, heads=h, groups=g), batches(), 4, policy=GROUPED)


def test_a_norm_over_groups_needs_to_know_of_them() -> None:
    policy = toy_policy(GROUPED["units"], {**GROUPED["blocks"]["modules"], "norm": {"norm_over": "heads"}})
    policy["blocks"]["attributes"] = {"norm.group_size": "heads * 3 / groups"}
    for groups, tp, what in ((4, 2, "6 of 12 sharded features in a norm, got 3"), (2, 2, "6 of 12"), (2, 4, "3 of 12")):
        with pytest.raises(PolicyError) as info:  # also where a rank's features are just those of one group
            checked_plan(toy(Grouped, groups=groups), policy, tp)
        message = str(info.value)
        assert message.startswith(f"policy dict:blocks.modules.norm: expected a mean over {what}")
        assert message.endswith("For a norm of groups write {norm_over: ..., within: GROUPS} or {sharded: ...}.")


class Varied(nn.Module):
    """A norm by another reduction."""

    def __init__(self, width: int, by: str) -> None:
        super().__init__()
        self.weight, self.by = nn.Parameter(torch.ones(width)), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by == "mean over tokens":
            return self.weight * x / x.mean(1, keepdim=True)
        if self.by == "normalize":
            return self.weight * F.normalize(x, dim=-1)
        if self.by == "linalg_vector_norm":
            return self.weight * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return self.weight * x / getattr(x, self.by)(-1, keepdim=True)


@pytest.mark.parametrize(("by", "message"), REFUSED["norms"])
def test_a_reduction_that_is_not_known_is_refused_by_name(by: str, message: str) -> None:
    model = toy(lambda config: MLP(config, Varied(config.ffn, by)))
    with pytest.raises(PolicyError) as info:
        checked_plan(model, NORMED)
    fix = "Use the rule {replicated: ...} or {sharded: ...}."
    assert str(info.value) == f"policy dict:blocks.modules.between: {message}\n  {fix}"

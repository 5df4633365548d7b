"""Region modules: outputs used inside a region, work on all heads at once, bare experts, arguments that are sharded."""

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import PolicyError
from tests.harness.worlds import pooled
from tests.parity import check
from tests.tensor_parallel.toys import REFUSED, Toy, ToyConfig, batches, checked_plan, filled, toy, toy_policy

HEADS = {"heads": "heads"}


class Latent(nn.Module):
    """Latent attention: one part of a latent makes keys per head, the other is in every head's key as it is."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.heads, hidden = config.heads, config.hidden_size
        self.q = nn.Linear(hidden, self.heads * 4)
        self.latent = nn.Linear(hidden, 5)
        self.norm = nn.LayerNorm(3)
        self.k = nn.Linear(3, self.heads * 2)
        self.o = nn.Linear(self.heads * 4, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 4))
        low, shared = self.latent(x).split([3, 2], -1)
        k = self.k(self.norm(low)).unflatten(-1, (self.heads, 2))
        k = torch.cat([k, shared.unsqueeze(2).expand(-1, -1, self.heads, -1)], -1)
        return self.o(torch.tanh(q * k).flatten(-2))


LATENT_RULES: dict[str, Any] = {
    "q": {"column": "heads"},
    "latent": {"enter_output": "heads"},
    "norm": {"replicated": "heads"},
    "k": {"column": "heads", "inside": True},
    "o": {"row": "heads"},
}


@pytest.mark.tier("test")
@pooled(world_size=3)
def test_an_output_that_is_used_inside_the_region() -> None:
    check(lambda: toy(Latent), batches(), 3, policy=toy_policy(HEADS, LATENT_RULES, attributes=HEADS))


class Selective(nn.Module):
    """Mamba 1: what the sharded features say all together (a row) steers them again, one by one."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.ffn)
        self.steer = nn.Linear(config.ffn, 4)
        self.step = nn.Linear(3, config.ffn)
        self.down = nn.Linear(config.ffn, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        low, common = self.steer(x.tanh()).split([3, 1], -1)
        return self.down(x * self.step(low).sigmoid() + common)


@pooled(world_size=2)
def test_a_row_whose_output_is_used_inside_the_region() -> None:
    rules = {
        "up": {"column": "ffn"},
        "steer": {"row": "ffn", "enter_output": True},
        "step": {"column": "ffn", "inside": True},
        "down": {"row": "ffn"},
    }
    check(lambda: toy(Selective), batches(), 2, policy=toy_policy({"ffn": "ffn"}, rules))


class OwnLinear(nn.Module):
    """A linear layer with a forward of its own, and more than one output."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, size))
        self.bias = nn.Parameter(torch.empty(out))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight) + self.bias, None


class Range(nn.Module):
    """Keeps the range of what it has seen, over all features."""

    def __init__(self) -> None:
        super().__init__()
        self.high = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.high = torch.maximum(self.high, x.detach().max())
        return x / (1 + self.high), None


class Ranged(nn.Module):
    """Layers that are no ``nn.Linear``, and between them what looks at all features at once."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.up = OwnLinear(config.hidden_size, config.ffn)
        self.gate = OwnLinear(config.hidden_size, config.ffn)
        self.range = Range()
        self.down = OwnLinear(config.ffn, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.range(self.up(x)[0] * self.gate(x)[0])[0])[0]


RANGED_RULES: dict[str, Any] = {
    "up": {"region": "ffn", "opens": True},
    "up.weight": {"sharded": "ffn", "dim": 0},
    "up.bias": {"sharded": "ffn", "dim": 0},
    "gate": {"region": "ffn", "opens": True},
    "gate.weight": {"sharded": "ffn", "dim": 0},
    "gate.bias": {"sharded": "ffn", "dim": 0},
    "range": {"gathered": "ffn", "dim": 2},
    "down": {"region": "ffn", "closes": True},
    "down.weight": {"sharded": "ffn", "dim": 1},
    "down.bias": {"once": "ffn"},
}


@pooled(world_size=2)
def test_a_region_that_some_modules_open_and_another_closes() -> None:
    check(lambda: toy(Ranged), batches(), 2, policy=toy_policy({"ffn": "ffn"}, RANGED_RULES))


def test_regions_that_are_opened_and_never_closed() -> None:
    units = {"ffn": "ffn"}
    assert checked_plan(toy(Ranged), toy_policy(units, RANGED_RULES))
    rules = {name: rule for name, rule in RANGED_RULES.items() if name != "down"}
    with pytest.raises(PolicyError, match="gate opens a region sharded by 'ffn' that no row closes"):
        checked_plan(toy(Ranged), toy_policy(units, rules))


class Talking(nn.Module):
    """Heads that are mixed with each other, along dim 2."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(heads, heads))

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.einsum("bshd,hg->bsgd", x * factor, self.mix).softmax(2)


class TalkingHeads(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.hidden_size, self.heads * 3)
        self.talk = Talking(self.heads)
        self.o = nn.Linear(self.heads * 3, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.talk(self.q(x).unflatten(-1, (self.heads, 3)), 0.5).flatten(-2))


def talking(**rule: Any) -> dict[str, Any]:
    rules = {"q": {"column": "heads"}, "talk": {"gathered": "heads", **rule}, "o": {"row": "heads"}}
    return toy_policy(HEADS, rules, attributes=HEADS)


@pooled(world_size=3)
def test_a_module_that_works_on_all_heads_at_once() -> None:
    check(lambda: toy(TalkingHeads), batches(), 3, policy=talking(dim=2))
    check(lambda: toy(TalkingHeads), batches(), 3, policy=talking(dim=-2))


def test_gathered_needs_a_count() -> None:
    policy = talking(dim=2)
    policy["units"] = {"heads": "inferred"}
    del policy["blocks"]["attributes"]
    with pytest.raises(PolicyError) as info:
        checked_plan(toy(TalkingHeads), policy)
    assert str(info.value) == (
        "policy dict:blocks.modules.talk: 'gathered' of talk needs a unit with a count, 'heads' is inferred"
    )


class Experts(nn.Module):
    """A mixture as bare parameters; every token goes to every expert, as the weights say."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(3, config.hidden_size, 2 * config.ffn))
        self.up_bias = nn.Parameter(torch.empty(3, 2 * config.ffn))
        self.down = nn.Parameter(torch.empty(3, config.ffn, config.hidden_size))
        self.down_bias = nn.Parameter(torch.empty(3, config.hidden_size))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = (torch.einsum("bsh,ehf->besf", x, self.up) + self.up_bias[:, None]).chunk(2, -1)
        y = torch.einsum("besf,efh->besh", gate.sigmoid() * up, self.down) + self.down_bias[:, None]
        return torch.einsum("besh,bse->bsh", y, weights)


class Mixture(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden_size, 3)
        self.experts = Experts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, weights=self.router(x).softmax(-1))


MIXTURE_RULES: dict[str, Any] = {
    "router": "replicated",
    "experts": {"region": "ffn"},
    "experts.up": {"sharded": ["ffn", "ffn"], "dim": 2},
    "experts.up_bias": {"sharded": ["ffn", "ffn"], "dim": 1},
    "experts.down": {"sharded": "ffn", "dim": 1},
    "experts.down_bias": {"once": "ffn"},
}


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_bare_experts_in_a_region_with_a_bias_that_counts_once() -> None:
    check(lambda: toy(Mixture), batches(), 2, policy=toy_policy({"ffn": "ffn"}, MIXTURE_RULES))


class Biased(nn.Module):
    """A score per head, with a bias that somebody else made for all heads."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.hidden_size, self.heads * 3)
        self.o = nn.Linear(self.heads * 3, config.hidden_size)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, folded: Any = None, common: Any = None
    ) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 3)).transpose(1, 2)  # [batch, heads, seq, 3]
        if bias is not None:
            q = q + bias  # [heads, 1, 3]
        if folded is not None:
            q = (q.flatten(0, 1) * folded).view_as(q)  # [batch * heads, 1, 3]
        if common is not None:
            q = q - common  # [1, 1, 3]
        return self.o(torch.tanh(q).transpose(1, 2).flatten(-2))


class Biases(Toy):
    """Makes the biases once and hands them to its blocks, one in place, the others by name."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config, Biased)
        self.bias = nn.Linear(1, config.heads * 3)

    def common(self, bias: torch.Tensor) -> torch.Tensor:
        return torch.linspace(0, 1, 3, device=bias.device).view(1, 1, 3)

    def forward(self, inputs_embeds: torch.Tensor) -> Any:
        bias = self.bias(inputs_embeds.new_ones(1)).view(-1, 1, 3)
        folded = bias.cos().repeat(len(inputs_embeds), 1, 1)
        for layer in self.layers:
            inputs_embeds = inputs_embeds + layer(inputs_embeds, bias, folded=folded, common=self.common(bias))
        return {"last_hidden_state": inputs_embeds}


INPUTS = {name: {"sharded": "heads", "dim": 0} for name in ("bias", "folded", "common")}


def biased(inputs: dict[str, Any]) -> dict[str, Any]:
    policy = toy_policy(HEADS, {"q": {"column": "heads"}, "o": {"row": "heads"}}, attributes=HEADS, inputs=inputs)
    return {**policy, "prefix": {"bias": "replicated"}}


@pooled(world_size=3)
def test_arguments_are_cut_in_place_and_by_name_and_hand_their_gradient_back() -> None:
    check(lambda: filled(Biases(ToyConfig())), batches(), 3, policy=biased(INPUTS))


class OneBias(Biases):
    def common(self, bias: torch.Tensor) -> torch.Tensor:
        return bias.mean(0, keepdim=True)


def test_an_argument_that_is_the_same_for_all_must_not_be_learned() -> None:
    assert checked_plan(filled(Biases(ToyConfig())), biased(INPUTS), 3)
    with pytest.raises(PolicyError, match=r"bias.bias works on sharded activations, but its rule leaves"):
        checked_plan(filled(OneBias(ToyConfig())), biased(INPUTS), 3)


def test_an_input_that_forward_does_not_take_or_nobody_can_count() -> None:
    for path, message in REFUSED["inputs"]:
        with pytest.raises(PolicyError) as info:
            checked_plan(filled(Biases(ToyConfig())), biased({path: {"sharded": "heads", "dim": 0}}))
        assert str(info.value).startswith(f"policy dict:blocks.inputs.{path}: {message}")
    policy = biased(INPUTS)
    policy["units"] = {"heads": "inferred"}
    del policy["blocks"]["attributes"]
    with pytest.raises(PolicyError, match=r"inputs.bias: 'heads' is inferred: the input bias needs a count"):
        checked_plan(filled(Biases(ToyConfig())), policy)

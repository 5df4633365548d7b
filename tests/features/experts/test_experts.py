"""expert_parallel_size: whole experts on ranks, tokens that travel; the plain model's numbers, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.errors import ConfigError
from autopar.features.experts.layers import ExpertParallel
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from tests.harness.worlds import pooled
from tests.parity import check, language_batches, randomise
from tests.small import llama
from tests.tensor_parallel.test_region_modules import MIXTURE_RULES, Mixture
from tests.tensor_parallel.toys import ToyConfig, batches, checked_plan, toy, toy_policy


def by_expert(tp: int) -> dict[str, Any]:
    return {"model_parallelism": {"tensor_parallel_size": tp, "expert_parallel_size": tp}}


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    more = {"num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True, "initializer_range": 0.2}
    config = MixtralConfig(num_hidden_layers=2, vocab_size=31, router_aux_loss_coef=0.1, **sizes, **more)
    return randomise(MixtralForCausalLM(config))


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_mixture_with_its_load_balancing_loss_on_two() -> None:
    model = check(mixtral, language_batches(31), 2, config=by_expert(2))
    experts = model.model.layers[1].mlp.experts
    own = 3 if model.mpu.tp.rank == 0 else 2
    assert isinstance(experts, ExpertParallel)
    assert experts.num_experts == own and experts.gate_up_proj.shape == (own, 16, 16)
    assert model.model.layers[1].self_attn.q_proj.weight.shape[0] == 8  # the rest is sharded as before
    autopar.deparallelize(model)
    assert experts.num_experts == 5 and type(experts).__name__ == "MixtralExperts"
    assert experts.gate_up_proj.shape == (5, 16, 16)


def test_as_many_experts_as_ranks_at_least() -> None:
    model = mixtral()
    plan = make_plan(model, find_policy(model), 2, experts=2)
    layout = plan.tensors["model.layers.0.mlp.experts.down_proj"].layout
    assert layout is not None and (layout.dim, layout.ranges(1)) == (0, ((3, 5),))
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size=6 does not fit MixtralForCausalLM: 5 experts "):
        make_plan(model, find_policy(model), 6, experts=6)


class Chosen(nn.Module):
    """Experts as bare parameters; ``chosen`` says which of them see a token."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.empty(4, config.hidden_size, config.ffn))
        self.down = nn.Parameter(torch.empty(4, config.ffn, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(4, config.hidden_size))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = self.up[chosen], self.down[chosen]  # [tokens, k, hidden, ffn]
        y = torch.einsum("tkf,tkfh->tkh", F.gelu(torch.einsum("th,tkhf->tkf", hidden, up)), down) + self.bias[chosen]
        return (y * weights.unsqueeze(-1)).sum(1)


class Routed(nn.Module):
    """Of ``reachable`` experts each token chooses two."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden_size, config.reachable)
        self.experts = Chosen(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).flatten(0, 1).topk(2)
        return self.experts(x.flatten(0, 1), chosen, weights).view_as(x)


ROUTED = toy_policy(
    {"ffn": "inferred", "experts": "block.experts.num_experts"},
    {
        "router": "replicated",
        "experts": {"region": "ffn", "by_expert": "experts"},
        "experts.up": {"sharded": "ffn", "dim": 2},
        "experts.down": {"sharded": "ffn", "dim": 1},
        "experts.bias": {"once": "ffn"},
    },
)


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_ranks_that_get_no_token_and_tokens_that_do_not_divide() -> None:
    for reachable in (2, 4):  # with two, the last two ranks get none; 10 tokens on 4 ranks
        check(lambda n=reachable: toy(Routed, reachable=n), batches(), 4, policy=ROUTED, config=by_expert(4))
    check(lambda: toy(Routed, reachable=4), batches(), 4, policy=ROUTED)  # the same policy, each expert cut


@pooled(world_size=4)
def test_fewer_tokens_than_ranks() -> None:
    few = [{"inputs_embeds": batches()[0]["inputs_embeds"][:1, :2]}]
    check(lambda: toy(Routed, reachable=3), few, 4, policy=ROUTED, config=by_expert(4))


def test_models_whose_experts_cannot_be_sharded_by_expert() -> None:
    plain = llama()
    with pytest.raises(ConfigError) as info:
        make_plan(plain, find_policy(plain), 2, experts=2)
    assert str(info.value) == "expert_parallel_size: this model has no experts that can be sharded by expert"
    rules = {**MIXTURE_RULES, "experts": {"region": "ffn", "by_expert": "experts"}}
    policy = toy_policy({"ffn": "ffn", "experts": "3"}, rules)
    assert checked_plan(toy(Mixture), policy)
    with pytest.raises(ConfigError) as info:
        make_plan(toy(Mixture), read_user_policy(policy), 2, experts=2)
    assert str(info.value) == (
        "expert_parallel_size is not supported with layers.0.experts (Experts), which chooses its experts inside\n"
        "  Remove it: then each expert is sharded."
    )


@pooled(world_size=2)
def test_the_size_of_the_config_reaches_the_plan() -> None:
    with pytest.raises(ConfigError, match="this model has no experts"):
        autopar.initialize(llama(), by_expert(2))
    with pytest.raises(ConfigError, match=r"that divides 2 x 1 replicas = 2: 1, 2 fit here$"):
        autopar.initialize(mixtral(), {"model_parallelism": {"tensor_parallel_size": 2, "expert_parallel_size": 4}})

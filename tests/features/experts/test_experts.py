"""Experts over tensor-parallel ranks, and the auxiliary loss of routers: equal to the reference model, and refusals."""

import copy
import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import TrainingArguments

import autopar
from autopar import registry
from autopar.dry_run.plan_model import ModelPlans
from autopar.errors import ConfigError
from autopar.features.experts.layers import ExpertParallel
from autopar.features.experts.router_loss import balancing_module, is_switch_loss
from autopar.integrations import ParallelTrainer
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from tests.features.experts import mixtures
from tests.harness.worlds import pooled
from tests.integrations.runs import launched
from tests.parity import check, language_batches
from tests.small import llama
from tests.tensor_parallel.test_region_modules import MIXTURE_RULES, Mixture
from tests.tensor_parallel.toys import ToyConfig, batches, checked_plan, toy, toy_policy


def by_expert(tp: int) -> dict[str, Any]:
    return {"model_parallelism": {"tensor_parallel_size": tp, "expert_parallel_size": tp}}


def mixtral() -> Any:
    routed = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    return mixtures.mixtral(5, num_attention_heads=8, num_key_value_heads=4, intermediate_size=8, **routed)


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


def test_as_many_experts_as_ranks_and_experts_that_can_be_sharded_by_expert() -> None:
    model = mixtral()
    plan = make_plan(model, find_policy(model), 2, experts=2)
    layout = plan.tensors["model.layers.0.mlp.experts.down_proj"].layout
    assert layout is not None and (layout.dim, layout.ranges(1)) == (0, ((3, 5),))
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size=6 does not fit MixtralForCausalLM: 5 experts "):
        make_plan(model, find_policy(model), 6, experts=6)

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
def test_ranks_without_a_token_and_tokens_that_do_not_divide() -> None:
    for reachable in (2, 4):  # with two, the last two ranks get none; 10 tokens on 4 ranks
        check(lambda n=reachable: toy(Routed, reachable=n), batches(), 4, policy=ROUTED, config=by_expert(4))
    check(lambda: toy(Routed, reachable=4), batches(), 4, policy=ROUTED)  # the same policy, each expert cut

    few = [{"inputs_embeds": batches()[0]["inputs_embeds"][:1, :2]}]
    check(lambda: toy(Routed, reachable=3), few, 4, policy=ROUTED, config=by_expert(4))


@pooled(world_size=2)
def test_sizes_that_do_not_fit_and_a_mixture_without_the_feature() -> None:
    with pytest.raises(ConfigError, match="this model has no experts"):
        autopar.initialize(llama(), by_expert(2))
    with pytest.raises(ConfigError, match=r"that divides 2 x 1 replicas = 2: 1, 2 fit here$"):
        autopar.initialize(mixtral(), {"tp": 2, "ep": 4})

    plain = routed()
    with mock.patch.object(registry, "features", tuple):
        with pytest.raises(autopar.ConfigError) as raised:
            autopar.initialize(plain, {})
        model = autopar.initialize(plain, {"tp": 2})
        loss = model(**batch_of(0, 1)).loss
    assert str(raised.value) == (
        "the auxiliary loss of the routers of MixtralForCausalLM over 2 replicas needs the feature 'experts', which is "
        "not installed.\n  Installed: none. Restore the folder autopar/features/experts."
    )
    torch.testing.assert_close(loss, routed()(**batch_of(0, 1)).loss)


_PATCH = "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func"


def routed() -> Any:
    return mixtures.mixtral(4, vocab_size=131, output_router_logits=True, router_aux_loss_coef=0.1).train()


def batch_of(step: int, replicas: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 131, (2 * replicas, 8), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[0, 5:], mask[-1, 3:] = 0, 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def worst(model: Any, plain: Any) -> float:
    """Return how far gradients are apart."""
    with autopar.full_params(model):
        pairs = [(p.grad, other.grad) for p, other in zip(model.parameters(), plain.parameters(), strict=True)]
        return max(float((mine - other).norm() / other.norm()) for mine, other in pairs)


@pytest.mark.tier("test", only=("sizes0",))
@pytest.mark.parametrize("sizes", [{}, {"ep": 2}, {"cp": 2}, {"tp": 2}])
@pooled(world_size=2)
def test_it_is_that_of_one_process_with_all_batches(sizes: dict[str, int]) -> None:
    plain = routed()
    model = autopar.initialize(copy.deepcopy(plain), sizes)
    replicas, own = model.mpu.dp.size, slice(2 * model.mpu.dp.rank, 2 * model.mpu.dp.rank + 2)
    for step in range(2):  # accumulated, as one process does
        whole = batch_of(step, replicas)
        expected = plain(**whole)
        expected.loss.backward()
        out = model(**{name: x[own] for name, x in whole.items()})
        out.loss.backward()
        assert abs(float(out.aux_loss.detach() - expected.aux_loss.detach())) < 1e-6
    autopar.average_gradients(model)
    assert worst(model, plain) < 1e-6
    model.eval()
    theirs = model(**whole)
    assert float(theirs.aux_loss) == pytest.approx(float(plain.eval()(**whole).aux_loss), abs=1e-6)  # of its own tokens
    autopar.deparallelize(model)
    assert _PATCH not in {patch.name for patch in autopar.patches()}


@pooled(world_size=2)
def test_that_of_each_replica_is_another_one() -> None:
    plain = routed()
    model = autopar.initialize(copy.deepcopy(plain), {"loss": {"router_aux": "replica"}})
    whole, own = batch_of(0, 2), slice(2 * model.mpu.dp.rank, 2 * model.mpu.dp.rank + 2)
    plain(**whole).loss.backward()
    model(**{name: x[own] for name, x in whole.items()}).loss.backward()
    autopar.average_gradients(model)
    assert worst(model, plain) > 1e-2


@pooled(world_size=2)
def test_two_models_share_a_patch_until_both_are_gone() -> None:
    first, second = (autopar.initialize(routed(), {}) for _ in range(2))
    assert [patch.name for patch in autopar.patches() if patch.name == _PATCH] == [_PATCH]
    autopar.deparallelize(first)
    assert _PATCH in {patch.name for patch in autopar.patches()}
    assert float(first(**batch_of(0, 1)).aux_loss) > 0  # a plain model again, whose loss is its own
    autopar.deparallelize(second)
    assert autopar.patches() == []


@pooled(world_size=2)
def test_the_trainer_adds_it_once(tmp_path: Path) -> None:
    """Its loss is a share of a sum over replicas, which it multiplies by their number."""
    plain = routed()
    data = [{"input_ids": ids, "labels": ids} for ids in batch_of(0, 2)["input_ids"]]
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 3, "max_grad_norm": 0}
    steps = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "logging_steps": 1}
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    model = autopar.initialize(copy.deepcopy(plain), {"ep": 2})
    with launched():
        args = TrainingArguments(str(tmp_path), **sizes, **steps, **quiet)
        trainer = ParallelTrainer(model=model, args=args, train_dataset=data, eval_dataset=data)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
    ids = batch_of(0, 2)["input_ids"]
    losses, optimizer = [], torch.optim.SGD(plain.parameters(), lr=0.1)
    assert before == pytest.approx(plain.eval()(input_ids=ids, labels=ids).loss.item(), abs=1e-6)
    plain.train()
    for _ in range(3):
        loss = plain(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, abs=1e-5)
    with autopar.full_params(model):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.allclose(mine, other, atol=1e-6) for mine, other in pairs)


def test_which_losses_are_known_and_a_rule_without_the_feature() -> None:
    names = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "jetmoe", "nllb_moe", "doge")
    known = {name: importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in names}
    found = {name for name, module in known.items() if is_switch_loss(module.load_balancing_loss_func)}
    assert found == {*known} - {"doge"}
    assert balancing_module(routed()) is known["mixtral"]
    assert balancing_module(torch.nn.Linear(1, 1)) is None

    plans = ModelPlans.of(routed())
    with (
        mock.patch.object(registry, "features", tuple),
        pytest.raises(autopar.ConfigError, match=r"the rule 'by_expert' \(.*yaml:\d+\) needs the feature 'experts'"),
    ):
        plans.tensors(2, experts=2)

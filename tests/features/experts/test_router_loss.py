"""The auxiliary loss of a mixture's routers over replicas: that of the whole batch, where the model's is known."""

import copy
import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments

import autopar
from autopar import registry
from autopar.dry_run.plan_model import ModelPlans
from autopar.features.experts.router_loss import balancing_module, is_switch_loss
from autopar.integrations import ParallelTrainer
from tests.harness.worlds import pooled
from tests.integrations.runs import launched
from tests.parity import randomise

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_PATCH = "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func"


def mixtral(**changes: Any) -> Any:
    torch.manual_seed(0)
    fields = {"output_router_logits": True, "router_aux_loss_coef": 0.1, **changes}
    model = MixtralForCausalLM(
        MixtralConfig(vocab_size=131, **_SIZES, num_hidden_layers=2, num_local_experts=4, **fields)
    )
    model.set_experts_implementation("eager")
    return randomise(model).double().train()


def batch(step: int, replicas: int) -> dict[str, torch.Tensor]:
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
    plain = mixtral()
    model = autopar.initialize(copy.deepcopy(plain), sizes)
    replicas, own = model.mpu.dp.size, slice(2 * model.mpu.dp.rank, 2 * model.mpu.dp.rank + 2)
    for step in range(2):  # accumulated, as one process does
        whole = batch(step, replicas)
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
    plain = mixtral()
    model = autopar.initialize(copy.deepcopy(plain), {"loss": {"router_aux": "replica"}})
    whole, own = batch(0, 2), slice(2 * model.mpu.dp.rank, 2 * model.mpu.dp.rank + 2)
    plain(**whole).loss.backward()
    model(**{name: x[own] for name, x in whole.items()}).loss.backward()
    autopar.average_gradients(model)
    assert worst(model, plain) > 1e-2
    model.mpu.destroy()


@pooled(world_size=2)
def test_two_models_share_a_patch_until_both_are_gone() -> None:
    first, second = (autopar.initialize(mixtral(), {}) for _ in range(2))
    assert [patch.name for patch in autopar.patches() if patch.name == _PATCH] == [_PATCH]
    autopar.deparallelize(first)
    assert _PATCH in {patch.name for patch in autopar.patches()}
    assert float(first(**batch(0, 1)).aux_loss) > 0  # a plain model again, whose loss is its own
    autopar.deparallelize(second)
    assert autopar.patches() == []


@pooled(world_size=2)
def test_the_trainer_adds_it_once(tmp_path: Path) -> None:
    """Its loss is a share of a sum over replicas, which it multiplies by their number."""
    plain = mixtral()
    data = [{"input_ids": ids, "labels": ids} for ids in batch(0, 2)["input_ids"]]
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 3, "max_grad_norm": 0}
    steps = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "logging_steps": 1}
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    model = autopar.initialize(copy.deepcopy(plain), {"ep": 2})
    with launched():
        args = TrainingArguments(str(tmp_path), **sizes, **steps, **quiet)
        trainer = ParallelTrainer(model=model, args=args, train_dataset=data, eval_dataset=data)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
    ids = torch.stack([each["input_ids"] for each in data])
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
    model.mpu.destroy()


def test_which_losses_are_known() -> None:
    names = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "jetmoe", "nllb_moe", "doge")
    known = {name: importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in names}
    found = {name for name, module in known.items() if is_switch_loss(module.load_balancing_loss_func)}
    assert found == {*known} - {"doge"}
    assert balancing_module(mixtral()) is known["mixtral"]
    assert balancing_module(torch.nn.Linear(1, 1)) is None


@pooled(world_size=2)
def test_without_the_feature_a_mixture_is_sharded_over_two_and_refused_on_two_replicas() -> None:
    plain = mixtral()
    with mock.patch.object(registry, "features", tuple):
        with pytest.raises(autopar.ConfigError) as raised:
            autopar.initialize(plain, {})
        model = autopar.initialize(plain, {"tp": 2})
        loss = model(**batch(0, 1)).loss
    assert str(raised.value) == (
        "the auxiliary loss of the routers of MixtralForCausalLM over 2 replicas needs the feature 'experts', which is "
        "not installed.\n  Installed: none. Restore the folder autopar/features/experts."
    )
    torch.testing.assert_close(loss, mixtral()(**batch(0, 1)).loss)


def test_without_the_feature_a_rule_by_expert_is_an_error() -> None:
    plans = ModelPlans.of(mixtral())
    with (
        mock.patch.object(registry, "features", tuple),
        pytest.raises(autopar.ConfigError, match=r"the rule 'by_expert' \(.*yaml:\d+\) needs the feature 'experts'"),
    ):
        plans.tensors(2, experts=2)

"""Loss functions that user code sets on a model: combined by ``count``, or refused with micro-batches and replicas."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

import autopar
from autopar.errors import ConfigError
from autopar.pipeline_parallel.microbatch import OwnLoss
from tests.compare import same_gradients
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close
from tests.random_models import Case, build
from tests.small import llama

WEIGHTS = torch.linspace(0.2, 3.0, 131)


def _targets(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def weighted(logits: Any, labels: Any, vocab_size: Any = None, num_items_in_batch: Any = None, **_: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), _targets(labels).flatten(), weight=WEIGHTS)


def weight_of(inputs: dict[str, Any]) -> torch.Tensor:
    targets = _targets(inputs["labels"])
    return WEIGHTS[targets[targets != -100]].sum()


def of_sequences(logits: Any, labels: Any, vocab_size: Any = None, **_: Any) -> Any:
    targets = _targets(labels)
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (losses.sum(1) / (targets != -100).sum(1)).mean()


class ByProperty(LlamaForCausalLM):
    @property
    def loss_function(self) -> Any:
        return of_sequences


class ByMethod(LlamaForCausalLM):
    def loss_function(self, logits: Any, labels: Any, **kwargs: Any) -> Any:
        return of_sequences(logits, labels)


def _set(function: Any, kind: Any = LlamaForCausalLM) -> Any:
    model = llama()
    if kind is not LlamaForCausalLM:
        model = kind(model.config)
    if function is not None:
        model.loss_function = function
    return model.train()


def _batch(**changes: Any) -> dict[str, Any]:
    ids = torch.randint(5, 131, (4, 7), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, 2:], labels[1, 4:], labels[3, 6:] = -100, -100, -100
    return {"input_ids": ids, "labels": labels, **changes}


def _config(pp: int) -> dict[str, Any]:
    return {"model_parallelism": {"pipeline_parallel_size": pp}, "pipeline": {"num_microbatches": 4}}


def _mine(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    dp = model.mpu.dp
    return {name: x.chunk(dp.size)[dp.rank] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def _equals_one_process(plain: Any, batch: dict[str, Any], pp: int, **settings: Any) -> None:
    expected = plain(**batch).loss
    expected.backward()
    model = autopar.initialize(copy.deepcopy(plain), _config(pp))
    model.zero_grad()
    out = model.execute_pipeline(_mine(model, batch), broadcast_loss=True, **settings)
    if pp > 1:
        close(out.loss, expected.detach(), "loss")
    same_gradients(model, plain)
    model.mpu.destroy()


def _known_losses(pp: int) -> None:
    _equals_one_process(_set(weighted), _batch(), pp, count=weight_of)
    _equals_one_process(_set(of_sequences), _batch(), pp, count=lambda inputs: len(inputs["labels"]))
    _equals_one_process(_set(None, ByMethod), _batch(), pp, count=lambda inputs: len(inputs["labels"]))
    ignored = _batch()["labels"].where(_batch()["labels"] != -100, 7)
    _equals_one_process(llama().train(), _batch(labels=ignored, ignore_index=7), pp)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[0, 2:], mask[3, 4:] = 0, 0
    tokens = build(Case("biogpt", "BioGptForTokenClassification"), 6, 3).train()  # its loss leaves out what is masked
    _equals_one_process(tokens, _batch(labels=_batch()["input_ids"] % 3, attention_mask=mask), pp)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_losses_whose_divisor_is_known_are_those_of_one_process_in_stages() -> None:
    _known_losses(2)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_losses_whose_divisor_is_known_are_those_of_one_process_over_replicas() -> None:
    _known_losses(1)


@pytest.mark.parametrize("pp", [1, 2])
@pooled(world_size=2)
def test_a_loss_function_of_the_users_is_refused(pp: int) -> None:
    again = functools.partial(ForCausalLMLoss, ignore_index=-100)
    over = "4 micro-batches" if pp == 2 else "2 micro-batches and 2 data-parallel replicas"
    for function, kind in ((weighted, LlamaForCausalLM), (again, LlamaForCausalLM), (None, ByProperty)):
        model = autopar.initialize(_set(function, kind), _config(pp))
        for batch in (_batch(), _batch(num_items_in_batch=18)):
            words = f"the losses of {over} cannot be combined: the loss_function of {kind.__name__} must be"
            with raises_everywhere(ConfigError, words, "count=lambda inputs: ..."):
                model.execute_pipeline(_mine(model, batch))
        assert all(parameter.grad is None for parameter in model.parameters())
        model.execute_pipeline(_mine(model, _batch()), criterion=lambda outputs, inputs: outputs.logits.float().mean())
        model.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_one_micro_batch_and_the_mean_by_request_need_no_divisor() -> None:
    config = {"model_parallelism": {"pipeline_parallel_size": 2}, "pipeline": {"microbatch_size": 4}}
    plain = _set(of_sequences)
    expected = plain(**_batch()).loss
    model = autopar.initialize(copy.deepcopy(plain), config)
    for batch in (_batch(), _batch(num_items_in_batch=18)):
        close(model.execute_pipeline(batch, broadcast_loss=True).loss, expected.detach(), "loss")
    words = "count= is not supported with num_items_in_batch in the batch"
    with raises_everywhere(ConfigError, words):
        model.execute_pipeline(_batch(num_items_in_batch=18), count=len)
    model.mpu.destroy()
    config["pipeline"] = {"microbatch_size": 1, "loss_reduction": "microbatch"}
    model = autopar.initialize(copy.deepcopy(plain), config)
    close(model.execute_pipeline(_batch(), broadcast_loss=True).loss, expected.detach(), "mean of means")
    model.mpu.destroy()


def test_a_function_of_transformers_is_none_of_the_users() -> None:
    model = llama()
    for function in (ForCausalLMLoss, model.loss_function):
        model.loss_function = function
        assert OwnLoss.of(model).reduction(_batch(), 4, 2) == "tokens"
    model.model.loss_function = weighted  # an inner model's
    with pytest.raises(ConfigError, match=r"user-defined weighted"):
        OwnLoss.of(model).reduction(_batch(), 4, 2)
    assert OwnLoss.of(ByMethod(model.config)).reduction(_batch(), 1) == "microbatch"

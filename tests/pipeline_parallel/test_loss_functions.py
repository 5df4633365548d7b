"""User-defined losses through stages and replicas: functions, criteria, passes without a label or a gradient."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

import autopar
from autopar.errors import ConfigError, PipelineError
from autopar.pipeline_parallel.microbatch import OwnLoss
from tests.compare import same_gradients
from tests.exchange import raises_everywhere
from tests.harness.worlds import distributed, pooled
from tests.parity import close, language_batches
from tests.random_models import Case, batches, build
from tests.small import llama
from tests.timeouts import told_at_once

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


def _by_samples(pp: int, stage: int = 0) -> dict[str, Any]:
    return {"pp": pp, "pipeline": {"microbatch_size": 1, "timeout": 10}, "zero": {"stage": stage}}


def _mine(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    dp = model.mpu.dp
    return {name: x.chunk(dp.size)[dp.rank] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def _equals_one_process(plain: Any, batch: dict[str, Any], pp: int, **settings: Any) -> None:
    expected = plain(**batch).loss
    expected.backward()
    model = autopar.initialize(copy.deepcopy(plain), _by_samples(pp))
    model.zero_grad()
    out = model.execute_pipeline(_mine(model, batch), broadcast_loss=True, **settings)
    if pp > 1:
        close(out.loss, expected.detach(), "loss")
    same_gradients(model, plain)


@pytest.mark.tier("test")
@pytest.mark.parametrize("pp", [1, 2])
@pooled(world_size=2)
def test_losses_whose_divisor_is_known_are_those_of_one_process(pp: int) -> None:
    _equals_one_process(_set(weighted), _batch(), pp, count=weight_of)
    _equals_one_process(_set(of_sequences), _batch(), pp, count=lambda inputs: len(inputs["labels"]))
    _equals_one_process(_set(None, ByMethod), _batch(), pp, count=lambda inputs: len(inputs["labels"]))
    ignored = _batch()["labels"].where(_batch()["labels"] != -100, 7)
    _equals_one_process(llama().train(), _batch(labels=ignored, ignore_index=7), pp)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[0, 2:], mask[3, 4:] = 0, 0
    tokens = build(Case("biogpt", "BioGptForTokenClassification"), 6, 3).train()  # its loss leaves out what is masked
    _equals_one_process(tokens, _batch(labels=_batch()["input_ids"] % 3, attention_mask=mask), pp)


@pytest.mark.parametrize("pp", [1, 2])
@pooled(world_size=2)
def test_a_loss_function_of_the_users_is_refused(pp: int) -> None:
    again = functools.partial(ForCausalLMLoss, ignore_index=-100)
    over = "4 micro-batches" if pp == 2 else "2 micro-batches and 2 data-parallel replicas"
    for function, kind in ((weighted, LlamaForCausalLM), (again, LlamaForCausalLM), (None, ByProperty)):
        model = autopar.initialize(_set(function, kind), _by_samples(pp))
        for batch in (_batch(), _batch(num_items_in_batch=18)):
            words = f"the losses of {over} cannot be combined: the loss_function of {kind.__name__} must be"
            with raises_everywhere(ConfigError, words, "count=lambda inputs: ..."):
                model.execute_pipeline(_mine(model, batch))
        assert all(parameter.grad is None for parameter in model.parameters())
        model.execute_pipeline(_mine(model, _batch()), criterion=lambda outputs, inputs: outputs.logits.float().mean())


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_one_micro_batch_and_the_mean_by_request_need_no_divisor() -> None:
    config = {"pp": 2, "pipeline": {"microbatch_size": 4}}
    plain = _set(of_sequences)
    expected = plain(**_batch()).loss
    model = autopar.initialize(copy.deepcopy(plain), config)
    for batch in (_batch(), _batch(num_items_in_batch=18)):
        close(model.execute_pipeline(batch, broadcast_loss=True).loss, expected.detach(), "loss")
    words = "count= is not supported with num_items_in_batch in the batch"
    with raises_everywhere(ConfigError, words):
        model.execute_pipeline(_batch(num_items_in_batch=18), count=len)
    config["pipeline"] = {"microbatch_size": 1, "loss_reduction": "microbatch"}
    model = autopar.initialize(copy.deepcopy(plain), config)
    close(model.execute_pipeline(_batch(), broadcast_loss=True).loss, expected.detach(), "mean of means")


def test_a_function_of_transformers_is_none_of_the_users() -> None:
    model = llama()
    for function in (ForCausalLMLoss, model.loss_function):
        model.loss_function = function
        assert OwnLoss.of(model).reduction(_batch(), 4, 2) == "tokens"
    model.model.loss_function = weighted  # an inner model's
    with pytest.raises(ConfigError, match=r"user-defined weighted"):
        OwnLoss.of(model).reduction(_batch(), 4, 2)
    assert OwnLoss.of(ByMethod(model.config)).reduction(_batch(), 1) == "microbatch"


def weighted_mean(outputs: Any, inputs: dict[str, Any]) -> Any:
    return weighted(outputs.logits, inputs["labels"])


def _in_thirds(**sizes: int) -> dict[str, Any]:
    pipeline = {"num_microbatches": 3, "timeout": 20}
    return {"model_parallelism": {"pipeline_parallel_size": 2, **sizes}, "pipeline": pipeline}


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_class_weights_are_those_of_the_whole_batch() -> None:
    for tp, dp in ((2, 1), (1, 2)):
        plain = llama().train()
        model = autopar.initialize(copy.deepcopy(plain), _in_thirds(tensor_parallel_size=tp))
        replicas = language_batches(131, count=dp, batch=3)
        for _ in range(2):
            batch = {name: torch.cat([each[name] for each in replicas]) for name in replicas[0]}
            weighted_mean(plain(**batch), batch).backward()
            own = replicas[model.mpu.dp.rank]
            out = model.execute_pipeline(own, criterion=weighted_mean, count=weight_of, broadcast_loss=True)
            close(out.loss, weighted_mean(plain(**own), own), "loss of this replica")
        same_gradients(model, plain, 2e-5)


def refused(model: Any, criterion: Any, words: str) -> None:
    (batch,) = language_batches(131, count=1, batch=3)
    with pytest.raises((ConfigError, PipelineError), match=words):
        model.execute_pipeline(batch, criterion=criterion)
    dist.barrier()
    model.zero_grad()


class _SumOfSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


@pooled(world_size=2)
@told_at_once
def test_a_penalty_on_all_weights_is_refused_and_one_on_the_head_is_not() -> None:
    plain = llama().train()
    model = autopar.initialize(copy.deepcopy(plain), _in_thirds())
    (batch,) = language_batches(131, count=1, batch=3)
    words = r"weights of blocks, got 9 .first model.layers.1.input_layernorm.weight.: the last stage"
    calls = [0]

    def penalty(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return outputs.loss + 0.1 * sum(p.square().sum() for p in model.parameters())

    def of_a_list(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return outputs.loss + torch.stack(torch._foreach_norm(list(model.parameters()))).sum()

    def of_the_second_microbatch(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        calls[0] += 1
        return penalty(outputs, inputs) if calls[0] > 1 else outputs.loss

    def of_a_function(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return outputs.loss + sum(_SumOfSquares.apply(p) for p in model.parameters())

    def scaled(by: float) -> Any:
        """The same code each time, of which one reads and the other does not."""
        return lambda outputs, inputs: penalty(outputs, inputs) if by else outputs.loss

    for criterion in (penalty, penalty, of_a_list, of_the_second_microbatch, of_a_function):
        refused(model, criterion, words)
    model.execute_pipeline(batch, criterion=scaled(0.0))
    model.zero_grad()
    refused(model, scaled(0.1), words)

    def of_the_head(of: Any) -> Any:
        def criterion(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
            shown = [p.detach().norm().item() for p in of.parameters()] + [p.norm().item() for p in of.parameters()]
            assert min(shown) >= 0
            return outputs.loss + 0.1 * of.lm_head.weight.square().sum()

        return criterion

    for _ in range(2):
        model.execute_pipeline(batch, criterion=of_the_head(model))
        of_the_head(plain)(plain(**batch), batch).backward()
    same_gradients(model, plain, 2e-5)
    pair = "criterion must return one tensor, the mean over a micro-batch; got tuple.*class weights.*count="
    refused(model, lambda outputs, inputs: (outputs.loss, 3), r"(?s)" + pair)


def _same_as(model: Any, plain: Any, tensor_of: Any) -> None:
    """Compare what this stage holds; shards of ZeRO are gathered."""
    expected = {name: tensor_of(parameter) for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        found = tensor_of(parameter)
        if parameter.numel():
            assert (found is None) == (expected[name] is None), name
        if parameter.numel() and found is not None:
            close(found.full_tensor() if isinstance(found, DTensor) else found, expected[name], name)


def mean_of_counted(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """0 / 0 without a label that counts."""
    targets = _targets(inputs["labels"]).flatten()
    losses = F.cross_entropy(outputs.logits.flatten(0, 1), targets, reduction="none")
    return losses.sum() / (targets != -100).sum()


def _without_labels(rows: list[int]) -> dict[str, Any]:
    ids = _batch()["input_ids"]
    labels = ids.clone()
    labels[rows] = -100
    return {"input_ids": ids, "labels": labels}


def _no_labels(pp: int, stage: int) -> None:
    for rows, criterion in (([0, 1], None), ([0, 1], mean_of_counted), ([1], None), ([0, 1, 2, 3], None)):
        plain = llama().train()
        model = autopar.initialize(copy.deepcopy(plain), _by_samples(pp, stage))
        steps = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
        batch = _without_labels(rows)
        plain(**batch).loss.backward()
        found = model.execute_pipeline(_mine(model, batch), criterion, broadcast_loss=True).loss
        if len(rows) == 4:
            assert found.isnan()
        elif model.mpu.dp.size == 1:
            close(found, plain(**batch).loss.detach(), "loss")
        _same_as(model, plain, lambda parameter: parameter.grad)
        for optimizer in steps:
            optimizer.step()
        _same_as(model, plain, lambda parameter: parameter.data)


@pytest.mark.tier("test", only=("1-0", "2-0"))
@pytest.mark.parametrize(("pp", "stage"), [(1, 0), (2, 0), (1, 2), (1, 3)])
@pooled(world_size=2)
def test_a_replica_or_a_micro_batch_without_labels(pp: int, stage: int) -> None:
    _no_labels(pp, stage)


@pooled(world_size=4)
def test_a_replica_without_labels_in_stages_with_sharded_weights() -> None:
    _no_labels(2, 3)


def _tower_alone() -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A model of which the tower trains alone, a batch with an image, and one without."""
    case = Case("llava", "LlavaForConditionalGeneration")
    plain = build(case, 6, 3).train()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("vision_tower" in name or "projector" in name)
    (seen,) = batches(case, plain.config, 1)
    seen = {name: tensor[:1] for name, tensor in seen.items()}
    text = {name: tensor.clone() for name, tensor in seen.items() if name != "pixel_values"}
    text["input_ids"][text["input_ids"] == plain.config.image_token_id] = 7
    return plain, seen, text


def _whole(seen: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.cat([tensor, text[name]]) if name in text else tensor for name, tensor in seen.items()}


@pytest.mark.tier("test")
@pytest.mark.parametrize("pp", [1, 2])
@pooled(world_size=2)
def test_a_loss_without_trained_weights_is_left_out(pp: int) -> None:
    plain, seen, text = _tower_alone()
    plain(**_whole(seen, text)).loss.backward()
    model = autopar.initialize(copy.deepcopy(plain), _by_samples(pp))
    model.zero_grad()
    model.execute_pipeline(_whole(seen, text) if pp == 2 else (seen, text)[model.mpu.dp.rank])
    _same_as(model, plain, lambda parameter: parameter.grad)
    if pp == 2:
        with pytest.raises((ConfigError, PipelineError), match="the loss of the batch does not require a gradient"):
            model.execute_pipeline(text)
    else:
        frozen = autopar.initialize(llama().requires_grad_(False).train(), _by_samples(1))
        with raises_everywhere(ConfigError, "the loss of the batch does not require a gradient"):
            frozen.execute_pipeline(_mine(frozen, _without_labels([])))


@pytest.mark.tier("test")
@distributed(world_size=2)
def test_replicas_that_gather_weights_refuse_it() -> None:
    model = autopar.initialize(llama().train(), _by_samples(1, 3))

    def detached(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return outputs.loss.detach() if model.mpu.dp.rank else outputs.loss

    words = "does not require a gradient; every replica needs a backward"
    with pytest.raises((ConfigError, PipelineError), match=words):
        model.execute_pipeline(_mine(model, _without_labels([])), detached)

"""Micro-batches and replicas without a label that counts, or whose loss depends on no trained weight."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import ConfigError, PipelineError
from tests.exchange import raises_everywhere
from tests.harness.worlds import distributed, pooled
from tests.parity import close
from tests.random_models import Case, batches, build
from tests.small import llama


def _config(pp: int, stage: int = 0) -> dict[str, Any]:
    pipeline = {"microbatch_size": 1, "timeout": 10}
    return {"model_parallelism": {"pipeline_parallel_size": pp}, "pipeline": pipeline, "zero": {"stage": stage}}


def _mine(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    dp = model.mpu.dp
    return {name: tensor.chunk(dp.size)[dp.rank] for name, tensor in batch.items()}


def _ids() -> torch.Tensor:
    return torch.randint(5, 131, (4, 7), generator=torch.Generator().manual_seed(3))


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
    targets = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].flatten()
    losses = F.cross_entropy(outputs.logits.flatten(0, 1), targets, reduction="none")
    return losses.sum() / (targets != -100).sum()


def _without_labels(rows: list[int]) -> dict[str, Any]:
    labels = _ids().clone()
    labels[rows] = -100
    return {"input_ids": _ids(), "labels": labels}


def _no_labels(pp: int, stage: int) -> None:
    for rows, criterion in (([0, 1], None), ([0, 1], mean_of_counted), ([1], None), ([0, 1, 2, 3], None)):
        plain = llama().train()
        model = autopar.initialize(copy.deepcopy(plain), _config(pp, stage))
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


@pytest.mark.tier("test", only=("0",))
@pytest.mark.parametrize("stage", [0, 2, 3])
@pooled(world_size=2)
def test_a_replica_without_labels(stage: int) -> None:
    _no_labels(1, stage)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_micro_batch_without_labels_in_stages() -> None:
    _no_labels(2, 0)


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
    model = autopar.initialize(copy.deepcopy(plain), _config(pp))
    model.zero_grad()
    model.execute_pipeline(_whole(seen, text) if pp == 2 else (seen, text)[model.mpu.dp.rank])
    _same_as(model, plain, lambda parameter: parameter.grad)
    if pp == 2:
        with pytest.raises((ConfigError, PipelineError), match="the loss of the batch does not require a gradient"):
            model.execute_pipeline(text)


@pytest.mark.tier("test")
@distributed(world_size=2)
def test_replicas_that_gather_weights_refuse_it() -> None:
    model = autopar.initialize(llama().train(), _config(1, 3))

    def detached(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return outputs.loss.detach() if model.mpu.dp.rank else outputs.loss

    with pytest.raises(
        (ConfigError, PipelineError), match="does not require a gradient; every replica needs a backward"
    ):
        model.execute_pipeline(_mine(model, _without_labels([])), detached)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_frozen_model_has_nothing_to_train() -> None:
    model = autopar.initialize(llama().requires_grad_(False).train(), _config(1))
    with raises_everywhere(ConfigError, "the loss of the batch does not require a gradient"):
        model.execute_pipeline(_mine(model, _without_labels([])))

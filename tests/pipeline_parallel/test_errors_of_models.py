"""Errors of a model's own code inside a pipeline: they stay what they are, and say more where that helps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

import autopar
from autopar.errors import PipelineError
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.pipeline_parallel.deep import deep
from tests.timeouts import told_at_once


@pooled(world_size=2)
@told_at_once
def test_a_missing_padding_token_is_named_and_not_the_model() -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    settings = {"model_parallelism": {"pipeline_parallel_size": 2}, "pipeline": {"microbatch_size": 2}}
    ids, labels = torch.arange(24).view(4, 6) % 9, torch.tensor([0, 1, 1, 0])
    batch = {"input_ids": ids, "labels": labels}
    message = "Cannot handle batch sizes > 1 if no padding token is defined."
    model = autopar.initialize(LlamaForSequenceClassification(config), settings)
    calls: list[Callable[[], Any]] = [lambda: model.execute_pipeline(batch), lambda: model(**batch)]
    for repeat in range(2):
        for call, mode in zip(calls, (True, False), strict=True):
            with pytest.raises((ValueError, PipelineError)) as info, torch.set_grad_enabled(mode):
                model.train(mode)
                call()
            last = model.mpu.is_pipeline_last_stage()
            assert type(info.value) is (ValueError if last else PipelineError)
            assert str(info.value) == message if last else message in str(info.value)
        if repeat == 0:  # the same error where one sample has gone through before
            model.train()
            model.execute_pipeline({name: value[:1] for name, value in batch.items()})
    model.config.pad_token_id = 0
    assert model(**batch).logits.shape == (4, 2)
    model.mpu.destroy()


@pooled(world_size=2)
@told_at_once
def test_an_error_of_the_models_own_code_stays_what_it_is() -> None:
    (batch,) = language_batches(131, count=1, batch=2)
    batch["labels"] = batch["labels"] + 1000
    model = autopar.initialize(deep("gpt2", 4), {"model_parallelism": {"pipeline_parallel_size": 2}})
    with pytest.raises((IndexError, PipelineError), match="Target 1") as info:
        model.execute_pipeline(batch)
    if model.mpu.is_pipeline_last_stage():
        assert type(info.value) is IndexError
        (note,) = info.value.__notes__
        assert note.startswith("Raised after the elements 2 to 3 of the pipeline.")
    model.mpu.destroy()

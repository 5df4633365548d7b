"""Megatron-LM's training loop gives the plain model's losses and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from autopar.pipeline_parallel.megatron import get_forward_backward_func
from tests.parity import close, language_batches
from tests.pipeline_parallel.oracle import whole_tensors
from tests.pool import pooled
from tests.small import gpt2


def _forward_step(data_iterator: Any, model: Any) -> Any:
    outputs = model(**next(data_iterator))
    return outputs, lambda outputs: (outputs.loss, {"lm loss": outputs.loss.detach()})


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
@pooled(world_size=2)
def test_the_loop(schedule: str) -> None:
    plain = gpt2(n_layer=4)
    piped = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3) for model in (plain, piped)]
    config = {"model_parallelism": {"pipeline_parallel_size": 2}, "pipeline": {"schedule": schedule}}
    piped = autopar.initialize(piped, config)
    forward_backward = get_forward_backward_func()
    for step in range(3):
        batches = language_batches(131, count=4, batch=2, seed=step)
        losses = [plain(**batch).loss for batch in batches]
        torch.stack(losses).mean().backward()
        settings = {"model": [piped], "num_microbatches": 4, "seq_length": 7, "micro_batch_size": 2}
        reports = forward_backward(forward_step_func=_forward_step, data_iterator=iter(batches), **settings)
        assert len(reports) == (4 if vars(piped)["_autopar_pipeline"].last else 0)
        for report, loss in zip(reports, losses, strict=False):
            close(report["lm loss"], loss.detach(), "loss")
        gradients = whole_tensors(piped, lambda parameter: parameter.grad)
        for name, parameter in plain.named_parameters():
            close(gradients[name], parameter.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        forward_backward(forward_step_func=_forward_step, data_iterator=iter(batches), forward_only=True, **settings)
        assert all(parameter.grad is None for parameter in piped.parameters())
    with pytest.raises(ConfigError, match="num_microbatches must be at least 1, not 0"):
        forward_backward(forward_step_func=_forward_step, data_iterator=iter([]), **{**settings, "num_microbatches": 0})
    with pytest.raises(ConfigError, match="is not parallelized"):
        forward_backward(forward_step_func=_forward_step, data_iterator=iter([]), **{**settings, "model": plain})
    piped.mpu.destroy()

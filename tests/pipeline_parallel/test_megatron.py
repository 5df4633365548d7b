"""Megatron-LM's training loop gives the plain model's losses and gradients."""

from __future__ import annotations

import copy
import functools
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


@pooled(world_size=2)
def test_the_loop_in_fp16() -> None:
    """What execute_pipeline does, bit for bit; a loss that nobody scaled is refused on both stages."""
    models, optimizers = [], []
    for _ in range(2):
        model = gpt2(n_layer=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        sizes = {"pipeline_parallel_size": 2}
        config = {"model_parallelism": sizes, "precision": {"dtype": "fp16"}, "gradient_clipping": 0.5}
        models.append(autopar.initialize(model, config, optimizer=optimizer)[0])
        optimizers.append(optimizer)
    looped, piped = models

    def forward_step(data_iterator: Any, model: Any) -> Any:
        outputs = model(**next(data_iterator))
        return outputs, lambda outputs: (optimizers[0].scale_loss(outputs.loss), {"loss": outputs.loss.detach()})

    run = functools.partial(get_forward_backward_func(), model=looped, num_microbatches=4)
    for step in range(4):
        (batch,) = language_batches(131, count=1, batch=4, seed=step)
        batch["labels"] = batch["input_ids"]  # as many labels in each micro-batch
        batches = [{name: tensor[m : m + 1] for name, tensor in batch.items()} for m in range(4)]
        reports = run(forward_step_func=forward_step, data_iterator=iter(batches))
        loss = piped.execute_pipeline(batch, optimizer=optimizers[1]).loss
        if loss is not None:
            close(torch.stack([report["loss"] for report in reports]).mean(), loss, "loss", 1e-3)
        for optimizer in optimizers:
            optimizer.step()
            assert not optimizer.step_was_skipped
            optimizer.zero_grad()
        assert optimizers[0].loss_scale == optimizers[1].loss_scale
        for (name, one), other in zip(looped.named_parameters(), piped.parameters(), strict=True):
            assert torch.equal(one, other), name
    run(forward_step_func=_forward_step, data_iterator=iter(batches))
    with pytest.raises(ConfigError, match=r"get_forward_backward_func, loss_func must return optimizer\.scale_loss"):
        optimizers[0].step()
    for model in models:
        model.mpu.destroy()

"""What is refused about the optimizer that is passed to initialize."""

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.small import gpt2


def refused(message, config=None, optimizer=None, lr_scheduler=None, model=None):
    model = model or gpt2()
    with raises_everywhere(ConfigError, message):
        autopar.initialize(
            model, config or {}, optimizer=optimizer(model) if optimizer else None, lr_scheduler=lr_scheduler
        )
    assert not hasattr(model, "mpu")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pooled(world_size=1)
def test_what_is_refused():
    for config, text in (
        ({"zero": {"stage": 1}}, "zero.stage=1 needs an optimizer, and initialize got none"),
        ({"precision": {"dtype": "bf16"}}, "precision.dtype=bf16 needs an optimizer"),
        ({"gradient_clipping": 1, "zero": {"stage": 1}}, "zero.stage=1, gradient_clipping=1 needs an optimizer"),
        ({"zero": {"stage": 3}, "precision": {"dtype": "fp16"}}, "precision.dtype=fp16 needs an optimizer"),
    ):
        refused(text, config)
    refused("optimizer must be a torch.optim.Optimizer, got object", optimizer=lambda model: object())
    refused("LBFGS is not supported with shards, with stages", optimizer=lambda m: torch.optim.LBFGS(m.parameters()))
    other = sgd(gpt2())
    refused("in group 0 of SGD are not parameters of GPT2LMHeadModel", optimizer=lambda model: other)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    refused("lr_scheduler must drive the optimizer", optimizer=sgd, lr_scheduler=scheduler)
    refused("lr_scheduler needs an optimizer", lr_scheduler=scheduler)
    if not torch.accelerator.is_available():
        refused(
            "zero.cpu_offload needs an accelerator",
            {"zero": {"stage": 3, "cpu_offload": True}},
        )
    refused(
        "Adagrad must not have state before initialize with zero.stage 3",
        {"zero": {"stage": 3}},
        lambda model: torch.optim.Adagrad(model.parameters()),
    )
    model = gpt2()
    optimizer = sgd(model)
    autopar.initialize(model, {}, optimizer=optimizer)
    with pytest.raises(ConfigError, match="this SGD belongs to a parallelized model already"):
        autopar.initialize(gpt2(), {}, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"SGD.step\(closure\) is not supported: gradients inside of step"):
        optimizer.step(lambda: 0.0)


@pooled(world_size=2)
def test_ranks_whose_groups_differ():
    model = gpt2()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters if dist.get_rank() == 0 else parameters[::-1], lr=0.1)
    with raises_everywhere(ConsistencyError, "ranks [1] call autopar.initialize with other arguments than rank 0"):
        autopar.initialize(model, {}, optimizer=optimizer)


@pooled(world_size=2)
def test_a_step_whose_last_call_was_not_averaged():
    model = gpt2()
    model, optimizer = autopar.initialize(model, {"zero": {"stage": 1}}, optimizer=sgd(model))
    ids = torch.arange(8).view(1, 8) + dist.get_rank()
    model.execute_pipeline({"input_ids": ids, "labels": ids})
    optimizer.step()
    with model.no_sync():
        model.execute_pipeline({"input_ids": ids, "labels": ids})
    with raises_everywhere(ConsistencyError, "ran inside no_sync"):
        optimizer.step()
    model.execute_pipeline({"input_ids": ids, "labels": ids})
    optimizer.step()

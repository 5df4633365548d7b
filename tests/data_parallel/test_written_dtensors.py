"""Values that a user's code puts into DTensors, ZeRO's stages 2 and 3: into the weights, or an error, never lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import ConfigError
from tests.data_parallel.test_whole_numbers import _check, fully_sharded, train
from tests.pool import pooled
from tests.small import llama
from tests.tiers import mainly
from tests.worlds import raises_everywhere

Change = Callable[[Any], Any]


def perturbed(model: Any) -> None:
    """Text of adversarial training (FGM): a step along the gradient, and back."""
    kept = {name: p.data.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data.add_(0.05 * p.grad.sign())
    for name, p in model.named_parameters():
        p.data = kept[name]


def averaged(model: Any) -> None:
    for p in model.parameters():
        p.data = 0.9 * p.data + 0.01 * p.grad


def gradients_set(model: Any) -> None:
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5


@pytest.mark.tier("test", only=("3",))
@pytest.mark.parametrize("stage", mainly(3, 2, later="all"))
@pooled(world_size=2)
def test_data_goes_into_the_weights(stage: int) -> None:
    plain = llama(num_hidden_layers=2).train()
    for change in (perturbed, averaged, gradients_set):
        model = train(fully_sharded(plain, stage), change)
        _check(model, train(copy.deepcopy(plain), change), change.__name__)


def row(model: Any) -> None:
    model.lm_head.weight.data[5].zero_()


def rows(model: Any) -> None:
    model.lm_head.weight[7:9].mul_(0)


def rows_of_gradient(model: Any) -> None:
    model.model.embed_tokens.weight.grad[:100].zero_()


def drawn(model: Any) -> None:
    nn.init.normal_(model.lm_head.weight[100:])


def padding(model: Any) -> None:
    nn.init.zeros_(model.model.embed_tokens.weight[0])


def whole_data(model: Any) -> None:
    model.lm_head.weight.data = torch.zeros(131, 24)


LOST: dict[Change, str] = {
    row: "zero_ of (24,) of a parameter or gradient of (131, 24)",
    rows: "mul_ of (2, 24) of a parameter or gradient of (131, 24)",
    rows_of_gradient: "zero_ of (100, 24) of a parameter or gradient of (131, 24)",
    drawn: "normal_ of (31, 24) of a parameter or gradient of (131, 24)",
    padding: "What is written there would be lost",
    whole_data: "parameter.data = Tensor of (131, 24) in torch.float32: with zero.stage 2 and 3 it is a DTensor",
}


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_would_be_lost_raises() -> None:
    model = fully_sharded(llama().train())
    model(torch.arange(12).view(2, 6), labels=torch.arange(12).view(2, 6)).loss.backward()
    for change, text in LOST.items():
        with torch.no_grad(), raises_everywhere(ConfigError, text):
            change(model)
    with torch.no_grad():
        model.lm_head.weight[:, 0].zero_()  # no copy: columns of this rank's rows
    assert model.lm_head.weight.full_tensor()[:, 0].abs().max() == 0

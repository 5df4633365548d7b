"""Values that a user's code puts into DTensors, ZeRO's stages 2 and 3: into the weights, or an error, never lost."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import ConfigError
from tests.data_parallel.test_whole_numbers import _check, fully_sharded, train
from tests.exchange import raises_everywhere
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled
from tests.small import llama


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


@pooled(world_size=2)
def test_a_full_tensor_as_data_is_refused() -> None:
    model = fully_sharded(llama().train())
    text = "parameter.data with zero.stage 2 and 3 must be a DTensor of"
    with raises_everywhere(ConfigError, text):
        model.lm_head.weight.data = torch.zeros(131, 24)


@pooled(world_size=2)
def test_a_parameter_that_is_replaced_later_is_refused() -> None:
    ids, model = torch.arange(12).view(2, 6), fully_sharded(llama().train())
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5)
    with raises_everywhere(ConfigError, "1 parameters were replaced after autopar.initialize (lm_head.weight)"):
        model(ids, labels=ids)

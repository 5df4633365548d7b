"""Methods that a model is given: one owner each, gone when that owner takes them away."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar.swap import bind, unbind
from tests.small import gpt2


def _size(self: nn.Module) -> int:
    return sum(parameter.numel() for parameter in self.parameters())


def _half(self: nn.Module) -> int:
    return _size(self) // 2


def test_a_method_is_bound_to_the_module_and_to_its_copies() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    bind(model, "one", size=_size)
    copied = copy.deepcopy(model)
    copied.append(nn.Linear(2, 2))
    assert model.size() == 14 and copied.size() == 20
    unbind(model, "one")
    assert not hasattr(model, "size") and copied.size() == 20
    assert set(vars(model)) == set(vars(nn.Sequential()))


def test_one_owner_for_each_name() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    bind(model, "one", size=_size)
    bind(model, "one", size=_half)  # its own it may replace
    with pytest.raises(RuntimeError, match=r"Sequential\.size is one's: another cannot replace it"):
        bind(model, "another", size=_size)
    bind(model[0], "another", size=_size)
    unbind(model, "one")
    assert not hasattr(model, "size") and model[0].size() == 8
    unbind(model, "another")
    assert not hasattr(model[0], "size")


def test_a_method_hides_the_one_of_the_class_until_it_is_taken_away() -> None:
    model = gpt2()
    count = model.num_parameters()
    bind(model, "one", num_parameters=lambda self: -1)
    assert model.num_parameters() == -1
    unbind(model, "one")
    assert model.num_parameters() == count
    assert torch.equal(model(torch.tensor([[1, 2]])).logits, gpt2()(torch.tensor([[1, 2]])).logits)

"""Classes are swapped and given back, methods are bound and taken away; the object stays the same one."""

import copy
import pickle

import pytest
import torch
from torch import nn

from autopar.swap import bind, mixed_class, plain_class, swap, unbind, unswap
from tests.small import gpt2


class _Doubled:
    factor = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)  # type: ignore[misc]


class _Noted:
    pass


def test_a_swapped_module_keeps_its_identity_name_and_type() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    plain, weight = layer(x), layer.weight
    swap(layer, _Doubled, factor=3)
    assert torch.equal(layer(x), 3 * plain)
    assert isinstance(layer, nn.Linear) and layer.weight is weight
    assert type(layer).__name__ == "Linear" and type(layer).__module__ == "torch.nn.modules.linear"
    assert torch.equal(copy.deepcopy(layer)(x), 3 * plain)


def test_unswap_gives_back_the_plain_class_and_takes_the_attributes() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    plain = layer(x)
    swap(layer, _Doubled, factor=3)
    unswap(layer, _Doubled, "factor")
    assert type(layer) is nn.Linear and "factor" not in vars(layer)
    assert torch.equal(layer(x), plain)
    pickle.dumps(layer)


def test_one_class_for_each_pair_and_one_swap_for_each_object() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(4, 5)
    for layer in (first, second, first):
        swap(layer, _Doubled)
    assert type(first) is type(second) is mixed_class(_Doubled, nn.Linear)
    assert plain_class(first, _Doubled) is nn.Linear
    assert plain_class(nn.ReLU(), _Doubled) is nn.ReLU


def test_two_swaps_are_undone_in_reverse() -> None:
    layer = nn.Linear(3, 2)
    swap(layer, _Doubled)
    swap(layer, _Noted)
    with pytest.raises(TypeError, match="_Doubled must be the last swap of a Linear: undo later swaps first"):
        unswap(layer, _Doubled)
    assert plain_class(layer, _Doubled) is nn.Linear
    unswap(layer, _Noted)
    unswap(layer, _Doubled)
    assert type(layer) is nn.Linear
    unswap(layer, _Doubled)  # nothing left to undo


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
    with pytest.raises(RuntimeError, match=r"Sequential.size belongs to one; another cannot replace it"):
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

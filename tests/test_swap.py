"""Classes are swapped and given back; the object stays the same one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from autopar.swap import mixed_class, plain_class, swap, unswap


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
    with pytest.raises(TypeError, match="_Doubled is not the last swap of a Linear: undo the later first"):
        unswap(layer, _Doubled)
    assert plain_class(layer, _Doubled) is nn.Linear
    unswap(layer, _Noted)
    unswap(layer, _Doubled)
    assert type(layer) is nn.Linear
    unswap(layer, _Doubled)  # nothing left to undo

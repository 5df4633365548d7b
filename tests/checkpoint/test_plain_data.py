"""Values become JSON and come back with their types; what cannot is refused by place; damage is an error of ours."""

import copy
import enum
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from autopar.errors import CheckpointError
from autopar.storage.json_values import decode, encode, encode_inline


def through_json(value: object) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(*keys) and same(one[keys[0]], other[keys[1]]) for keys in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


VALUES = [
    None, True, False, 0, -(2**70), 0.1, -0.0, 1e-308, math.inf, -math.inf, math.nan, "", "text \n é \U0001f600", [],
    [1, [2.0, None]], (), (0.9, (0.999, "x")), {}, {"a": 1, "$": 2}, {"$": "tuple", "items": [1]},
    {1: "int", "1": "str", 1.5: "float", None: "none", False: "bool", math.inf: "inf"}, OrderedDict(b=1, a=2),
    Counter({3: 2, "x": 1}), {1, 2, 3}, frozenset({"a", (1, 2)}), torch.Size([2, 3]), torch.bfloat16, np.float32(0.1),
    np.int64(-7), np.bool_(True), np.complex128(1 + 2j), np.arange(6, dtype=">i4").reshape(2, 3), np.zeros((0, 4)),
    np.array(3.5), np.asfortranarray(np.arange(6.0).reshape(2, 3)), torch.tensor(0.1),
    torch.arange(6).reshape(2, 3).t(), torch.empty(0, 3, dtype=torch.bfloat16), torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    {"deep": [({"t": torch.ones(2)}, torch.zeros(1, dtype=torch.float8_e4m3fn).to(torch.half))]},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[f"{n}-{type(v).__name__}" for n, v in enumerate(VALUES)])
def test_there_and_back(value: object):
    data, tensors = encode(value, "extra")
    assert same(decode(through_json(data), tensors), value)
    data = encode_inline(value, "extra")
    assert same(decode(through_json(data)), value)


def test_tensors_are_named_by_their_place_and_not_copied():
    weight, bias, parameter = torch.ones(2), torch.zeros(1), nn.Parameter(torch.ones(3))
    value = {"ema": {"h.weight": weight, "bias": bias}, "all": [parameter, (weight,)], 0: bias}
    data, tensors = encode(value, "extra")
    assert list(tensors) == ["extra.ema['h.weight']", "extra.ema.bias", "extra.all[0]", "extra.all[1][0]", "extra[0]"]
    assert tensors["extra.ema['h.weight']"].data_ptr() == weight.data_ptr()
    back = decode(through_json(data), tensors)
    assert type(back["all"][0]) is torch.Tensor and not back["all"][0].requires_grad


def test_names_of_tensors_cannot_collide():
    ones = torch.ones(1)
    value = {"a.b": ones, "a": {"b": ones, 0: ones, "0": ones, "[0]": ones, "['x']": ones}, "a['b']": ones}
    assert len(encode(value, "extra")[1]) == 7


def test_the_same_set_gives_the_same_json():
    one, other = set(iter([0, 8])), set(iter([8, 0]))  # they collide in the table
    assert list(one) != list(other)
    assert json.dumps(encode(one, "x")[0]) == json.dumps(encode(other, "x")[0])


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    pass


REFUSED = [
    lambda x: x, len, object(), Number.ONE, Text("x"), b"bytes", 1j, range(3), defaultdict(int), nn.Linear(1, 1),
    torch.device("cpu"), np.array(["text"]), np.array([object()]), np.datetime64("2020-01-01"),
    np.random.default_rng(0), torch.ones(2).to_sparse(), torch.ones(2, device="meta"),
    torch.empty(1, dtype=torch.float8_e8m0fnu), 2 ** (10**5), "\udc80", {"\udc80": 1}, optim.lr_scheduler.LambdaLR,
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_cannot_be_said_is_refused_by_place_and_type(value: object):
    for code in (encode, encode_inline):
        with pytest.raises(CheckpointError, match=r"^lr_scheduler\.lr_lambdas\[1\]\['a b'\]"):
            code({"lr_lambdas": [None, {"a b": value}]}, "lr_scheduler")


def test_keys_are_scalars():
    with pytest.raises(CheckpointError, match=r"extra\.x has the key \(1, 2\) of type tuple"):
        encode({"x": {(1, 2): 3}}, "extra")


def test_a_container_that_holds_itself():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="containers deep"):
        encode(loop, "extra")
    data: list[Any] = []
    for _ in range(900):
        data = [data]
    with pytest.raises(CheckpointError, match="containers deep"):
        decode(data)


def schedulers(optimizer: optim.Optimizer) -> list[Any]:
    lr = optim.lr_scheduler
    first, second = lr.LinearLR(optimizer, total_iters=3), lr.CosineAnnealingLR(optimizer, T_max=5)
    return [
        lr.LambdaLR(optimizer, lambda step: 0.9**step),
        lr.MultiStepLR(optimizer, [2, 4]),
        lr.OneCycleLR(optimizer, 0.1, total_steps=20),
        lr.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        lr.CosineAnnealingWarmRestarts(optimizer, 3),
        lr.ReduceLROnPlateau(optimizer, patience=1),
        lr.SequentialLR(optimizer, [first, second], [3]),
        lr.ChainedScheduler([lr.ExponentialLR(optimizer, 0.9), lr.ConstantLR(optimizer)]),
    ]


@pytest.mark.filterwarnings("ignore")  # the schedulers' own
def test_states_of_schedulers():
    for scheduler in schedulers(optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)):
        data, tensors = encode(scheduler.state_dict(), "lr_scheduler")
        assert same(decode(through_json(data), tensors), scheduler.state_dict()), type(scheduler)


DAMAGED = [
    {"$": "pickle"}, {"$": None}, {"$": ["tuple"]}, {"$": "float", "value": "1e5"}, {"$": "float"}, {"$": "tuple"},
    {"$": "tuple", "items": {}}, {"$": "set", "items": [[1]]}, {"$": "Size", "items": ["a"]},
    {"$": "dict", "items": [[1]]}, {"$": "dict", "items": [[[1], 2]]},
    {"$": "dict", "items": [[{"$": "tuple", "items": []}, 2]]}, {"$": "Counter", "items": 3},
    {"$": "dtype", "name": "load"}, {"$": "dtype", "name": None}, {"$": "tensor"}, {"$": "tensor", "name": "missing"},
    {"$": "tensor", "name": ["x"]}, {"$": "tensor", "dtype": "float32", "shape": [2], "data": "AAAA"},
    {"$": "tensor", "dtype": "qint8", "shape": [3], "data": "AAAA"},
    {"$": "tensor", "dtype": "load", "shape": [3], "data": "AAAA"},
    {"$": "tensor", "dtype": "uint8", "shape": [-3], "data": "AAAA"},
    {"$": "tensor", "dtype": "uint8", "shape": [3.0], "data": "AAAA"},
    {"$": "tensor", "dtype": "uint8", "shape": "3", "data": "AAAA"},
    {"$": "tensor", "dtype": "uint8", "shape": [3], "data": "AA A"},
    {"$": "tensor", "dtype": "uint8", "shape": [3], "data": "é"},
    {"$": "array", "dtype": "|u1", "shape": [1] * 65 + [3], "data": "AAAA"},
    {"$": "array", "dtype": "|O8", "shape": [1], "data": "AAAAAAAAAAA="},
    {"$": "array", "dtype": "<f3", "shape": [1], "data": "AAAA"},
    {"$": "array", "dtype": "<f8", "shape": [0, 2**61, 2**61], "data": ""},
    {"$": "array", "dtype": "|V3", "shape": [1], "data": "AAAA"},
    {"$": "scalar", "dtype": "|u1", "shape": [3], "data": "AAAA"},
    {"$": "array", "dtype": 5, "shape": [3], "data": "AAAA"}, {1: 2}, ..., (1, 2),
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_damage_is_an_error_of_ours_and_names_the_place(data: object):
    with pytest.raises(CheckpointError, match=r"^extra\.x\[0\]"):
        decode({"x": [data]}, where="extra")


def test_random_damage_never_ends_in_another_error():
    good = through_json(encode_inline({str(i): value for i, value in enumerate(VALUES)}, "x"))
    dice = random.Random(0)
    refused = 0
    for _ in range(2000):
        broken = copy.deepcopy(good)
        place: Any = broken
        while True:
            key = dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or dice.random() < 0.2:
                break
            place = inner
        place[key] = dice.choice([None, -1, 2**80, 0.5, "tensor", "Size", "<f8", [], {}, [[]], {"$": "set"}, "AAA="])
        try:
            decode(broken)
        except CheckpointError:
            refused += 1
    assert refused > 200

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

from autopar.checkpoint.random_states import choose, restore, take
from autopar.errors import CheckpointError
from autopar.features.megatron.random import MODEL_PARALLEL_STREAM, RandomStateTracker
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
    ones = torch.ones(1)
    value = {"a.b": ones, "a": {"b": ones, 0: ones, "0": ones, "[0]": ones, "['x']": ones}, "a['b']": ones}
    assert len(encode(value, "extra")[1]) == 7  # names cannot collide
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
    torch.empty(1, dtype=torch.float8_e8m0fnu), optim.lr_scheduler.LambdaLR,
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_cannot_be_said_is_refused_by_place_and_type(value: object):
    for code in (encode, encode_inline):
        with pytest.raises(CheckpointError, match=r"^lr_scheduler\.lr_lambdas\[1\]\['a b'\]"):
            code({"lr_lambdas": [None, {"a b": value}]}, "lr_scheduler")


def test_keys_are_scalars_and_no_container_holds_itself():
    with pytest.raises(CheckpointError, match=r"extra\.x has the key \(1, 2\) of type tuple"):
        encode({"x": {(1, 2): 3}}, "extra")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RecursionError):
        encode(loop, "extra")


@pytest.mark.filterwarnings("ignore")  # the schedulers' own
def test_states_of_schedulers():
    lr, optimizer = optim.lr_scheduler, optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    for scheduler in (
        lr.LambdaLR(optimizer, lambda step: 0.9**step),
        lr.MultiStepLR(optimizer, [2, 4]),
        lr.OneCycleLR(optimizer, 0.1, total_steps=20),
        lr.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        lr.CosineAnnealingWarmRestarts(optimizer, 3),
        lr.ReduceLROnPlateau(optimizer, patience=1),
        lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.CosineAnnealingLR(optimizer, T_max=5)], [3]),
        lr.ChainedScheduler([lr.ExponentialLR(optimizer, 0.9), lr.ConstantLR(optimizer)]),
    ):
        data, tensors = encode(scheduler.state_dict(), "lr_scheduler")
        assert same(decode(through_json(data), tensors), scheduler.state_dict()), type(scheduler)


@pytest.mark.parametrize(
    "data",
    [
        {"$": "tensor", "name": "gone"},
        {"$": "module"},
        {"$": "dtype", "name": "load"},
        {"$": "tuple"},
        {"$": "array", "dtype": "<f8", "shape": [2], "data": "AAAA"},
    ],
)
def test_damage_is_an_error_of_ours(data: object):
    with pytest.raises(CheckpointError, match=r"^extra is damaged in the checkpoint"):
        decode({"x": [data]}, where="extra")


@pytest.fixture(autouse=True)
def leave_the_generators_alone():
    before = take()
    yield
    restore(before)


def seed(number: int, tp: int | None = None) -> RandomStateTracker | None:
    """Seed everything; with ``tp``, the tracker of that rank."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    if tp is None:
        return None
    tracker = RandomStateTracker()
    tracker.add(MODEL_PARALLEL_STREAM, number + 2718 + tp)
    return tracker


def draw(tracker: RandomStateTracker | None = None) -> list[Any]:
    """Some of everything; an odd number of normals leaves numpy and Python with half of a pair."""
    drawn = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    drawn += torch.randn(3).tolist()
    if tracker is not None:
        with tracker.fork():
            drawn += torch.rand(2).tolist()
    return drawn


def entry(tp: int, pp: int, dp: int, number: int, streams: bool = True) -> dict[str, Any]:
    """What a rank saved after some steps; the default generators are seeded with ``number``."""
    tracker = seed(number, tp if streams else None)
    draw(tracker)
    return {"tp": tp, "pp": pp, "dp": dp, "cp": 0, "state": through_json(take(tracker))}


def drawn_by(state: Any) -> list[Any]:
    seed(99)
    return draw(restore(state))


@pytest.mark.parametrize("streams", [False, True])
def test_goes_on_exactly(streams: bool):
    tracker = seed(1, 0 if streams else None)
    draw(tracker)
    state = through_json(take(tracker))
    expected = [draw(tracker) for _ in range(3)]
    other = seed(2, 0 if streams else None)
    assert restore(state, other) is other
    assert [draw(other) for _ in range(3)] == expected
    new = restore(state)  # without a tracker there is a new one, if there were streams
    assert (new is not None) is streams
    assert [draw(new) for _ in range(3)] == expected


def test_streams_that_were_not_saved_are_left_alone():
    tracker = seed(1, 0)
    expected = tracker.get_states()[MODEL_PARALLEL_STREAM]["cpu"]
    assert restore(entry(0, 0, 0, 5, streams=False)["state"], tracker) is tracker
    assert torch.equal(tracker.get_states()[MODEL_PARALLEL_STREAM]["cpu"], expected)


def test_inside_a_fork():
    tracker = seed(4, 0)
    with tracker.fork():
        state = through_json(take(tracker))
        expected = torch.rand(3)
    with tracker.fork():
        restore(state, tracker)
        assert torch.equal(torch.rand(3), expected)


def test_numpy_with_another_generator_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(np.random, "get_state", lambda legacy: np.random.PCG64(0).state)
    with pytest.raises(CheckpointError, match="numpy's default generator must be MT19937, got PCG64"):
        take()


def test_a_rank_that_was_there_has_its_own_state_again():
    saved = [entry(t, p, d, 10 * d + p) for d in range(2) for p in range(2) for t in range(2)]
    for one in saved:
        assert choose(saved, one["tp"], one["pp"], one["dp"]) == one["state"]


def test_tensor_parallel_ranks_that_were_not_there_share_the_default_stream_and_nothing_else():
    saved = [entry(t, 0, 0, 7) for t in range(2)]
    drawn = [drawn_by(choose(saved, t, 0, 0)) for t in range(4)]
    assert len({tuple(one[:-2]) for one in drawn}) == 1  # whole activations: the same dropout
    assert len({tuple(one[-2:]) for one in drawn}) == 4  # shares: each its own
    assert drawn == [drawn_by(choose(saved, t, 1, 0)) for t in range(4)]  # and the same every time, on every stage


def test_replicas_that_were_not_there_go_on_alike_if_the_others_were_alike():
    for replicas in (1, 2):
        saved = [entry(t, 0, d, 7) for d in range(replicas) for t in range(2)]
        for tp in range(3):
            assert choose(saved, tp, 0, 5) == choose(saved, tp, 0, 0)


def test_replicas_that_were_not_there_draw_their_own_if_the_others_did():
    saved = [entry(t, 0, d, 7 + d) for d in range(2) for t in range(2)]
    drawn = {(t, d): drawn_by(choose(saved, t, p, d)) for d in range(4) for t in range(3) for p in range(2)}
    for d in range(4):
        assert len({tuple(drawn[t, d][:-2]) for t in range(3)}) == 1
        assert len({tuple(drawn[t, d][-2:]) for t in range(3)}) == 3
    for number in range(len(drawn[0, 0]) - 2):  # every generator differs between replicas
        assert len({drawn[0, d][number] for d in range(4)}) == 4
    assert drawn[0, 3] == drawn_by(choose(copy.deepcopy(saved), 0, 0, 3))


def test_damaged_states_are_refused_and_nothing_changes():
    good = entry(0, 0, 0, 1)["state"]
    for key in ("python", "numpy", "torch"):
        tracker = seed(8, 0)
        expected = draw(tracker)
        tracker = seed(8, 0)
        with pytest.raises(CheckpointError, match="random states"):
            restore({**good, key: {"$": "tuple", "items": []}}, tracker)
        assert draw(tracker) == expected

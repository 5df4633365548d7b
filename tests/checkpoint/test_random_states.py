"""Random states go through JSON and go on exactly; ranks that were not there get their own."""

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from autopar.checkpoint.random_states import choose, restore, take
from autopar.errors import CheckpointError
from autopar.features.megatron.random import MODEL_PARALLEL_STREAM, RandomStateTracker


@pytest.fixture(autouse=True)
def leave_the_generators_alone():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


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
    drawn = [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        *torch.randn(3).tolist(),
    ]
    if tracker is not None:
        with tracker.fork():
            drawn += torch.rand(2).tolist()
    return drawn


def through_json(value: object) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


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
    """The stream of a fork and the default one are told apart."""
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


def damaged() -> list[Any]:
    good = entry(0, 0, 0, 1)["state"]
    broken: list[Any] = [None, 3, [], {}, {**good, "more": 1}, dict.fromkeys(good)]
    for key in ("python", "numpy", "torch"):
        broken += [{**good, key: value} for value in (None, 1, [], {}, {"$": "tuple", "items": []}, "x")]
    broken += [{**good, "cuda": value} for value in (1, "x", [1], good["numpy"])]
    broken += [{**good, "streams": value} for value in (1, [1], {"x": 1}, {"x": {}})]
    for path, value in [
        (("python", "items", 0), 7),
        (("python", "items", 1, "items", 624), 10**6),
        (("python", "items", 1, "items", 3), -1),
        (("numpy", "state", "pos"), 10**6),
        (("numpy", "state", "pos"), -1),
        (("numpy", "bit_generator"), "PCG64"),
        (("torch", "shape"), [5055]),
        (("torch", "data"), "AAAA"),
        (("streams", MODEL_PARALLEL_STREAM, "seed"), "x"),
        (("streams", MODEL_PARALLEL_STREAM, "seed"), 2**64),
        (("streams", MODEL_PARALLEL_STREAM, "cpu"), None),
        (("streams", MODEL_PARALLEL_STREAM, "cuda"), 5),
    ]:
        copied = copy.deepcopy(good)
        place = copied
        for key in path[:-1]:
            place = place[key]
        assert path[-1] in place or isinstance(place, list)
        place[path[-1]] = value
        broken.append(copied)
    return broken


def test_damaged_states_are_refused_and_nothing_changes():
    for broken in damaged():
        tracker = seed(8, 0)
        expected = draw(tracker)
        tracker = seed(8, 0)
        with pytest.raises(CheckpointError, match="random states"):
            restore(broken, tracker)
        assert draw(tracker) == expected


def test_damaged_lists_of_states():
    good = entry(0, 0, 0, 1)
    for broken in ([], [{}], [None], [{**good, "tp": "x"}], [{**good, "tp": 1}], 5, [5]):
        with pytest.raises(CheckpointError, match="random states in the checkpoint are damaged"):
            choose(broken, 0, 0, 0)
    with pytest.raises(CheckpointError, match="damaged"):
        choose([{**good, "state": None}], 1, 0, 0)

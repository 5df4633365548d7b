"""The place in the data, saved in the middle of an epoch and taken up on other numbers of replicas."""

import json
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import autopar
from autopar.errors import ConfigError


class Place:
    """An mpu as far as a loader asks it."""

    is_master = False

    def __init__(self, rank: int, size: int) -> None:
        self.dp = type("Axis", (), {"rank": rank, "size": size})


def loaders(size: int, samples: int = 24, **settings: Any) -> list[Any]:
    data = TensorDataset(torch.arange(samples))
    settings = {"batch_size": 2, "shuffle": True, "seed": 5, **settings}
    return [autopar.prepare_dataloader(data, mpu=Place(rank, size), **settings) for rank in range(size)]


def seen(replicas: list[Any], steps: int | None = None) -> list[int]:
    """Samples in the order in which the replicas take them together."""
    order = []
    for number, batches in enumerate(zip(*replicas, strict=True)):
        order += torch.stack([batch[0] for batch in batches], 1).flatten().tolist()
        if steps is not None and number + 1 == steps:
            break
    return order


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_rest_of_an_epoch_is_the_same_on_any_number_of_replicas(after: int, workers: int) -> None:
    if workers and after != 2:
        return
    two = loaders(2, num_workers=workers)
    for one in two:
        one.set_epoch(3)
    whole = seen(loaders_at(2, 3))
    begun = seen(two, 2)
    state = json.loads(json.dumps(two[0].state_dict()))  # plain data
    assert state == two[1].state_dict() == {"epoch": 3, "samples": 8, "dataset": 24, "seed": 5, "shuffle": True}
    resumed = loaders(after, num_workers=workers)
    for one in resumed:
        one.load_state_dict(state)
        one.set_epoch(3)
        assert len(one) == -(-16 // after // 2)
    rest = seen(resumed) if 16 % after == 0 else None
    assert rest is None or begun + rest == whole
    for one in resumed:  # the next epoch is whole
        one.set_epoch(4)
        assert len(one) == -(-24 // after // 2)
    assert seen(resumed) == seen(loaders_at(after, 4))


def loaders_at(size: int, epoch: int) -> list[Any]:
    made = loaders(size)
    for one in made:
        one.set_epoch(epoch)
    return made


def test_a_rest_that_replicas_do_not_divide_is_filled_up_or_cut() -> None:
    state = {"epoch": 0, "samples": 8, "dataset": 24, "seed": 5, "shuffle": False}
    for drop_last, expected in ((False, [*range(8, 24), 0, 1]), (True, [*range(8, 20)])):
        replicas = loaders(3, shuffle=False, drop_last=drop_last)
        for one in replicas:
            one.load_state_dict(state)
        assert seen(replicas) == expected


def test_a_whole_epoch_leaves_nothing_and_counts_on_in_a_resumed_one() -> None:
    (alone,) = loaders(1)
    assert len(seen([alone])) == 24 and alone.state_dict()["samples"] == 24
    (later,) = loaders(1)
    later.load_state_dict(alone.state_dict())
    assert seen([later]) == [] and len(seen([later])) == 24
    later.load_state_dict({**alone.state_dict(), "samples": 10})
    seen([later], 3)
    assert later.state_dict()["samples"] == 16
    assert seen(loaders(2, samples=0)) == [], "an empty dataset"


def test_what_does_not_fit_is_refused() -> None:
    (one,) = loaders(1)
    with pytest.raises(ConfigError, match=r"another order of samples: expected dataset=9, got 24, expected seed=1, g"):
        one.load_state_dict({"epoch": 0, "samples": 2, "dataset": 9, "seed": 1, "shuffle": True})
    (evaluation,) = loaders(1, shuffle=False, even_batches=False)
    with pytest.raises(ConfigError, match="even_batches=True"):
        evaluation.state_dict()

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import autopar
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
from tests.checkpoint.loading import logged
from tests.exchange import everyones
from tests.harness.worlds import pooled
from tests.small import gpt2, parallel


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_replicas_share_the_data_and_tp_ranks_see_the_same():
    mpu = MPU(tensor_parallel_size=2)
    dataset = TensorDataset(torch.arange(24))
    torch.manual_seed(dist.get_rank())  # the loader must not depend on it
    before = torch.get_rng_state()
    loader = autopar.prepare_dataloader(dataset, 3, shuffle=True, mpu=mpu)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([batch[0].tolist() for batch in loader])
    assert torch.equal(torch.get_rng_state(), before)
    assert epochs[0] != epochs[1]
    seen = everyones(epochs)
    assert seen[0] == seen[1] and seen[2] == seen[3] and seen[0] != seen[2]
    for epoch in range(2):
        union = [sample for rank in (0, 2) for batch in seen[rank][epoch] for sample in batch]
        assert sorted(union) == list(range(24))


class Numbers(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter({"index": number} for number in range(self.count))


def _samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 131, (count, 6), generator=generator)
    return [{"index": torch.tensor(n), "input_ids": ids[n], "labels": ids[n] % 2} for n in range(count)]


def _evaluate(model, loader) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Each sample's loss and whether its last token is guessed; and how many batches there were."""
    losses, right = [], []
    with torch.no_grad():
        for batch in loader:
            logits = model(batch["input_ids"]).logits
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
            losses.append(each.mean(dim=1))
            right.append(logits[:, -1].argmax(dim=-1) == batch["labels"][:, -1])
    return losses, right, len(losses)


@pytest.mark.tier("test", only=("0",))
@pytest.mark.parametrize("zero", [0, 3])
@pooled(world_size=4)
def test_37_samples_are_evaluated_once_each(zero):
    dataset = _samples(37)
    plain = gpt2().eval()
    losses, right, _ = _evaluate(plain, DataLoader(dataset, 4))
    expected, hits = torch.cat(losses), torch.cat(right)
    model = parallel(gpt2(), 2, zero={"stage": zero}).eval()
    for options in ({"even_batches": False}, {"even_batches": True}, {"even_batches": False, "shuffle": True}):
        loader = autopar.prepare_dataloader(dataset, 4, mpu=model.mpu, **options)
        losses, right, batches = _evaluate(model, loader)
        assert everyones(batches) == [len(loader)] * 4 == [5] * 4
        sizes = [len(batch) for batch in losses]
        assert sum(everyones(sizes)[0]) + sum(everyones(sizes)[2]) == (37 if not options["even_batches"] else 38)
        found = autopar.gather_for_metrics(losses, mpu=model.mpu, samples=37)
        guessed = autopar.gather_for_metrics(torch.cat(right), mpu=model.mpu, samples=len(dataset))
        if "shuffle" in options:
            order = autopar.gather_for_metrics([batch["index"] for batch in loader], mpu=model.mpu)
            assert sorted(order.tolist()) == list(range(37)) != order.tolist()
            found, guessed = found[order.argsort()], guessed[order.argsort()]
        assert found.shape == (37,) and torch.allclose(found, expected, rtol=0, atol=1e-5)
        assert torch.equal(guessed, hits)
        assert torch.allclose(found.mean(), expected.mean(), rtol=0, atol=1e-6)


@pooled(world_size=2)
def test_a_stream_is_dealt_out_in_rounds_and_evaluated_to_its_end():
    mpu = MPU()
    rounds = [batch["index"].tolist() for batch in autopar.prepare_dataloader(Numbers(7), 2, mpu=mpu)]
    assert everyones(rounds) == [[[0, 2], [4]], [[1, 3], [5]]]  # without even_batches=False in whole rounds
    for count in (1, 7, 8, 9):
        loader = autopar.prepare_dataloader(Numbers(count), 2, mpu=mpu, even_batches=False)
        found = autopar.gather_for_metrics([batch["index"] for batch in loader], mpu=mpu, samples=count)
        assert found.tolist() == list(range(count))


@pooled(world_size=4)
def test_every_replica_makes_as_many_batches_and_none_is_empty():
    mpu = MPU()
    for count in range(4, 40):
        for batch_size in (2, 3, 5):
            data = TensorDataset(torch.arange(count))
            loader = autopar.prepare_dataloader(data, batch_size, mpu=mpu, even_batches=False)
            batches = [batch[0].tolist() for batch in loader]
            assert len(batches) == len(loader) and all(1 <= len(batch) <= batch_size for batch in batches)
            seen = everyones(batches)
            assert len({len(theirs) for theirs in seen}) == 1
            assert sorted(n for theirs in seen for batch in theirs for n in batch) == list(range(count))


@pooled(world_size=2)
def test_what_is_refused_and_a_repetition_that_is_said_once():
    mpu = MPU()
    for count, size, remedy in ((37, 1, "Use batch_size=2"), (1, 4, "Use at least 2 samples")):
        with pytest.raises(ConfigError) as info:
            autopar.prepare_dataloader(TensorDataset(torch.arange(count)), size, mpu=mpu, even_batches=False)
        assert str(info.value).startswith(f"even_batches=False: {count} samples do not give each of 2 replicas")
        assert f"{remedy}, or even_batches=True and gather_for_metrics(..., samples=len(data" in str(info.value)
    data = TensorDataset(torch.arange(4))
    for size, settings, text in (
        (2, {"even_batches": False, "drop_last": True}, "even_batches=False is not supported with drop_last=True"),
        (2, {"sampler": DistributedSampler(data)}, "sampler is not supported by prepare_dataloader"),
        (0, {}, "batch_size must be a positive integer, got 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            autopar.prepare_dataloader(data, size, mpu=mpu, **settings)
    with pytest.raises(ConfigError, match="shuffle=True requires a map-style dataset"):
        autopar.prepare_dataloader(Numbers(7), 2, mpu=mpu, shuffle=True)
    rank, last = mpu.dp.rank, torch.tensor(1.0)
    for values in (torch.zeros(3 if rank else 5), torch.zeros(4, 2 + rank), [] if rank else torch.zeros(4), last):
        with pytest.raises(ConsistencyError, match=r"gather_for_metrics: the replicas have .* values"):
            autopar.gather_for_metrics(values, mpu=mpu)
    with pytest.raises(ConsistencyError, match="gather_for_metrics has fewer values than samples: expected 9, got 8"):
        autopar.gather_for_metrics(torch.zeros(4), mpu=mpu, samples=9)
    mpu.destroy()

    mpu = MPU()
    with logged("autopar.features.data_loader.loader") as said:
        for options in ({}, {"shuffle": True}, {"drop_last": True}, {"even_batches": False}):
            autopar.prepare_dataloader(TensorDataset(torch.arange(37)), 4, mpu=mpu, **options)
    text = (
        "prepare_dataloader repeats 1 of 37 samples, so that 2 replicas have equally many.\n"
        "  For evaluation use even_batches=False, which yields every sample once."
    )
    assert said == ([text] if mpu.is_master else [])


class Place:
    """An mpu as far as a loader asks it."""

    is_master = False

    def __init__(self, rank: int, size: int) -> None:
        self.dp = type("Axis", (), {"rank": rank, "size": size})


def loaders(size: int, samples: int = 24, **settings: Any) -> list[Any]:
    data = TensorDataset(torch.arange(samples))
    settings = {"batch_size": 2, "shuffle": True, "seed": 5, **settings}
    return [autopar.prepare_dataloader(data, mpu=Place(rank, size), **settings) for rank in range(size)]


def taken(replicas: list[Any], steps: int | None = None) -> list[int]:
    """Samples in the order in which the replicas take them together."""
    order = []
    for number, batches in enumerate(zip(*replicas, strict=True)):
        order += torch.stack([batch[0] for batch in batches], 1).flatten().tolist()
        if steps is not None and number + 1 == steps:
            break
    return order


@pytest.mark.parametrize(("workers", "after"), [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2)])
def test_the_rest_of_an_epoch_is_the_same_on_any_number_of_replicas(after: int, workers: int) -> None:
    two = loaders_at(2, 3, num_workers=workers)
    whole = taken(loaders_at(2, 3))
    begun = taken(two, 2)
    state = json.loads(json.dumps(two[0].state_dict()))  # plain data
    assert state == two[1].state_dict() == {"epoch": 3, "samples": 8, "dataset": 24, "seed": 5, "shuffle": True}
    resumed = loaders(after, num_workers=workers)
    for one in resumed:
        one.load_state_dict(state)
        one.set_epoch(3)
        assert len(one) == -(-16 // after // 2)
    assert 16 % after or begun + taken(resumed) == whole
    for one in resumed:  # the next epoch is whole
        one.set_epoch(4)
        assert len(one) == -(-24 // after // 2)
    assert taken(resumed) == taken(loaders_at(after, 4))


def loaders_at(size: int, epoch: int, **settings: Any) -> list[Any]:
    made = loaders(size, **settings)
    for one in made:
        one.set_epoch(epoch)
    return made


def test_rests_full_epochs_and_states_that_do_not_fit() -> None:
    state = {"epoch": 0, "samples": 8, "dataset": 24, "seed": 5, "shuffle": False}
    for drop_last, expected in ((False, [*range(8, 24), 0, 1]), (True, [*range(8, 20)])):
        replicas = loaders(3, shuffle=False, drop_last=drop_last)
        for one in replicas:
            one.load_state_dict(state)
        assert taken(replicas) == expected

    (alone,) = loaders(1)
    assert len(taken([alone])) == 24 and alone.state_dict()["samples"] == 24
    (later,) = loaders(1)
    later.load_state_dict(alone.state_dict())
    assert taken([later]) == [] and len(taken([later])) == 24
    later.load_state_dict({**alone.state_dict(), "samples": 10})
    taken([later], 3)
    assert later.state_dict()["samples"] == 16
    assert taken(loaders(2, samples=0)) == [], "an empty dataset"

    (one,) = loaders(1)
    with pytest.raises(ConfigError, match=r"another order of samples: expected dataset=9, got 24, expected seed=1, g"):
        one.load_state_dict({"epoch": 0, "samples": 2, "dataset": 9, "seed": 1, "shuffle": True})
    (evaluation,) = loaders(1, shuffle=False, even_batches=False)
    with pytest.raises(ConfigError, match="even_batches=True"):
        evaluation.state_dict()

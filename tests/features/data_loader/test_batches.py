import logging

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import autopar
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
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


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


@pooled(world_size=2)
def test_a_stream_is_dealt_out_in_whole_rounds():
    mpu = MPU()
    seen = everyones([batch.tolist() for batch in autopar.prepare_dataloader(Stream(), 2, mpu=mpu)])
    assert seen == [[[0, 2], [4]], [[1, 3], [5]]]


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
def test_a_stream_is_evaluated_to_its_end():
    mpu = MPU()
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
    mpu.destroy()


@pooled(world_size=2)
def test_evaluation_that_cannot_be_even_says_what_would():
    mpu = MPU()
    for count, size, remedy in ((37, 1, "Use batch_size=2"), (1, 4, "Use at least 2 samples")):
        with pytest.raises(ConfigError) as info:
            autopar.prepare_dataloader(TensorDataset(torch.arange(count)), size, mpu=mpu, even_batches=False)
        assert str(info.value).startswith(f"even_batches=False: {count} samples do not give each of 2 replicas")
        assert f"{remedy}, or even_batches=True and gather_for_metrics(..., samples=len(data" in str(info.value)
    with pytest.raises(ConfigError, match="even_batches=False is not supported with drop_last=True"):
        autopar.prepare_dataloader(TensorDataset(torch.arange(4)), 2, mpu=mpu, even_batches=False, drop_last=True)
    rank = mpu.dp.rank
    for values in (
        torch.zeros(3 if rank else 5),
        torch.zeros(4, 2 + rank),
        [] if rank else torch.zeros(4),
        torch.tensor(1.0),
    ):
        with pytest.raises(ConsistencyError, match=r"gather_for_metrics: the replicas have .* values"):
            autopar.gather_for_metrics(values, mpu=mpu)
    with pytest.raises(ConsistencyError, match="gather_for_metrics has fewer values than samples: expected 9, got 8"):
        autopar.gather_for_metrics(torch.zeros(4), mpu=mpu, samples=9)
    mpu.destroy()


@pooled(world_size=2)
def test_a_repetition_is_said_once():
    mpu, said = MPU(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("autopar.features.data_loader.loader")
    logger.addHandler(handler)
    try:
        for options in ({}, {"shuffle": True}, {"drop_last": True}, {"even_batches": False}):
            autopar.prepare_dataloader(TensorDataset(torch.arange(37)), 4, mpu=mpu, **options)
    finally:
        logger.removeHandler(handler)
    text = (
        "prepare_dataloader repeats 1 of 37 samples, so that 2 replicas have equally many.\n"
        "  For evaluation use even_batches=False, which yields every sample once."
    )
    assert said == ([text] if mpu.is_master else [])
    mpu.destroy()


@pooled(world_size=2)
def test_bad_arguments_are_errors():
    mpu = MPU()
    data = TensorDataset(torch.arange(4))
    with pytest.raises(ConfigError, match="sampler is not supported by prepare_dataloader"):
        autopar.prepare_dataloader(data, 2, mpu=mpu, sampler=DistributedSampler(data))
    with pytest.raises(ConfigError, match="batch_size must be a positive integer, got 0"):
        autopar.prepare_dataloader(data, 0, mpu=mpu)
    with pytest.raises(ConfigError, match="shuffle=True requires a map-style dataset"):
        autopar.prepare_dataloader(Stream(), 2, mpu=mpu, shuffle=True)

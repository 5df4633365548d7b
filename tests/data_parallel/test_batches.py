from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import autopar
from autopar.errors import ConfigError
from autopar.mesh import MPU
from tests.worlds import distributed


def everyone(value: object) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@distributed(world_size=4)
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
    seen = everyone(epochs)
    assert seen[0] == seen[1] and seen[2] == seen[3] and seen[0] != seen[2]
    for epoch in range(2):
        union = [sample for rank in (0, 2) for batch in seen[rank][epoch] for sample in batch]
        assert sorted(union) == list(range(24))


@distributed(world_size=4)
def test_the_hand_written_sampler_gives_the_same():
    mpu = MPU(tensor_parallel_size=2)
    dataset = TensorDataset(torch.arange(10))
    sampler = DistributedSampler(
        dataset, num_replicas=mpu.get_data_parallel_world_size(), rank=mpu.get_data_parallel_rank(), shuffle=True
    )
    by_hand = [batch[0].tolist() for batch in DataLoader(dataset, 2, sampler=sampler)]
    ours = [batch[0].tolist() for batch in autopar.prepare_dataloader(dataset, 2, shuffle=True, mpu=mpu)]
    assert by_hand == ours


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


@distributed(world_size=2)
def test_a_stream_is_dealt_out_in_whole_rounds():
    mpu = MPU()
    seen = everyone([batch.tolist() for batch in autopar.prepare_dataloader(Stream(), 2, mpu=mpu)])
    assert seen == [[[0, 2], [4]], [[1, 3], [5]]]


@distributed(world_size=2)
def test_bad_arguments_are_errors():
    mpu = MPU()
    data = TensorDataset(torch.arange(4))
    with pytest.raises(ConfigError, match="prepare_dataloader makes the sampler itself"):
        autopar.prepare_dataloader(data, 2, mpu=mpu, sampler=DistributedSampler(data))
    with pytest.raises(ConfigError, match="batch_size must be an integer of at least 1, not 0"):
        autopar.prepare_dataloader(data, 0, mpu=mpu)
    with pytest.raises(ConfigError, match="shuffle=True needs a map-style dataset"):
        autopar.prepare_dataloader(Stream(), 2, mpu=mpu, shuffle=True)

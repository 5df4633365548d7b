"""prepare_dataloader: each data-parallel replica its share of the data, the tp ranks of a replica the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from autopar.errors import ConfigError
from autopar.mesh import MPU

__all__ = ["ReplicaDataLoader", "prepare_dataloader"]


class ReplicaDataLoader(DataLoader[Any]):
    """A ``DataLoader`` with :meth:`set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently in each epoch, alike on all ranks. Call it before iterating, with the epoch's number."""
        for target in (self.sampler, self.dataset):
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)
        if self._seed is not None and self.generator is not None:
            self.generator.manual_seed(self._seed + epoch)

    _seed: int | None = None


class _EveryNth(IterableDataset[Any]):
    """Samples ``rank, rank + size, ...`` of a stream; a last round that is not full is dropped, so that ranks agree."""

    def __init__(self, stream: IterableDataset[Any], rank: int, size: int) -> None:
        self.stream, self.rank, self.size = stream, rank, size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        round_: list[Any] = []
        for sample in self.stream:
            round_.append(sample)
            if len(round_) == self.size:
                yield round_[self.rank]
                round_.clear()


def prepare_dataloader(
    dataset: Dataset[Any],
    batch_size: int = 1,
    *,
    mpu: MPU,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **kwargs: Any,
) -> ReplicaDataLoader:
    """A ``DataLoader`` that is right under tensor and data parallelism.

    Replica ``d`` of ``dp`` sees every ``dp``-th sample of the (shuffled) dataset; the tensor-parallel ranks of one
    replica see the same batches in the same order. The order follows from ``seed`` and the epoch alone: the global
    random state is neither read nor changed. Workers seed their augmentations alike too.

    Args:
        dataset: map-style, or an ``IterableDataset`` (every ``dp``-th element; ``shuffle`` is then the stream's own).
        batch_size: samples per replica and step; the global batch is ``batch_size * dp``.
        mpu: ``model.mpu``.
        drop_last: drop what does not fill a batch on every replica. Otherwise some samples are repeated so that all
            replicas make the same number of steps.
        kwargs: anything else that ``DataLoader`` takes.

    Raises:
        ConfigError: ``sampler`` or ``batch_sampler`` is given (this call makes the sampler), or ``batch_size`` is
            no positive integer.
    """
    for name in ("sampler", "batch_sampler"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"prepare_dataloader makes the sampler itself; with a {name} of your own use torch's DataLoader and\n"
                "  DistributedSampler(dataset, num_replicas=mpu.get_data_parallel_world_size(), "
                "rank=mpu.get_data_parallel_rank())."
            )
    if type(batch_size) is not int or batch_size < 1:
        raise ConfigError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
    dp = mpu.dp
    own_generator = kwargs.setdefault("generator", None) is None
    if own_generator:
        kwargs["generator"] = torch.Generator().manual_seed(seed)
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ConfigError("shuffle=True needs a map-style dataset; shuffle the stream itself, alike on all ranks")
        source: Dataset[Any] = _EveryNth(dataset, dp.rank, dp.size) if dp.size > 1 else dataset
        loader = ReplicaDataLoader(source, batch_size, drop_last=drop_last, **kwargs)
    else:
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=dp.size, rank=dp.rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        loader = ReplicaDataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, **kwargs)
    loader._seed = seed if own_generator else None
    return loader

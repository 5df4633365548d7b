"""Shard data over data-parallel replicas, with identical batches on all tp ranks of a replica."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from autopar.distributed.collectives import gathered
from autopar.distributed.failures import waiting
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError

_log = logging.getLogger(__name__)


class ReplicaDataLoader(DataLoader[Any]):
    """A resumable ``DataLoader`` with :meth:`set_epoch`."""

    is_of_replicas = True  # its batches are already sharded over replicas
    _seed: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the shuffled order on all ranks. Call it before iterating."""
        targets: tuple[Any, ...] = (self.batch_sampler, self.sampler, self.dataset)
        for target in (target for target in targets if hasattr(target, "set_epoch")):
            target.set_epoch(epoch)
        if self._seed is not None and self.generator is not None:
            self.generator.manual_seed(self._seed + epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, for ``save_parallelized(extra={"loader": loader.state_dict()})``.

        Batches that the loop has received count as seen. The state is plain data, identical on all ranks. Raises
        ConfigError for a stream, and with ``even_batches=False``.
        """
        sampler = self._resumable()
        return {"epoch": sampler.epoch, "samples": sampler.samples, **sampler.order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`: the next iteration yields the rest of that epoch, later ones all samples.

        Calling ``set_epoch(state["epoch"])`` is optional. The number of replicas and the batch size may change; the
        order of the samples stays.

        Raises:
            ConfigError: The dataset, seed or shuffling differs, the dataset is a stream, or ``even_batches=False``.
        """
        sampler = self._resumable()
        different = {name: (state.get(name), x) for name, x in sampler.order().items() if state.get(name) != x}
        if different:
            listed = ", ".join(f"expected {name}={was}, got {now}" for name, (was, now) in different.items())
            raise ConfigError(
                f"the state of a data loader is for another order of samples: {listed}.\n"
                "  Call prepare_dataloader with the same dataset, shuffle and seed; batch_size and the number of "
                "replicas may differ."
            )
        sampler.set_epoch(int(state["epoch"]))
        sampler.samples = int(state["samples"])
        sampler.resume = (sampler.epoch, sampler.samples)

    def __iter__(self) -> Any:
        batches, sampler = super().__iter__(), self.sampler
        return self._counted(batches, sampler) if isinstance(sampler, ResumableSampler) else batches

    def _counted(self, batches: Any, sampler: ResumableSampler) -> Iterator[Any]:
        start, step = None, (self.batch_size or 1) * sampler.num_replicas
        for number, batch in enumerate(batches, 1):
            start = sampler.first if start is None else start
            sampler.samples = min(start + number * step, len(sampler.dataset))  # type: ignore[arg-type]
            yield batch

    def _resumable(self) -> ResumableSampler:
        if not isinstance(self.sampler, ResumableSampler):
            raise ConfigError(
                "the state of a data loader requires a map-style dataset and even_batches=True\n"
                "  Save the position in a stream in your own code."
            )
        return self.sampler


class _EveryNth(IterableDataset[Any]):
    """Samples ``rank, rank + size, ...`` of a stream; with ``even`` an incomplete last round is dropped."""

    def __init__(self, stream: IterableDataset[Any], rank: int, size: int, even: bool) -> None:
        self.stream, self.rank, self.size, self.even = stream, rank, size, even

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
        if not self.even and len(round_) > self.rank:
            yield round_[self.rank]


class _Unrepeated(Sampler[list[int]]):
    """Batches of the samples ``rank, rank + size, ...``, each sample once, with equally many batches on every rank."""

    def __init__(self, samples: int, batch_size: int, rank: int, size: int, seed: int | None) -> None:
        self.samples, self.batch_size, self.rank, self.size, self.seed = samples, batch_size, rank, size, seed
        self.batches = math.ceil(math.ceil(samples / size) / batch_size)
        self.epoch = 0
        if samples // size < self.batches:
            raise ConfigError(
                f"even_batches=False: {samples} samples do not give each of {size} replicas {self.batches} batches of "
                f"at most {batch_size} without a repetition.\n  Use "
                + (f"batch_size={batch_size + 1}" if samples >= size else f"at least {size} samples")
                + ", or even_batches=True and gather_for_metrics(..., samples=len(dataset)), which drops repetitions."
            )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        drawn = torch.Generator().manual_seed((self.seed or 0) + self.epoch)
        order = range(self.samples) if self.seed is None else torch.randperm(self.samples, generator=drawn).tolist()
        own = list(order[self.rank :: self.size])
        for left in range(self.batches - 1, -1, -1):
            count = min(self.batch_size, len(own) - left)  # keep at least one sample for each later batch
            yield own[:count]
            own = own[count:]


def prepare_dataloader(
    dataset: Dataset[Any] | Sequence[Any],
    batch_size: int = 1,
    *,
    mpu: MPU,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    even_batches: bool = True,
    **kwargs: Any,
) -> ReplicaDataLoader:
    """Return a ``DataLoader`` for tensor and data parallelism.

    Each of ``dp`` replicas gets every ``dp``-th sample of the (shuffled) dataset. All ranks of a replica get identical
    batches in the same order, which depends only on ``seed`` and the epoch. The global random state is neither read nor
    changed. Workers have identical seeds on all ranks.

    Args:
        dataset: Map-style dataset, a list, or an ``IterableDataset``, which must shuffle by itself.
        batch_size: Number of samples per replica and step; the global batch is ``batch_size * dp``.
        mpu: ``model.mpu``.
        drop_last: True to drop samples that do not fill a batch on every replica.
        even_batches: True to repeat samples so that all replicas have equally many; of a stream the last samples are
            dropped instead. False, for evaluation, yields every sample exactly once, in equally many batches on every
            replica; the last batches may be smaller. For a stream, replicas may then differ by one batch, which
            ``zero.stage`` 2 and 3 do not support. :func:`gather_for_metrics` restores the order of the dataset.
        kwargs: Further arguments of ``DataLoader``.

    Raises:
        ConfigError: ``sampler`` or ``batch_sampler`` is given, ``batch_size`` is not a positive integer, or with
            ``even_batches=False`` there are too few samples for equally many batches.
    """
    _check_arguments(batch_size, drop_last, even_batches, kwargs)
    dp = mpu.dp
    own_generator = kwargs.setdefault("generator", None) is None
    if own_generator:
        kwargs["generator"] = torch.Generator().manual_seed(seed)
    source: Any = dataset
    if isinstance(source, IterableDataset):
        if shuffle:
            raise ConfigError(
                "shuffle=True requires a map-style dataset\n  Shuffle the stream itself, identically on all ranks."
            )
        source = _EveryNth(source, dp.rank, dp.size, even_batches) if dp.size > 1 else source
        loader = ReplicaDataLoader(source, batch_size, drop_last=drop_last, **kwargs)
    elif not even_batches:
        batches = _Unrepeated(len(source), batch_size, dp.rank, dp.size, seed if shuffle else None)
        loader = ReplicaDataLoader(source, batch_sampler=batches, **kwargs)
    else:
        repeated = 0 if drop_last or shuffle else -len(source) % dp.size
        if repeated and mpu.is_master:
            _log.warning(
                "prepare_dataloader repeats %d of %d samples, so that %d replicas have equally many.\n"
                "  For evaluation use even_batches=False, which yields every sample once.",
                *(repeated, len(source), dp.size),
            )
        sampler = ResumableSampler(source, dp.size, dp.rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        loader = ReplicaDataLoader(source, batch_size, sampler=sampler, drop_last=drop_last, **kwargs)
    loader._seed = seed if own_generator else None
    return loader


def _check_arguments(batch_size: int, drop_last: bool, even_batches: bool, kwargs: Mapping[str, Any]) -> None:
    for name in ("sampler", "batch_sampler"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{name} is not supported by prepare_dataloader, which makes the sampler\n"
                "  Use torch's DataLoader and DistributedSampler(dataset, num_replicas=mpu.dp.size, rank=mpu.dp.rank)."
            )
    if type(batch_size) is not int or batch_size < 1:
        raise ConfigError(f"batch_size must be a positive integer, got {batch_size!r}")
    if drop_last and not even_batches:
        raise ConfigError(
            "even_batches=False is not supported with drop_last=True\n"
            "  The first yields every sample exactly once, the second drops samples: choose one."
        )


def gather_for_metrics(
    values: torch.Tensor | Sequence[torch.Tensor], *, mpu: MPU, samples: int | None = None
) -> torch.Tensor:
    """Gather the values that replicas computed for their samples, in the (shuffled) order of the dataset.

    All ranks of a data-parallel group call it once after a pass over the loader of :func:`prepare_dataloader`; with
    pipeline stages the ranks of the last stage::

        losses = [loss_of_each_sample(model, batch) for batch in loader]
        mean = autopar.gather_for_metrics(losses, mpu=model.mpu, samples=len(dataset)).mean()

    Args:
        values: Values of this replica's samples, ``[samples, ...]``; or one such tensor per batch.
        samples: Size of the dataset, to drop samples that ``even_batches`` repeated. Default: keep all.

    Raises:
        ConsistencyError: Shapes or dtypes differ between replicas, or a replica lacks values; on every rank.
    """
    batches, dp = [values] if isinstance(values, torch.Tensor) else list(values), mpu.dp
    uniform = len({(x.shape[1:], x.dtype) for x in batches}) == 1 and all(x.ndim for x in batches)
    mine = torch.cat([x.detach().cpu() for x in batches]) if uniform else torch.empty(0)
    with waiting(mpu, "gather_for_metrics", dp.ranks):
        everyone = gathered(mine, dp.group) if dp.size > 1 else [mine]
    counts, kinds = [len(x) for x in everyone], {(x.shape[1:], x.dtype) for x in everyone if len(x)}
    total = sum(counts)
    if len(kinds) != 1 or counts != [len(range(place, total, dp.size)) for place in range(dp.size)]:
        found = ", ".join(f"{len(x)} of {list(x.shape[1:])} {x.dtype}" for x in everyone)
        raise ConsistencyError(
            f"gather_for_metrics: the replicas have {found} values.\n  Each replica must pass one value per sample of "
            "autopar.prepare_dataloader, [samples, ...], with one shape and dtype."
        )
    if samples is not None and total < samples:
        raise ConsistencyError(
            f"gather_for_metrics has fewer values than samples: expected {samples}, got {total}\n"
            "  Pass the values of a complete pass. If prepare_dataloader has drop_last=True, remove it."
        )
    ((shape, dtype),) = kinds
    full = torch.empty(total, *shape, dtype=dtype, device=mpu.device)
    for place in range(min(total, dp.size)):
        full[place :: dp.size] = everyone[place]  # sample by sample
    return full[:samples]


class ResumableSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that can resume in the middle of an epoch, on any number of replicas.

    Replicas take turns along one order of all samples, so the samples seen so far are a prefix of this order. The rest
    is distributed in the same way.

    Attributes:
        samples: Number of samples of the epoch seen so far; the loader counts.
        first: Value of ``samples`` at the start of the current iteration.
        resume: Epoch and number of samples at which the next iteration starts, or None.
    """

    samples = first = 0
    resume: tuple[int, int] | None = None

    def order(self) -> dict[str, Any]:
        """Return the settings that, together with the epoch, determine the order of all samples."""
        return {"dataset": len(self.dataset), "seed": self.seed, "shuffle": self.shuffle}  # type: ignore[arg-type]

    def __len__(self) -> int:
        left = len(self.dataset) - self._skipped()  # type: ignore[arg-type]
        return left // self.num_replicas if self.drop_last else math.ceil(left / self.num_replicas)

    def __iter__(self) -> Iterator[Any]:
        size = len(self)
        self.samples = self.first = skipped = self._skipped()
        self.resume = None
        if not skipped:
            return super().__iter__()
        everything: DistributedSampler[Any] = DistributedSampler(
            self.dataset, 1, 0, shuffle=self.shuffle, seed=self.seed
        )
        everything.set_epoch(self.epoch)
        order, wanted = list(everything), size * self.num_replicas
        rest = order[skipped:] + order * math.ceil(wanted / len(order))  # repeated, as torch does
        return iter(rest[self.rank : wanted : self.num_replicas])

    def _skipped(self) -> int:
        return self.resume[1] if self.resume is not None and self.resume[0] == self.epoch else 0

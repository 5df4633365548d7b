"""The place in the data: which samples of an epoch were seen, whatever the number of replicas that saw them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from autopar.errors import ConfigError

__all__ = ["ResumableSampler"]


class ResumableSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that can go on in the middle of an epoch, on any number of replicas.

    Replicas take turns along one order of all samples, so what any number of them has seen is a beginning of it. The
    rest is dealt out in the same way.

    Attributes:
        samples: of the epoch's order, those that were given out so far; the loader counts.
        first: where the running iteration began.
    """

    samples = first = 0
    _resume: tuple[int, int] | None = None  # epoch, samples

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain data, the same on every rank."""
        return {"epoch": self.epoch, "samples": self.samples, **self._kind()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after what :meth:`state_dict` says, in the next iteration of that epoch; later ones are whole.

        Raises:
            ConfigError: it is of another dataset, seed or order.
        """
        different = {name: (state.get(name), value) for name, value in self._kind().items() if state.get(name) != value}
        if different:
            listed = ", ".join(f"{name}={was} then and {now} now" for name, (was, now) in different.items())
            raise ConfigError(
                f"the state of a data loader is of another order of samples: {listed}.\n"
                "  Give prepare_dataloader the same dataset, shuffle and seed; batch_size and the number of replicas "
                "may differ."
            )
        self.set_epoch(int(state["epoch"]))
        self.samples = int(state["samples"])
        self._resume = (self.epoch, self.samples)

    def __len__(self) -> int:
        return super().__len__() if not self._skipped() else self._share(len(self.dataset) - self._skipped())  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        skipped, self._resume = self._skipped(), None
        self.samples = self.first = skipped
        return super().__iter__() if not skipped else self._rest(skipped)

    def _kind(self) -> dict[str, Any]:
        return {"dataset": len(self.dataset), "seed": self.seed, "shuffle": self.shuffle}  # type: ignore[arg-type]

    def _skipped(self) -> int:
        return self._resume[1] if self._resume is not None and self._resume[0] == self.epoch else 0

    def _share(self, samples: int) -> int:
        return samples // self.num_replicas if self.drop_last else math.ceil(samples / self.num_replicas)

    def _rest(self, skipped: int) -> Iterator[Any]:
        order = list(range(len(self.dataset)))  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        rest, wanted = order[skipped:], self._share(len(order) - skipped) * self.num_replicas
        rest += (order * math.ceil(wanted / len(order)))[: max(0, wanted - len(rest))]  # repeated, as torch does
        return iter(rest[self.rank : wanted : self.num_replicas])

"""The default random generators of a process: torch's for the CPU and the GPU, Python's, and numpy's.

A model may draw from any of them: dropout from torch's, SpecAugment from numpy's, layer drop from Python's. So they are
saved, broadcast and compared together. Only this module sets their states.
"""

from __future__ import annotations

import hashlib
import json
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.process import accelerator, device_of_numbers

_TO_LIST = operator.methodcaller("tolist")  # for numpy arrays and scalars
followers: list[Callable[[], None]] = []  # called after each :func:`switch_stream`
_begun: list[TorchGenerators] = []  # the states at the beginning of the last stream


class TorchGenerators(NamedTuple):
    """The states of torch's default generators, for the CPU and the current accelerator (None if unused)."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls, cuda: bool | None = None) -> TorchGenerators:
        """Read the states of this process; ``cuda``: True to include the GPU, by default if it was used."""
        found = accelerator()
        read = found is not None and (found.in_use if cuda is None else cuda)
        return cls(torch.get_rng_state(), found.module.get_rng_state() if found is not None and read else None)

    @classmethod
    def of_seed(cls, seed: int, cuda: bool) -> TorchGenerators:
        """Return the states after seeding, without changing the generators of this process."""
        cpu = torch.Generator().manual_seed(seed).get_state()
        found = accelerator() if cuda else None
        return cls(cpu, None if found is None else torch.Generator(found.type).manual_seed(seed).get_state())

    def digests(self) -> dict[str, str]:
        """Hash each state: name for messages -> 12 characters."""
        states = {"random state of torch": self.cpu, "random state of torch (GPU)": self.cuda}
        return {name: _digest(state.numpy().tobytes()) for name, state in states.items() if state is not None}

    def restore(self) -> None:
        """Restore these states; the GPU's generator does not change if its state is None."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and (found := accelerator()) is not None:
            found.module.set_rng_state(self.cuda)


class Generators(NamedTuple):
    """The states of all default generators: torch's, Python's :mod:`random`, and ``numpy.random``'s global one."""

    torch: TorchGenerators
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        """Read the states of this process."""
        return cls(TorchGenerators.now(), random.getstate(), np.random.get_state(legacy=False))

    def restore(self) -> None:
        """Restore these states."""
        self.torch.restore()
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def digests(self) -> dict[str, str]:
        """Hash each state: name for messages -> 12 characters."""
        return self.torch.digests() | {
            "random state of Python's random": _digest(repr(self.python).encode()),
            "random state of numpy": _digest(json.dumps(self.numpy, sort_keys=True, default=_TO_LIST).encode()),
        }


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


@contextmanager
def kept() -> Iterator[Generators]:
    """Restore all default generators after the block; yield their states."""
    before = Generators.now()
    try:
        yield before
    finally:
        before.restore()


def seed_torch(seed: int) -> None:
    """Seed torch's default generators, on the CPU and, if it was used, on the current GPU."""
    torch.default_generator.manual_seed(seed)
    if (found := accelerator()) is not None and found.in_use:
        found.module.manual_seed(seed)


def switch_stream(seed: int) -> None:
    """Begin a new stream: call :func:`seed_torch`, then :data:`followers`, which seed generators by rank."""
    seed_torch(seed)
    for follow in list(followers):
        follow()
    _begun[:] = [TorchGenerators.now()]


def begun_stream() -> dict[str, str]:
    """Hash the states at the beginning of the last stream, by their names in messages."""
    return _begun[0].digests() if _begun else {}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generators with ``seed`` for the block, then restore their states."""
    before = TorchGenerators.now()
    seed_torch(seed)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def base_seed(needed: bool = True) -> Iterator[int | None]:
    """Draw a seed from torch's CPU generator, which is restored if the block fails; yield None if not needed.

    Ranks with equal generators get the same seed. They stay equal, because draws inside :func:`seeded` do not count.
    """
    before = TorchGenerators.now(cuda=False)
    try:
        yield int(torch.randint(2**62, (), device="cpu").item()) if needed else None
    except BaseException:
        if needed:
            before.restore()
        raise


@contextmanager
def same_draws() -> Iterator[None]:
    """Use rank 0's state of torch's CPU generator on every rank in the block. A collective of the world.

    A rank whose state differed returns to it after the block.
    """
    if dist.get_world_size() == 1:
        yield
        return
    own = TorchGenerators.now(cuda=False)
    staged = own.cpu.to(device_of_numbers(), copy=True)
    dist.broadcast(staged, src=0)
    first = TorchGenerators(staged.cpu(), None)
    first.restore()
    try:
        yield
    finally:
        if not torch.equal(own.cpu, first.cpu):
            own.restore()


def sync_generators(axis: Axis) -> None:
    """Broadcast the first rank's default generators over ``axis``. A collective of the axis."""
    if axis.size == 1:
        return
    mine: list[Any] = [Generators.now()]
    dist.broadcast_object_list(mine, src=axis.ranks[0], group=axis.group, device=device_of_numbers(axis.group))
    if axis.rank != 0:
        mine[0].restore()

"""The default random generators of a process: torch's on the CPU and on its GPU, Python's, numpy's.

A model draws from any of them: dropout from torch's, SpecAugment from numpy's, some layer drops from Python's. So all
of them are saved, shared and compared together.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis

__all__ = ["Generators", "base_seed", "kept", "share", "stream"]


class Generators(NamedTuple):
    """States of the default generators.

    Attributes:
        torch: of the CPU.
        cuda: of the current GPU; None where CUDA was not used so far.
        python: of :mod:`random`.
        numpy: of ``numpy.random``, the global one.
    """

    torch: torch.Tensor
    cuda: torch.Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        """Read the states of this process."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(legacy=False))

    def restore(self) -> None:
        """Go on from these states; a GPU's is left alone if there is none."""
        self.restore_torch()
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def restore_torch(self) -> None:
        """Go on from torch's states only."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)

    def digests(self) -> dict[str, str]:
        """Hash each state: name for messages -> 12 characters."""
        digests = {
            "random state of torch": self.torch.numpy().tobytes(),
            "random state of torch (CUDA)": b"" if self.cuda is None else self.cuda.numpy().tobytes(),
            "random state of Python's random": repr(self.python).encode(),
            "random state of numpy": repr(_plain(self.numpy)).encode(),
        }
        return {name: hashlib.blake2b(data, digest_size=6).hexdigest() for name, data in digests.items() if data}


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return [(key, _plain(value)) for key, value in sorted(state.items())]
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


@contextmanager
def kept() -> Iterator[Generators]:
    """Leave all default generators as they were before, whatever is drawn inside; gives their states."""
    before = Generators.now()
    try:
        yield before
    finally:
        before.restore()


@contextmanager
def base_seed(needed: bool = True) -> Iterator[int | None]:
    """Draw a seed from torch's CPU generator, which is put back if the block fails; None if it is not needed.

    Ranks whose generators are equal get the same seed, and stay equal whatever each of them draws in a :func:`stream`.
    """
    if not needed:
        yield None
        return
    before = Generators.now()
    try:
        yield int(torch.randint(2**62, (), device="cpu").item())
    except BaseException:
        before.restore_torch()
        raise


@contextmanager
def stream(seed: int | None, number: int) -> Iterator[None]:
    """Draw inside from stream ``number`` of a seed; outside, torch's generators go on where they were.

    Without a seed they simply go on.
    """
    if seed is None:
        yield
        return
    outside = Generators.now()
    torch.default_generator.manual_seed(seed + number)
    if outside.cuda is not None:
        torch.cuda.manual_seed(seed + number)
    try:
        yield
    finally:
        outside.restore_torch()


def share(axis: Axis, device: torch.device) -> None:
    """Give every rank of ``axis`` the first one's default generators. A collective of the axis.

    Args:
        device: where the axis communicates.
    """
    if axis.size == 1:
        return
    mine: list[Any] = [Generators.now() if axis.rank == 0 else None]
    dist.broadcast_object_list(mine, src=axis.ranks[0], group=axis.group, device=device)
    if axis.rank != 0:
        mine[0].restore()

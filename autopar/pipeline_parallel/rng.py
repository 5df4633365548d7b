"""Random numbers in stages: each stage draws its own, and the default generators stay equal on all of them.

The default generators are the same on all ranks of a model replica when a pass begins. One seed is drawn from them, on
every rank, whatever it has to do in that pass; all else is drawn from streams that follow from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["draws_of", "seed_of_pass"]


@contextlib.contextmanager
def seed_of_pass(stages: int, training: bool) -> Iterator[int | None]:
    """A seed that all ranks have; None where no stage draws. A pass that fails leaves the generator as it was."""
    if stages == 1 or not training:
        yield None
        return
    before = torch.get_rng_state()
    try:
        yield int(torch.randint(2**62, (), device="cpu").item())
    except BaseException:
        torch.set_rng_state(before)
        raise


@contextlib.contextmanager
def draws_of(seed: int | None, number: int) -> Iterator[None]:
    """Draws inside are from stream ``number`` of the pass; outside, the default generators go on where they were."""
    if seed is None:
        yield
        return
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    outside = (torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None)
    torch.default_generator.manual_seed(seed + number)
    if cuda:
        torch.cuda.manual_seed(seed + number)
    try:
        yield
    finally:
        torch.set_rng_state(outside[0])
        if outside[1] is not None:
            torch.cuda.set_rng_state(outside[1])

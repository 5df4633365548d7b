"""Ranks whose process group serves the simulated device, see :mod:`tests.gpu.simulated`."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.gpu import simulated
from tests.worlds import distributed

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated device needs g++")


def on_device(world_size: int, timeout: float = 120.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on ranks of their own, each with a simulated device."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(*args: object, **kwargs: object) -> None:
            _join(timeout)
            body(*args, **kwargs)

        return distributed(world_size, timeout)(run)

    return decorate


def _join(timeout: float) -> None:
    """Replace the world by one that has a backend for the device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(simulated.NAME, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    simulated.start()
    limit = timedelta(seconds=timeout)
    dist.init_process_group(simulated.BACKEND, store=store, rank=rank, world_size=size, timeout=limit)

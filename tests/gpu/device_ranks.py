"""Ranks on the simulated device (:mod:`tests.gpu.simulated`) or on one GPU; where the tests of this folder run."""

import functools
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.report import BOTH, TWO_HOSTS
from tests.gpu import simulated
from tests.harness.worlds import distributed, over_ranks, pooled

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated device needs g++")


def on_device(world_size: int, timeout: float = 120.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on ranks of their own, each with a simulated device."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(*args: object, **kwargs: object) -> None:
            simulated.start()
            _join(simulated.BACKEND, timeout)
            body(*args, **kwargs)

        return distributed(world_size, timeout)(run)

    return decorate


def sharing_a_gpu(world_size: int, timeout: float = 120.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on ranks that share one GPU over nccl if its ``place`` is ``cuda``, else on the CPU."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def on_rank(place: str, *args: Any, **kwargs: Any) -> None:
            if place == "cuda":
                _share_gpu(timeout)
            body(place, *args, **kwargs)

        over_nccl, over_gloo = distributed(world_size, timeout, "spawn")(on_rank), pooled(world_size)(on_rank)

        def run(place: str, *args: Any, **kwargs: Any) -> None:
            (over_nccl if place == "cuda" else over_gloo)(place, *args, **kwargs)

        return over_ranks(run, on_rank, world_size)

    return decorate


def _share_gpu(timeout: float) -> None:
    """Replace the world by one over nccl, each rank on GPU 0 of a host of its own."""
    os.environ |= {name: value.format(rank=dist.get_rank()) for name, value in TWO_HOSTS.items()}
    torch.cuda.set_device(0)
    _join(BOTH, timeout)


def _join(backend: str, timeout: float) -> None:
    """Replace the world by one of another backend."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


HAS_GPU = torch.cuda.is_available()
CPU = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the same test runs on the GPU"))
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not HAS_GPU, reason="torch sees no GPU (torch.cuda.is_available() is False)"),
        pytest.mark.filterwarnings("default"),  # those of drivers and nccl are not this project's
    ],
)
PLACES = [CPU, GPU]
if os.environ.get("AUTOPAR_SIMULATED"):
    PLACES = [pytest.param(simulated.start().type)]
on_each = pytest.mark.parametrize("place", PLACES)

"""Time-outs of tests whose ranks hang: short, but longer than a rank takes on a busy machine."""

import functools
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.pipeline_parallel.pipeline import pipeline_of

TIMEOUT = int(os.environ.get("AUTOPAR_TEST_TIMEOUT", "2"))
"""Seconds after which a rank that hangs on purpose is given up."""

_FAR = 60.0  # seconds, where what is waited for comes at once


def hurry(model: torch.nn.Module) -> None:
    """Give up after :data:`TIMEOUT` from now on, on all ranks: what takes long at the first time has been done."""
    p2p = pipeline_of(model).p2p
    p2p.timeout = p2p.failures.timeout = TIMEOUT
    dist.barrier()


def say(what: str) -> None:
    """Tell the other ranks that this one has done this."""
    dist.distributed_c10d._get_default_store().set(f"{what} on {dist.get_rank()}", "yes")


def wait_for(what: str, ranks: Iterable[int]) -> None:
    """Wait until these ranks have said it, without a word to anybody."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"{what} on {rank}" for rank in sorted(ranks)], timedelta(seconds=_FAR))


def hang_until(what: str, ranks: Iterable[int]) -> None:
    """Do nothing until these ranks have said it, or for longer than any of them waits; then end this process."""
    store = dist.distributed_c10d._get_default_store()
    keys = [f"{what} on {rank}" for rank in sorted(ranks)]
    limit = time.monotonic() + TIMEOUT + 12
    while time.monotonic() < limit and not store.check(keys):
        time.sleep(0.1)
    os._exit(0)


def told_at_once(body: Callable[..., None]) -> Callable[..., None]:
    """Run a test whose failing ranks do not end: they need not stay a while for others to take their errors."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        from autopar.pipeline_parallel import p2p

        grace, p2p.GRACE = p2p.GRACE, 0.2
        try:
            body(*args, **kwargs)
            dist.barrier()
        finally:
            p2p.GRACE = grace

    return run

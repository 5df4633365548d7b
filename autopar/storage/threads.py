"""Reading in several threads: the kernel copies, and hands out fresh memory, without Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_threads", "reading_threads"]

_MOST = 8  # more of them wait for each other's memory
Item = TypeVar("Item")
Result = TypeVar("Result")


def reading_threads(ranks: int) -> int:
    """Count the threads that a rank may read with: its share of this machine's cores.

    Args:
        ranks: of the job; all of them are taken to be on this machine unless torchrun says how many are.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST, cores // max(1, here)))


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """Yield ``function(item)`` of each item, in their order. The first exception ends it: what has not begun does not.

    Args:
        threads: how many call it at a time; with 1 this thread does.
    """
    if threads <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="autopar-read") as pool:
        try:
            waiting = [pool.submit(function, item) for item in items]
        except RuntimeError:  # Python is about to end, and starts no more threads
            yield from map(function, items)
            return
        try:
            for future in waiting:
                yield future.result()
        finally:
            for future in waiting:
                future.cancel()

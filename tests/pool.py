"""Worlds that live as long as the test run: for many small tests over the same number of ranks.

``@pooled(world_size=2)`` is ``@distributed(world_size=2)`` with ranks that have run other pooled tests: they keep
their process group, every modeling file that they have imported and the results of dry runs (:mod:`tests.rehearsals`).
What a body leaves behind is put back after it (:mod:`tests.leftovers`). A test that fails or hangs takes its world down
with it; the next one starts a new world.
There is one world of each size. Bodies that kill a rank or need a process of their own stay ``@distributed``.
"""

import atexit
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from tests.worlds import PRELOAD, check_ranks_are_allowed, connected, join, over_ranks, run_body, stacks_of

_GRACE = 5.0  # seconds that the peers of a failed rank get to fail by themselves
_RANKS = 24  # of all worlds together; beyond it those that have waited longest end


class World:
    """Ranks that wait for work. ``run`` gives all of them the same."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.folder = tempfile.TemporaryDirectory(prefix="autopar-pool-")
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, self.folder.name, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, module: str, name: str, timeout: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run ``module.name(*args, **kwargs)`` on every rank; AssertionError with what the first failing rank says."""
        for pipe in self.pipes:
            pipe.send((module, name, args, kwargs))
        pending = dict(enumerate(self.pipes))
        failures: dict[int, str] = {}
        limit = time.monotonic() + timeout
        while pending:
            ready = multiprocessing.connection.wait(list(pending.values()), max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for rank, pipe in list(pending.items()):
                if pipe in ready:
                    del pending[rank]
                    try:
                        text = pipe.recv()
                    except EOFError:
                        self.processes[rank].join(_GRACE)
                        text = f"the process died with code {self.processes[rank].exitcode}"
                    if text is not None:
                        failures[rank] = text
                        limit = min(limit, time.monotonic() + _GRACE)
        if failures:
            rank, text = next(iter(failures.items()))
            raise AssertionError(f"rank {rank} of {len(self.pipes)} failed:\n{text}")
        if pending:
            raise AssertionError(
                f"ranks {sorted(pending)} did not end in {timeout} s:\n{stacks_of(self.processes, self.folder.name)}"
            )

    def close(self) -> None:
        """End the ranks, whatever they do."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self.folder.cleanup()


_worlds: dict[int, World] = {}


@atexit.register
def _close_all() -> None:
    for world_size in list(_worlds):
        _worlds.pop(world_size).close()


def pooled(world_size: int, timeout: float = 300.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on the ranks of the pool's world of that size."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            connected(functools.partial(_run, body, world_size, timeout, args, kwargs))

        return over_ranks(run, body, world_size)

    return decorate


def _run(
    body: Callable[..., None], world_size: int, timeout: float, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    check_ranks_are_allowed()
    world = _worlds.pop(world_size, None) or World(world_size)
    _worlds[world_size] = world  # the last one used is the last of them
    for size in list(_worlds)[:-1]:
        if sum(_worlds) > _RANKS:
            _worlds.pop(size).close()
    try:
        world.run(body.__module__, body.__qualname__, timeout, args, kwargs)
    except BaseException:
        _worlds.pop(world_size).close()
        raise


def _serve(rank: int, world_size: int, folder: str, pipe: Any) -> None:
    import torch

    from tests.leftovers import Settings
    from tests.rehearsals import remember

    with open(f"{folder}/stack-rank{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        torch.set_num_threads(1)
        try:
            join(rank, world_size, folder, timeout=300)
            remember()
            settings = Settings()
        except BaseException:
            pipe.recv()
            pipe.send(traceback.format_exc())
            os._exit(1)
        while True:
            try:
                module, name, args, kwargs = pipe.recv()
            except EOFError:
                os._exit(0)
            try:
                with warnings.catch_warnings():
                    run_body(module, name, args, kwargs)
                del args, kwargs
                settings.restore()
                pipe.send(None)
            except BaseException:
                pipe.send(traceback.format_exc())

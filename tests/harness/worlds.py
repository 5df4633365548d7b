"""Run the body of a test on the ranks of a gloo world.

``@pooled(world_size=2)`` uses ranks that live as long as the test run, one world of each size. After each body
:class:`Settings` restores their state; a failure or a time-out ends the world. ``@distributed(world_size=2)`` starts
new processes, for bodies that kill a rank. Ranks come from a fork server and meet at a file. Arguments pickle.
"""

import atexit
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed", "transformers", "tests.harness.preload"]
_GRACE = 5.0  # seconds that the peers of a failed rank get to fail too
_RANKS = 24  # of all pooled worlds; beyond it the worlds that waited longest end

Test = Callable[..., None]

without_ranks = False
"""Whether the running test is of the tier for one process; the plugin sets it for each test."""


class World:
    """Ranks that wait for bodies to run.

    Args:
        pooled: run any number of bodies, and restore the state of the rank after each; else one body.
        method: the start method of multiprocessing; ``spawn`` for ranks that use a GPU.
    """

    def __init__(self, size: int, timeout: float = 300.0, pooled: bool = True, method: str = "forkserver") -> None:
        context: Any = multiprocessing.get_context(method)
        context.set_forkserver_preload(PRELOAD)
        self.folder = tempfile.TemporaryDirectory(prefix="autopar-world-")
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (rank, size, self.folder.name, timeout, pooled, there)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            there.close()
            self.pipes.append(here)

    def run(self, work: tuple[str, str, Any, Any], timeout: float, expect_dead: tuple[int, ...] = ()) -> None:
        """Run ``module.name(*args, **kwargs)`` on every rank; fail with the first traceback, or with all stacks."""
        assert not without_ranks, 'a test that starts ranks is in make check: mark it, @pytest.mark.tier("all")'
        for pipe in self.pipes:
            pipe.send(work)
        pending = dict(enumerate(self.pipes))
        failures: dict[int, str] = {}
        limit = time.monotonic() + timeout
        while pending:
            ready = multiprocessing.connection.wait(list(pending.values()), max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                if (text := self._answer(pending.pop(rank), rank, expect_dead)) is not None:
                    failures[rank] = text
                    limit = min(limit, time.monotonic() + _GRACE)
        if failures:
            first, *others = failures
            too = f"\n(also failed: ranks {sorted(others)})" if others else ""
            raise AssertionError(f"rank {first} of {len(self.pipes)} failed:\n{failures[first]}{too}")
        if stuck := sorted(pending.keys() - expect_dead):
            raise AssertionError(f"ranks {stuck} did not end in {timeout} s:\n{self._stacks()}")

    def _answer(self, pipe: Any, rank: int, expect_dead: tuple[int, ...]) -> str | None:
        """Return the traceback of a rank; None if its body passed."""
        try:
            return pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(_GRACE)
            return None if rank in expect_dead else f"the process died with code {self.processes[rank].exitcode}"

    def _stacks(self) -> str:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes the stacks
        time.sleep(0.5)
        files = sorted(Path(self.folder.name).glob("stack-*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in files)

    def close(self) -> None:
        """Kill the ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self.folder.cleanup()


_worlds: dict[int, World] = {}


@atexit.register
def _close_all() -> None:
    for size in list(_worlds):
        _worlds.pop(size).close()


def pooled(world_size: int, timeout: float = 300.0) -> Callable[[Test], Test]:
    """Run the decorated test on the ranks of the pooled world of that size."""

    def decorate(body: Test) -> Test:
        def run(*args: Any, **kwargs: Any) -> None:
            work = (body.__module__, body.__qualname__, args, kwargs)
            _connected(functools.partial(_run_in_pool, work, world_size, timeout))

        return over_ranks(run, body, world_size)

    return decorate


def distributed(world_size: int, timeout: float = 120.0, method: str = "forkserver") -> Callable[[Test], Test]:
    """Run the decorated test on new ranks."""

    def decorate(body: Test) -> Test:
        def run(*args: Any, **kwargs: Any) -> None:
            spawn(body.__module__, body.__qualname__, world_size, timeout, args, kwargs, method=method)

        return over_ranks(run, body, world_size)

    return decorate


def over_ranks(run: Any, body: Test, world_size: int) -> Test:
    """Give ``run`` the name and arguments of the test whose body it runs on ranks."""
    run = functools.wraps(body)(run)
    run.body, run.world_size, run.__signature__ = body, world_size, inspect.signature(body)
    return run  # type: ignore[no-any-return]


def spawn(
    module: str,
    name: str,
    world_size: int,
    timeout: float = 120.0,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    expect_dead: tuple[int, ...] = (),
    method: str = "forkserver",
) -> None:
    """Run ``module.name(*args, **kwargs)`` on new ranks; those in ``expect_dead`` may end with any code."""

    def run() -> None:
        world = World(world_size, timeout, False, method)
        try:
            world.run((module, name, args, kwargs or {}), timeout, expect_dead)
        finally:
            world.close()

    run() if expect_dead else _connected(run)


def _connected(run: Callable[[], None]) -> None:
    """Run again if gloo could not connect its sockets, which happens once in some thousand groups."""
    try:
        run()
    except AssertionError as error:
        if "Gloo connectFullMesh failed" not in str(error):
            raise
        run()


def _run_in_pool(work: tuple[str, str, Any, Any], size: int, timeout: float) -> None:
    world = _worlds.pop(size, None) or World(size)
    _worlds[size] = world  # the last one used is the last of them
    for other in list(_worlds)[:-1]:
        if sum(_worlds) > _RANKS:
            _worlds.pop(other).close()
    try:
        world.run(work, timeout)
    except BaseException:
        _worlds.pop(size).close()
        raise


def _serve(rank: int, size: int, folder: str, timeout: float, pooled: bool, pipe: Any) -> None:
    import torch

    with open(f"{folder}/stack-rank{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        torch.set_num_threads(1)
        settings, error = None, None
        try:
            join(rank, size, folder, timeout)
            if pooled:
                from tests.harness.leftovers import Settings
                from tests.rehearsals import remember

                remember()
                settings = Settings()
        except BaseException:
            error = traceback.format_exc()
        while True:
            try:
                work = pipe.recv()
            except EOFError:
                os._exit(0)
            try:
                if error is None:
                    with warnings.catch_warnings():
                        run_body(*work)
                    del work
                    if settings is not None:
                        settings.restore()
            except BaseException:
                error = traceback.format_exc()
            pipe.send(error)
            if not pooled:
                os._exit(0)  # no destructors: a peer may be gone


def join(rank: int, world_size: int, folder: str, timeout: float) -> None:
    """Meet the other ranks at a file in ``folder``."""
    import torch.distributed as dist

    method, limit = f"file://{folder}/rendezvous", timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=limit)


def run_body(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run ``module.name``, or the body that a decorator keeps there."""
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    getattr(target, "body", target)(*args, **kwargs)

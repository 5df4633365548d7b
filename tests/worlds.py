"""Worlds of real gloo processes for tests.

``@distributed(world_size=4)`` runs the body of a test on every rank::

    @distributed(world_size=2)
    def test_sum():
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x == 2

Ranks come from a fork server that has torch and transformers imported already (a test costs 0.2 s, not 10), meet at a
file (no ports), and run with one thread. The traceback that pytest shows is the failing rank's. A world that does not
end in time is killed and fails with the stack of every rank. Arguments (fixtures, parameters) must pickle; the
decorated function must live at the top of its module.
"""

import contextlib
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
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed", "transformers", "tests.leftovers", "tests.rehearsals", "tests.preload"]


without_ranks = False
"""Whether the test that runs is of a tier for one process: set for each test by tests/tier_run.py."""


def distributed(
    world_size: int, timeout: float = 120.0, method: str = "forkserver"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on ``world_size`` gloo ranks; ``timeout`` in seconds for the whole world.

    ``method`` is multiprocessing's: ``spawn`` for ranks that use a GPU, which none may have touched before a fork.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            spawn(body.__module__, body.__qualname__, world_size, timeout, args, kwargs, method=method)

        return over_ranks(run, body, world_size)

    return decorate


def over_ranks(run: Any, body: Callable[..., None], world_size: int) -> Callable[..., None]:
    """Give ``run`` the name and arguments of the test whose body it runs on ranks."""
    run = functools.wraps(body)(run)
    run.body, run.world_size, run.__signature__ = body, world_size, inspect.signature(body)
    return run


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
    """Run ``module.name(*args, **kwargs)`` on every rank; AssertionError with the first failing rank's traceback.

    ``expect_dead`` lists ranks that are meant to die: they may end with any code.
    """
    check_ranks_are_allowed()
    run = functools.partial(_spawn, (module, name, args, kwargs or {}), world_size, timeout, expect_dead, method)
    run() if expect_dead else connected(run)


def check_ranks_are_allowed() -> None:
    """Fail a test over ranks that nothing tells from one in a single process."""
    assert not without_ranks, 'a test that starts ranks is in make check: mark it, @pytest.mark.tier("all")'


def connected(run: Callable[[], None]) -> None:
    """Run again if gloo could not connect its sockets, as on a busy machine once in some thousand groups."""
    try:
        run()
    except AssertionError as error:
        if "Gloo connectFullMesh failed" not in str(error):
            raise
        run()


def _spawn(work: Any, world_size: int, timeout: float, expect_dead: tuple[int, ...], method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="autopar-world-") as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            arguments = (work, rank, world_size, folder, timeout, send)
            processes.append(context.Process(target=_rank_main, args=arguments, daemon=True))
            processes[-1].start()
            send.close()
            pipes.append(receive)
        failures: dict[int, str] = {}
        pending = dict(enumerate(pipes))
        limit = time.monotonic() + timeout
        while pending:
            ready = multiprocessing.connection.wait(list(pending.values()), max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for rank, pipe in list(pending.items()):
                if pipe in ready:
                    try:
                        text = pipe.recv()
                    except EOFError:
                        processes[rank].join()
                        text = None if rank in expect_dead else f"the process died with code {processes[rank].exitcode}"
                    del pending[rank]
                    if text is not None:
                        if not failures:
                            limit = min(limit, time.monotonic() + 10)  # peers of a failed rank may wait for it for ever
                        failures[rank] = text
        stuck = [rank for rank in pending if rank not in expect_dead]
        stacks = stacks_of([processes[rank] for rank in pending], folder)
        for rank in pending:
            processes[rank].kill()
        for process in processes:
            process.join(10)
        if failures:
            first = next(iter(failures))
            others = f"\n(also failed: ranks {sorted(set(failures) - {first})})" if len(failures) > 1 else ""
            raise AssertionError(f"rank {first} of {world_size} failed:\n{failures[first]}{others}")
        if stuck:
            raise AssertionError(f"ranks {stuck} of {world_size} did not end in {timeout} s:\n{stacks}")


def stacks_of(processes: list[Any], folder: str) -> str:
    """Where every rank is that still runs."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes the stacks
    if processes:
        time.sleep(0.5)
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(Path(folder).glob("stack-*")))


def _rank_main(work: Any, rank: int, world_size: int, folder: str, timeout: float, pipe: Any) -> None:
    import torch

    with open(f"{folder}/stack-rank{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        torch.set_num_threads(1)
        try:
            join(rank, world_size, folder, timeout)
            run_body(*work)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
        pipe.close()
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


@contextlib.contextmanager
def raises_everywhere(error: type[BaseException], *parts: str) -> Iterator[Any]:
    """``pytest.raises`` that also asserts that every rank of the world got the same first line."""
    import pytest
    import torch.distributed as dist

    with pytest.raises(error) as info:
        yield info
    text = str(info.value)
    for part in parts:
        assert part in text, f"{part!r} is not in:\n{text}"
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, text.splitlines()[0])
    assert len(set(lines)) == 1, f"ranks got different errors: {lines}"

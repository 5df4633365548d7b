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
from collections.abc import Callable
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
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> None:
            spawn(body.__module__, body.__qualname__, world_size, timeout, args, kwargs, method=method)

        run.body, run.world_size = body, world_size  # type: ignore[attr-defined]
        run.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
        return run

    return decorate


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
    try:
        _spawn(module, name, world_size, timeout, args, kwargs, expect_dead, method)
    except AssertionError as error:
        if expect_dead or not connection_failed(error):
            raise
        _spawn(module, name, world_size, timeout, args, kwargs, expect_dead, method)


def check_ranks_are_allowed() -> None:
    """Fail a test over ranks that nothing tells from one in a single process."""
    assert not without_ranks, 'a test that starts ranks is in make check: mark it, @pytest.mark.tier("all")'


def connection_failed(error: AssertionError) -> bool:
    """Whether gloo could not connect its sockets, as on a busy machine once in some thousand groups: nothing ran."""
    return "Gloo connectFullMesh failed" in str(error)


def _spawn(
    module: str,
    name: str,
    world_size: int,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    expect_dead: tuple[int, ...],
    method: str,
) -> None:
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="autopar-world-") as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(module, name, rank, world_size, folder, timeout, args, kwargs or {}, send),
                daemon=True,
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        failures: dict[int, str] = {}
        pending = dict(zip(range(world_size), pipes, strict=True))
        deadline = time.monotonic() + timeout
        grace: float | None = None
        while pending:
            limit = deadline if grace is None else min(deadline, grace)
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
                        failures.setdefault(rank, text)
                        grace = grace or time.monotonic() + 10  # peers of a failed rank may wait for it for ever
        stuck = [rank for rank in pending if rank not in expect_dead]
        stacks = _kill([processes[rank] for rank in pending], folder)
        for process in processes:
            process.join(10)
        if failures:
            first = next(iter(failures))
            others = f"\n(also failed: ranks {sorted(set(failures) - {first})})" if len(failures) > 1 else ""
            raise AssertionError(f"rank {first} of {world_size} failed:\n{failures[first]}{others}")
        if stuck:
            raise AssertionError(f"ranks {stuck} of {world_size} did not end in {timeout} s:\n{stacks}")


def _kill(processes: list[Any], folder: str) -> str:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes the stacks
    if processes:
        time.sleep(0.5)
    for process in processes:
        process.kill()
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(Path(folder).glob("stack-*")))


def _rank_main(
    module: str,
    name: str,
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pipe: Any,
) -> None:
    import torch

    with open(f"{folder}/stack-rank{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        torch.set_num_threads(1)
        try:
            join(rank, world_size, folder, timeout)
            run_body(module, name, args, kwargs)
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


def raises_everywhere(error: type[BaseException], *parts: str) -> Any:
    """``pytest.raises`` that also asserts that every rank of the world got the same first line."""
    import pytest

    class _Everywhere:
        def __enter__(self) -> Any:
            self.context = pytest.raises(error)
            self.info = self.context.__enter__()
            return self.info

        def __exit__(self, *exc: Any) -> Any:
            result = self.context.__exit__(*exc)
            if result:
                import torch.distributed as dist

                text = str(self.info.value)
                for part in parts:
                    assert part in text, f"{part!r} is not in:\n{text}"
                lines: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(lines, text.splitlines()[0])
                assert len(set(lines)) == 1, f"ranks got different errors: {lines}"
            return result

    return _Everywhere()

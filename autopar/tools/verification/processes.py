"""Processes of verify's own: one for each rank, which meet at a file. They share the model that this process has.

On the CPU they are forks, so a model, a policy or a class that exists in this process only is there, and its memory is
held once. CUDA and process groups do not survive a fork: there they are new processes, to which everything is pickled.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers

from autopar import errors
from autopar.errors import AutoparError, ConfigError, VerificationError
from autopar.tools.verification.report import Report

Work = Callable[..., Report]
"""Done on each rank; its ``alarm`` is to be called with a report when the rank fails while others may wait for it."""

_GRACE = 20.0  # seconds that the others of a rank that failed get to come to the same verdict
_PATIENCE = timedelta(minutes=10)


def forks(device: str) -> bool:
    """Return whether the processes have the memory of this one."""
    return device == "cpu" and not torch.cuda.is_initialized() and not dist.is_initialized()


def run_on_ranks(work: Work, world: int, *, device: str = "cpu", timeout: float = 1800.0) -> Report:
    """Do ``work`` on ``world`` processes; return the report of rank 0, or of the rank that failed while others waited.

    Args:
        device: ``cpu``: gloo; ``cuda``: nccl, a GPU for each.
        timeout: seconds for all of it.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        VerificationError: a process died, or did not end in time. Other errors of autopar as they were raised there.
    """
    if device == "cuda" and torch.cuda.device_count() < world:
        raise ConfigError(
            f"{world} ranks need {world} GPUs, this machine has {torch.cuda.device_count()}: --device cpu compares the "
            "same on the CPU"
        )
    context: Any = multiprocessing.get_context("fork" if forks(device) else "spawn")
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        pipes, processes = {}, []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(work, rank, world, folder, device, there), daemon=True)
            with _garbage_left_alone():
                process.start()
            there.close()
            pipes[rank] = here
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(10)


@contextlib.contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Let a fork collect nothing of this process: the end of a process group waits for its threads, which stay here."""
    gc.collect()
    frozen = gc.get_freeze_count() > 0  # by the caller, and to stay so
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: none of theirs is used
            yield
    finally:
        if not frozen:
            gc.unfreeze()


def _collect(pipes: dict[int, Any], processes: list[Any], limit: float, timeout: float) -> Report:
    reports: dict[int, Report] = {}
    alarms: list[Report] = []
    while pipes:
        ready = multiprocessing.connection.wait(list(pipes.values()), max(0.0, limit - time.monotonic()))
        if not ready:
            break
        for rank, pipe in list(pipes.items()):
            if pipe not in ready:
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                processes[rank].join(5)
                kind, value = "died", f"the process of rank {rank} died with code {processes[rank].exitcode}"
            if kind == "alarm":
                alarms.append(value)
                limit = min(limit, time.monotonic() + _GRACE)
                continue
            del pipes[rank]
            if kind == "report":
                reports[rank] = value
            elif not alarms:
                _raise(kind, value, rank)
    if len(reports) == len(processes):
        return reports[0]
    if alarms:
        return alarms[0]
    raise VerificationError(f"ranks {sorted(pipes)} of {len(processes)} did not end in {timeout:g} s")


def _raise(kind: str, text: str, rank: int) -> None:
    error = getattr(errors, kind, VerificationError)
    raise error(text if error is not VerificationError else f"rank {rank} failed: {text}")


def _main(work: Work, rank: int, world: int, folder: str, device: str, pipe: Any) -> None:
    """Be one rank. It ends without destructors: a peer may be gone."""
    torch.set_num_threads(1)  # also because threads of the process that was forked are not here
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    code = 1
    try:
        backend = "gloo"
        if device == "cuda":
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"
        place = f"file://{folder}/rendezvous"
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=world, timeout=_PATIENCE)
        pipe.send(("report", work(alarm=lambda report: pipe.send(("alarm", report)))))
        code = 0
    except AutoparError as error:
        pipe.send((type(error).__name__, str(error)))
    except BaseException:
        pipe.send(("died", traceback.format_exc()))
    pipe.close()
    os._exit(code)

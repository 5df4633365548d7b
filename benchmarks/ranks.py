"""Ranks for a benchmark: fresh processes with one thread each, and what every one of them returns.

``run_ranks("benchmarks.step:rank_main", options, world=2)`` calls ``rank_main(options)`` in each; options and results
are JSON. A rank that fails ends the others, and its traceback is raised; one that hangs tells where.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

TOOLS = ROOT / ".cache" / "gguf-tools"  # holds accelerate, which transformers' own tensor parallelism needs
PRELOAD = ["torch", "torch.distributed", "transformers", "transformers.models.llama.modeling_llama", "autopar"]


class RanksTimeout(RuntimeError):
    """Ranks did not end in time; with the stack of each."""


def prepare() -> None:
    """Set the environment of the ranks, before any is started: one thread, offline, accelerate if it is there."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks for GPUs without touching them: processes fork later
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"  # of locks of tqdm's, when a rank is ended
    path = [str(ROOT), *([str(TOOLS)] if TOOLS.is_dir() else []), *filter(None, [os.getenv("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))


def run_ranks(
    function: str,
    options: dict[str, Any],
    world: int,
    *,
    backend: str = "gloo",
    timeout: float = 1800,
    method: str = "forkserver",
) -> list[Any]:
    """Call ``module:function`` with ``options`` on ``world`` ranks; return the result of each.

    Args:
        backend: of the default process group; empty: none is made.
        method: ``spawn`` where the ranks use a GPU, which a process that is forked from may not have touched.

    Raises:
        RuntimeError: with the end of the standard error of the rank that failed first.
        RanksTimeout: with those of all that did not end in time, and where they are.
    """
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="autopar-bench-") as folder:
        (Path(folder) / "options.json").write_text(json.dumps(options))
        processes = []
        for rank in range(world):
            processes.append(context.Process(target=_rank, args=(function, folder, rank, world, backend)))
            processes[-1].start()
        try:
            failed, late = _wait(processes, time.monotonic() + timeout)
            texts = "\n".join(f"rank {rank}: {_tail(folder, rank)}" for rank in failed)
            if late:
                raise RanksTimeout(f"{function} on {world} ranks did not end in {timeout:.0f} s.\n{texts}")
            if failed:
                raise RuntimeError(f"{function} on {world} ranks failed.\n{texts}")
            return [json.loads((Path(folder) / f"result-{rank}").read_text()) for rank in range(world)]
        finally:
            for process in processes:
                process.kill()
                process.join(10)


def _wait(processes: list[Any], deadline: float) -> tuple[list[int], bool]:
    """Wait for all; the ranks to blame, and whether they are late: else it is the first one that failed."""
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if any(codes):
            return [next(rank for rank, code in enumerate(codes) if code)], False
        if None not in codes:
            return [], False
        time.sleep(0.02)
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in late:
        os.kill(processes[rank].pid, signal.SIGUSR1)  # faulthandler writes the stacks
    time.sleep(0.5)
    return late, True


def _tail(folder: str, rank: int) -> str:
    path = Path(f"{folder}/stderr-{rank}")
    return (path.read_text(errors="replace")[-6000:] if path.exists() else "") or "nothing was written"


def _rank(function: str, folder: str, rank: int, world: int, backend: str) -> None:
    """Be one rank."""
    os.dup2(os.open(f"{folder}/stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  (pytest may have replaced it)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    if backend:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        rendezvous, limit = f"file://{folder}/rendezvous", timedelta(minutes=5)
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=limit)
    module, _, name = function.partition(":")
    options = json.loads((Path(folder) / "options.json").read_text()) | {"folder": folder}
    result = getattr(importlib.import_module(module), name)(options)
    (Path(folder) / f"result-{rank}").write_text(json.dumps(result))
    if backend:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads do not always end well

"""Ranks for a benchmark: fresh processes with one thread each, and what every one of them returns.

``run_ranks("benchmarks.step:rank_main", options, world=2)`` calls ``rank_main(options)`` in each; options and results
are JSON. A rank that fails ends the others, and its traceback is raised.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

TOOLS = ROOT / ".cache" / "gguf-tools"  # holds accelerate, which transformers' own tensor parallelism needs


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a measured process: one thread, offline, this tree's autopar."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(TOOLS) if TOOLS.is_dir() else "", os.getenv("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **changes}


def run_ranks(
    function: str, options: dict[str, Any], world: int, *, backend: str = "gloo", timeout: float = 1800
) -> list[Any]:
    """Call ``module:function`` with ``options`` on ``world`` ranks; return the result of each.

    Args:
        backend: of the default process group; empty: none is made.

    Raises:
        RuntimeError: with the end of the standard error of the rank that failed first, or of all after the timeout.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-bench-") as folder:
        (Path(folder) / "options.json").write_text(json.dumps(options))
        processes = []
        for rank in range(world):
            place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
            command = [sys.executable, "-m", "benchmarks.ranks", function, folder, str(rank), str(world), backend]
            with open(f"{folder}/stderr-{rank}", "wb") as errors:
                processes.append(subprocess.Popen(command, env=environment(**place), cwd=ROOT, stderr=errors))
        try:
            failed = _wait(processes, time.monotonic() + timeout)
            if failed:
                texts = [f"rank {rank}: {_tail(folder, rank)}" for rank in failed]
                raise RuntimeError(f"{function} on {world} ranks failed.\n" + "\n".join(texts))
            return [json.loads((Path(folder) / f"result-{rank}").read_text()) for rank in range(world)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: list[Any], deadline: float) -> list[int]:
    """Wait for all; the ranks to blame: the first one that failed, or those that did not end in time."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes):
            return [next(rank for rank, code in enumerate(codes) if code)]
        if None not in codes:
            return []
        time.sleep(0.02)
    return [rank for rank, process in enumerate(processes) if process.poll() is None]


def _tail(folder: str, rank: int) -> str:
    return Path(f"{folder}/stderr-{rank}").read_text(errors="replace")[-4000:] or "did not end in time"


def main() -> None:
    """Be one rank."""
    function, folder, rank, world, backend = sys.argv[1:]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend:
        method = f"file://{folder}/rendezvous"
        dist.init_process_group(
            backend, init_method=method, rank=int(rank), world_size=int(world), timeout=timedelta(minutes=5)
        )
    module, _, name = function.partition(":")
    options = json.loads((Path(folder) / "options.json").read_text()) | {"folder": folder}
    result = getattr(importlib.import_module(module), name)(options)
    (Path(folder) / f"result-{rank}").write_text(json.dumps(result))
    if backend:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads do not always end well


if __name__ == "__main__":
    main()

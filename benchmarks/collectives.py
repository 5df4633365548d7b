"""Collectives of the tensor-parallel axis on the CPU: gloo against shared memory, interleaved in one run.

    .venv/bin/python benchmarks/collectives.py --ranks 2 --rounds 60

Prints the median microseconds of one collective, and for all-reduce the 10th percentile. Rounds of the two transports
alternate, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autopar.distributed import collectives  # noqa: E402
from autopar.distributed.axis import Axis  # noqa: E402
from autopar.distributed.mesh import MPU  # noqa: E402

SIZES = [1 << power for power in (11, 13, 15, 16, 17, 18, 19, 20, 21, 22, 24)]  # bytes: 2 KiB to 16 MiB


def _calls(axis: Axis, size: int) -> dict[str, Callable[[], object]]:
    """Return each collective of ``size`` bytes: what is summed, sent, or comes together."""
    x = torch.ones(axis.size, size // 4 // axis.size)
    layout = collectives.even_layout(axis.size, axis.size)
    return {
        "all-reduce": lambda: collectives.reduce_(x, axis),
        "all-gather": lambda: collectives.all_gather(x[:1], axis, layout, 0),
        "reduce-scatter": lambda: collectives.reduce_scatter(x, axis),
        "broadcast": lambda: collectives.broadcast(x, axis),
    }


def _time(call: Callable[[], object], repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def _measure(axes: dict[str, Axis], size: int, rounds: int) -> None:
    repeats = max(1, min(20, (1 << 20) // size))
    calls = {name: _calls(axis, size) for name, axis in axes.items()}
    for collective in calls["gloo"]:
        times: dict[str, list[float]] = {name: [] for name in axes}
        for number in range(rounds + 3):
            for name in sorted(axes, reverse=bool(number % 2)):
                took = _time(calls[name][collective], repeats)
                if number >= 3:
                    times[name].append(took)
        if dist.get_rank() == 0:
            gloo, shm = (statistics.median(times[name]) for name in ("gloo", "shm"))
            low, low_shm = (sorted(times[name])[len(times[name]) // 10] for name in ("gloo", "shm"))
            print(
                f"{collective:14} {size >> 10:6} KiB   gloo {gloo:9.1f} us (p10 {low:9.1f})"
                f"   shm {shm:9.1f} us (p10 {low_shm:9.1f})   {gloo / shm:5.1f} x",
                flush=True,
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    return parser.parse_args()


def main() -> None:
    """Start the workers, or be one."""
    arguments = _arguments()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [*launcher, str(arguments.ranks), __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)
    torch.set_num_threads(1)
    axes = {name: MPU(arguments.ranks, cpu_transport=name).tp for name in ("gloo", "shm")}
    with torch.no_grad():
        for size in arguments.sizes:
            _measure(axes, size, arguments.rounds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

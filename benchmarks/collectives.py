"""Collectives of the tensor-parallel axis on the CPU: torch's over gloo, autopar's over gloo, shared memory.

    .venv/bin/python benchmarks/collectives.py --ranks 2 --rounds 60

Prints the median microseconds of one collective and the 10th percentile. Rounds of the three alternate, so that all see
the same machine.
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


def _calls_of_torch(axis: Axis, size: int) -> dict[str, Callable[[], object]]:
    """Return torch's own collectives of ``size`` bytes."""
    x = torch.ones(axis.size, size // 4 // axis.size)
    whole, part, group = torch.empty_like(x), torch.empty_like(x[0]), axis.group
    return {
        "all-reduce": lambda: dist.all_reduce(x, group=group),
        "all-gather": lambda: dist.all_gather_single(whole.view(-1), x[0], group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_single(part, x.view(-1), group=group),
        "broadcast": lambda: dist.broadcast(x, axis.ranks[0], group=group),
    }


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
    calls = {"torch": _calls_of_torch(axes["gloo"], size)}
    calls |= {name: _calls(axis, size) for name, axis in axes.items()}
    for collective in calls["gloo"]:
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 3):
            for name in sorted(calls, reverse=bool(number % 2)):
                took = _time(calls[name][collective], repeats)
                if number >= 3:
                    times[name].append(took)
        if dist.get_rank() == 0:
            first = statistics.median(times["torch"])
            found = [f"{collective:14} {size >> 10:6} KiB"]
            for name, taken in times.items():
                median, low = statistics.median(taken), sorted(taken)[len(taken) // 10]
                found.append(f"{name} {median:8.0f} us (p10 {low:8.0f}) {first / median:5.1f} x")
            print("   ".join(found), flush=True)


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

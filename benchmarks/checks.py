"""Cost of the consistency checks: a training step with them and without, interleaved in one run.

    .venv/bin/python benchmarks/checks.py --rounds 60

Two processes, tensor-parallel size 2; forward, backward, AdamW step. The rounds of the two variants alternate, so that
both see the same machine. Prints medians, and the median of the ratios of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.run import SIZES, build  # noqa: E402


def _model(family: str, size: dict[str, int], enable: bool) -> tuple[Any, torch.optim.Optimizer]:
    import autopar

    config = {"model_parallelism": {"tensor_parallel_size": 2}, "consistency_check": {"enable": enable}}
    model = autopar.initialize(build(family, size), config).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    dist.barrier()
    start = time.perf_counter()
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def _measure(family: str, name: str, rounds: int) -> None:
    size = SIZES[name]
    variants = [_model(family, size, enable) for enable in (False, True)]
    ids = torch.randint(0, size["vocab"], (size["batch"], size["seq"]), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    times: list[list[float]] = [[], []]
    for number in range(rounds + 5):
        for variant in (0, 1) if number % 2 else (1, 0):
            took = _step(*variants[variant], batch)
            if number >= 5:
                times[variant].append(took)
    if dist.get_rank() == 0:
        off, on = (statistics.median(row) * 1e3 for row in times)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        print(f"{family:8} {name:6} off {off:8.2f} ms   on {on:8.2f} ms   on/off {on / off:.4f}, of pairs {ratio:.4f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--families", nargs="+", default=["llama"], choices=["llama", "gpt2"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    return parser.parse_args()


def main() -> None:
    """Start two workers, or be one."""
    arguments = _arguments()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        sys.exit(subprocess.run([*command, *sys.argv[1:]], env=environment, check=False).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for family in arguments.families:
        for name in arguments.sizes:
            _measure(family, name, arguments.rounds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

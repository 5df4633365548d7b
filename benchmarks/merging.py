"""Merging a sharded checkpoint against copying the same bytes with ``cp -r``, interleaved in one run: medians, ratio.

    .venv/bin/python benchmarks/merging.py                    # 1 GB, 2 shards
    .venv/bin/python benchmarks/merging.py --gigabytes 0.2 --rounds 3 --folder /mnt/disk

The checkpoint is that of a Llama with random fp32 weights, written by ``save_parallelized`` from ``--shards``
processes. Every measurement is a process of its own. Before each of them the source is read once, so that it lies in
the page cache (how much of it does is measured and printed), and what earlier ones wrote is forced to the disk.

* Seconds: of ``merge_checkpoint``, without the start of Python; it verifies checksums and ends with an fsync of every
  file. Of ``cp -r``, and of ``cp -r`` followed by ``sync`` of every file that it wrote: only the latter is on the disk.
* Memory: the highest resident set (VmHWM) of the process above what it was once everything was imported; for ``cp``
  the whole of it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
LAYER = 2048  # hidden size; the number of layers makes up the bytes


def make(folder: Path, gigabytes: float, shards: int) -> None:
    """Write the sharded checkpoint, with one process a shard."""
    worker = [__file__, "--worker", "make", "--folder", str(folder), "--gigabytes", str(gigabytes)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(shards)]
    subprocess.run([*command, *worker], env=environment(), check=True)


def make_worker(folder: Path, gigabytes: float) -> None:
    """On every rank: the whole model without its random initialisation, its share, random values, save."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    import autopar

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ffn, vocab = LAYER * 11 // 4, 8192
    layer = LAYER * (4 * LAYER + 3 * ffn) * 4
    count = max(1, round((gigabytes * 1e9 - 2 * vocab * LAYER * 4) / layer))
    config = LlamaConfig(
        hidden_size=LAYER, intermediate_size=ffn, num_hidden_layers=count, num_attention_heads=LAYER // 64
    )
    config.vocab_size = vocab
    with no_init_weights():
        model = LlamaForCausalLM(config)
    # The ranks must agree on what they hold before they share it out; the values come afterwards.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": dist.get_world_size()}})
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(generator=generator)
    model.save_parallelized(folder, timeout=600)  # type: ignore[operator]
    dist.barrier()
    dist.destroy_process_group()


def merge_worker(source: Path, target: Path) -> None:
    """In a process of its own: prints seconds and bytes as JSON."""
    import tqdm  # noqa: F401  (what merging imports late is no part of the measurement)
    from huggingface_hub import split_state_dict_into_shards_factory  # noqa: F401

    from autopar.checkpoint import merge_checkpoint

    Path("/proc/self/clear_refs").write_text("5")  # the resident set of now is the highest
    baseline = high_water()
    start = time.perf_counter()
    merge_checkpoint(source, target, progress=False)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "memory": high_water() - baseline}))


def high_water(process: str = "self") -> int:
    """Bytes of the highest resident set of a process so far; 0 if it has ended."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def merge(source: Path, target: Path) -> dict[str, float]:
    worker = [__file__, "--worker", "merge", "--folder", str(source), "--target", str(target)]
    done = subprocess.run([sys.executable, *worker], env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def copy(source: Path, target: Path) -> dict[str, float]:
    start = time.perf_counter()
    process = subprocess.Popen(["cp", "-r", str(source), str(target)])
    memory = 0
    while process.poll() is None:  # ru_maxrss would count what Python had when it forked
        memory = max(memory, high_water(str(process.pid)))
        time.sleep(0.002)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"cp ended with {process.returncode}")
    subprocess.run(["sync", *map(str, sorted(target.iterdir()))], check=True)
    synced = time.perf_counter() - start
    return {"seconds": synced, "without_sync": seconds, "memory": memory}


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def warm(folder: Path) -> float:
    """Read every file once; the share of their pages that then lies in the page cache."""
    pages = cached = 0
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.read(16 * MIB):
                pass
        here, there = resident_pages(path)
        pages, cached = pages + here, cached + there
    return cached / pages


def resident_pages(path: Path) -> tuple[int, int]:
    """Pages of a file, and how many of them lie in the page cache (mincore)."""
    size = path.stat().st_size
    count = -(-size // mmap.PAGESIZE)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        flags = (ctypes.c_ubyte * count)()
        start = ctypes.c_char.from_buffer(view)
        library = ctypes.CDLL(None, use_errno=True)
        library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        failed = library.mincore(ctypes.addressof(start), size, ctypes.addressof(flags))
        del start
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return count, sum(flag & 1 for flag in flags)


def measure(source: Path, work: Path, rounds: int) -> dict[str, Any]:
    """Both, in turns; the first round is not counted."""
    variants = {"merge": merge, "cp": copy}
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    cached = []
    for turn in range(rounds + 1):
        for variant, run in variants.items():
            target = work / variant
            cached.append(warm(source))
            os.sync()
            result = run(source, target)
            result["bytes"] = sum(path.stat().st_size for path in target.iterdir())
            shutil.rmtree(target)
            if turn:
                results[variant].append(result)

    def median(variant: str, key: str) -> float:
        return statistics.median(result[key] for result in results[variant])

    return {
        "rounds": rounds,
        "source_bytes": sum(path.stat().st_size for path in source.iterdir()),
        "page_cache": min(cached),
        "merge": {key: median("merge", key) for key in ("seconds", "memory", "bytes")},
        "cp": {key: median("cp", key) for key in ("seconds", "without_sync", "memory", "bytes")},
    }


def report(result: dict[str, Any], largest: int) -> None:
    from rich.console import Console
    from rich.table import Table

    merging, copying = result["merge"], result["cp"]
    title = f"{result['source_bytes'] / 1e9:.2f} GB, {result['page_cache']:.0%} of it in the page cache (warm); medians"
    table = Table(title=f"{title} of {result['rounds']}")
    for column in ("", "seconds", "MB/s", "written MB", "peak memory MiB"):
        table.add_column(column)
    rows = [
        ("merge, fsync", merging["seconds"], merging),
        ("cp -r, sync", copying["seconds"], copying),
        ("cp -r", copying["without_sync"], copying),
    ]
    for name, seconds, row in rows:
        speed = row["bytes"] / seconds / 1e6
        table.add_row(name, f"{seconds:.2f}", f"{speed:.0f}", f"{row['bytes'] / 1e6:.0f}", f"{row['memory'] / MIB:.1f}")
    console = Console(width=140)
    console.print(table)
    console.print(
        f"merge / (cp -r, sync) = {merging['seconds'] / copying['seconds']:.2f}, "
        f"merge / cp -r = {merging['seconds'] / copying['without_sync']:.2f}; "
        f"largest tensor {largest / MIB:.1f} MiB",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder: the disk to measure")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=["make", "merge"], help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker == "make":
        make_worker(arguments.folder, arguments.gigabytes)
        return
    if arguments.worker == "merge":
        merge_worker(arguments.folder, arguments.target)
        return
    with tempfile.TemporaryDirectory(prefix="autopar-merging-", dir=arguments.folder) as name:
        work = Path(name)
        make(work / "sharded", arguments.gigabytes, arguments.shards)
        result = measure(work / "sharded", work, arguments.rounds)
    largest = 4 * LAYER * max(LAYER * 11 // 4, 8192)
    if arguments.json:
        print(json.dumps({**result, "largest_tensor": largest}, indent=2))
    else:
        report(result, largest)


if __name__ == "__main__":
    main()

"""Merging and resharding a sharded checkpoint against copying the same bytes with ``cp -r``, interleaved in one run.

    python -m benchmarks merging                    # 1 GB, 2 shards
    python -m benchmarks merging --gigabytes 0.2 --rounds 3 --disk /mnt/disk

The checkpoint is that of a Llama with random fp32 weights, written by ``save_parallelized`` from ``--shards``
processes. Every measurement is a process of its own. Before each of them the source is read once, so that it lies in
the page cache (the last row says how much of it did), and what earlier ones wrote is forced to the disk.

* Seconds: of ``merge_checkpoint``, and of ``reshard_checkpoint`` to twice as many shards, without the start of Python;
  both end with an fsync of every file. Of ``cp -r``, and of ``cp -r`` followed by ``sync`` of every file that it wrote:
  only the latter is on the disk. ``/ cp`` is the median of the ratios to that in the same round.
* Memory: the highest resident set (VmHWM) of the process above what it was once everything was imported; for ``cp``
  the whole of it.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.process_memory import forget_high_water, high_water
from benchmarks.ranks import run_ranks
from benchmarks.rounds import ratio

MIB = 2**20
LAYER = 2048  # hidden size; the number of layers makes up the bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", help="where to make the temporary folder: the disk to measure")


def save_shards(options: dict[str, Any]) -> None:
    """On every rank: the whole model without its random initialisation, its share, random values, save."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    import autopar

    ffn, vocab = LAYER * 11 // 4, 8192
    layer = LAYER * (4 * LAYER + 3 * ffn) * 4
    count = max(1, round((options["gigabytes"] * 1e9 - 2 * vocab * LAYER * 4) / layer))
    config = LlamaConfig(
        hidden_size=LAYER, intermediate_size=ffn, num_hidden_layers=count, num_attention_heads=LAYER // 64
    )
    config.vocab_size = vocab
    with no_init_weights():
        model = LlamaForCausalLM(config)
    # The ranks must agree on what they hold before they shard it; the values come afterwards.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": dist.get_world_size()}})
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(generator=generator)
    model.save_parallelized(options["source"], timeout=600)  # type: ignore[operator]


def convert(options: dict[str, Any]) -> dict[str, float]:
    """In a process of its own: merge or reshard."""
    import tqdm  # noqa: F401  (what merging imports late is no part of the measurement)
    from huggingface_hub import split_state_dict_into_shards_factory  # noqa: F401

    from autopar.checkpoint import merge_checkpoint, reshard_checkpoint

    baseline = forget_high_water()
    start = time.perf_counter()
    if options["tp"]:
        reshard_checkpoint(options["source"], options["target"], tp=options["tp"], progress=False)
    else:
        merge_checkpoint(options["source"], options["target"], progress=False)
    return {"s": time.perf_counter() - start, "memory": high_water() - baseline}


def in_process(tp: int, source: Path, target: Path) -> dict[str, float]:
    """Call :func:`convert` in a fresh process."""
    options = {"source": str(source), "target": str(target), "tp": tp}
    result: dict[str, float] = run_ranks("benchmarks.merging:convert", options, 1, backend="")[0]
    return result


def copy(source: Path, target: Path) -> dict[str, float]:
    """Copy with ``cp -r``, then force the files to the disk."""
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
    return {"s": synced, "without_sync": seconds, "memory": memory}


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


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Do all in turns; the first round is not counted."""
    with tempfile.TemporaryDirectory(prefix="autopar-merging-", dir=options["disk"]) as name:
        work = Path(name)
        source = work / "sharded"
        given = {"gigabytes": options["gigabytes"], "source": str(source)}
        run_ranks("benchmarks.merging:save_shards", given, options["shards"])
        variants: dict[str, Any] = {
            "merge, fsync": partial(in_process, 0),
            f"reshard to tp {2 * options['shards']}, fsync": partial(in_process, 2 * options["shards"]),
            "cp -r, sync": copy,
        }
        results: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
        cached = []
        for turn in range(options["rounds"] + 1):
            for variant, run in variants.items():
                target = work / "target"
                cached.append(warm(source))
                os.sync()
                result = run(source, target)
                result["bytes"] = sum(path.stat().st_size for path in target.iterdir())
                shutil.rmtree(target)
                if turn:
                    results[variant].append(result)
        results["cp -r"] = [{**one, "s": one["without_sync"]} for one in results["cp -r, sync"]]
        size = sum(path.stat().st_size for path in source.iterdir())
    base = [one["s"] for one in results["cp -r, sync"]]
    rows = [row_of(variant, measured, base) for variant, measured in results.items()]
    return [*rows, {"source, MB": round(size / 1e6), "of it in the page cache": round(min(cached), 3)}]


def row_of(variant: str, measured: list[dict[str, float]], base: list[float]) -> dict[str, Any]:
    """Make a row of medians."""
    seconds = [one["s"] for one in measured]
    median = statistics.median(seconds)
    return {
        "variant": variant,
        "s": round(median, 3),
        "/ cp": round(ratio(seconds, base), 3),
        "MB/s": round(measured[0]["bytes"] / median / 1e6),
        "written, MB": round(measured[0]["bytes"] / 1e6),
        "peak memory, MiB": round(statistics.median(one["memory"] for one in measured) / MIB, 1),
    }

"""Memory, bytes read and time of loading a checkpoint with tensor parallelism, against its rivals, interleaved.

    .venv/bin/python benchmarks/loading.py                     # 2 processes, a Llama of 1 GB in one file
    .venv/bin/python benchmarks/loading.py --rounds 5 --shard-size 200MB

Variants, each in fresh processes, which touch every parameter after loading:

* ``autopar``: ``autopar.from_pretrained``, which reads each rank's own byte ranges;
* ``initialize``: transformers' ``from_pretrained`` followed by ``autopar.initialize``;
* ``transformers``: transformers' own tensor-parallel loading, where accelerate is installed (it needs that).

Peak is that of the resident memory (VmHWM) above what the process had before it loaded; pages of a mapped file count,
as they do for a container's limit on resident memory. Bytes read are those of all read calls (``rchar``); what a map
brings in does not appear there. The checkpoint was written just before: it is read from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ("autopar", "initialize", "transformers")
MIB = 1 << 20


def make(folder: str, layers: int, shard_size: str) -> None:
    """Write a Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=2816,
        vocab_size=32000,
    )
    with torch.no_grad():
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard_size)


def load(variant: str, folder: str, world: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    import autopar

    sizes = {"model_parallelism": {"tensor_parallel_size": world}}
    if variant == "autopar":
        return autopar.from_pretrained(AutoModelForCausalLM, folder, sizes, dtype=torch.float32)
    if variant == "initialize":
        return autopar.initialize(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), sizes)
    from transformers.distributed import DistributedConfig

    settings = DistributedConfig(tp_size=world, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=settings, dtype=torch.float32)


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(key + ":")
    )


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def worker(variant: str, folder: str) -> None:
    """One rank: load once, and tell what it took."""
    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama  # noqa: F401  (what every variant imports is no part of it)

    import autopar.pretrained  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    result: dict[str, Any] = {}
    dist.barrier()
    memory, read, start = status("VmRSS"), bytes_read(), time.perf_counter()
    try:
        model = load(variant, folder, world)
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.detach().view(-1)[:: 4096 // local.element_size()].sum().item()  # every page once
            result["share"] = result.get("share", 0) + local.numel() * local.element_size()
        result |= {"s": time.perf_counter() - start, "read": bytes_read() - read, "peak": status("VmHWM") - memory}
    except Exception as error:  # no accelerate
        result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    results: list[Any] = [None] * world
    dist.all_gather_object(results, result)
    if rank == 0:
        print(json.dumps(results), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads do not always end well


def measure(variant: str, folder: str, world: int) -> list[dict[str, Any]]:
    """Load once in ``world`` fresh processes; the result of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tools = ROOT / ".cache" / "gguf-tools"  # holds accelerate
    path = [str(ROOT), *([str(tools)] if tools.is_dir() else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    ranks = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(path),
        }
        command = [sys.executable, __file__, "--worker", variant, "--folder", folder]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    outputs = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{variant} failed:\n" + outputs[0][1].decode())
    return json.loads(outputs[0][0].decode().strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16, help="48 MB each")
    parser.add_argument("--shard-size", default="50GB", help="of the checkpoint's files")
    parser.add_argument("--folder", help="where to write the checkpoint (default: a temporary folder)")
    parser.add_argument("--json", help="also write the results there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.folder)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        make(folder, arguments.layers, arguments.shard_size)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        print(f"checkpoint of {size / MIB:.0f} MiB, {arguments.processes} processes, {arguments.rounds} rounds")
        rounds: dict[str, list[list[dict[str, Any]]]] = {variant: [] for variant in VARIANTS}
        for _ in range(arguments.rounds):
            for variant in VARIANTS:
                rounds[variant].append(measure(variant, folder, arguments.processes))
    print(f"{'variant':14}{'share MiB':>11}{'peak MiB':>10}{'of share':>10}{'read MiB':>10}{'of share':>10}{'s':>8}")
    table = {}
    for variant, measured in rounds.items():
        ranks = [rank for one in measured for rank in one]
        if "error" in ranks[0]:
            print(f"{variant:14} {ranks[0]['error']}")
            table[variant] = ranks[0]
            continue
        worst = max(ranks, key=lambda rank: rank["peak"] / rank["share"])
        most = max(ranks, key=lambda rank: rank["read"] / rank["share"])
        seconds = statistics.median(max(rank["s"] for rank in one) for one in measured)
        table[variant] = {"share": worst["share"], "peak": worst["peak"], "read": most["read"], "s": seconds}
        print(
            f"{variant:14}{worst['share'] / MIB:11.0f}{worst['peak'] / MIB:10.0f}{worst['peak'] / worst['share']:10.2f}"
            f"{most['read'] / MIB:10.0f}{most['read'] / most['share']:10.2f}{seconds:8.2f}"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()

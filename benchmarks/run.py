"""Step time of tensor parallelism against its rivals, interleaved in one run: medians and ratios.

    make bench                                      # 2 processes
    .venv/bin/python benchmarks/run.py --rounds 40 --sizes small

Variants, each forward + loss + backward on the same batch:

* ``plain``: the unmodified model in one process with one thread (the other processes wait);
* ``autopar``: ``autopar.initialize`` over all processes;
* ``transformers``: transformers' own ``tp_plan``, where accelerate is installed (it needs that) and the model has one.

The sizes are those of a compute-bound and of an overhead-bound step.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, int]] = {
    "large": {"hidden": 512, "layers": 8, "vocab": 32000, "seq": 128, "batch": 4},
    "small": {"hidden": 256, "layers": 12, "vocab": 1024, "seq": 32, "batch": 1},
}


def build(family: str, size: dict[str, int]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden, heads = size["hidden"], size["hidden"] // 64
    if family == "gpt2":
        config: Any = GPT2Config(
            n_embd=hidden, n_layer=size["layers"], n_head=heads, vocab_size=size["vocab"], bos_token_id=0
        )
        config.eos_token_id = 0
        config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
        return GPT2LMHeadModel(config)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=size["layers"],
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=hidden * 11 // 4 // 64 * 64,
            vocab_size=size["vocab"],
        )
    )


def rival(model: Any) -> Any:
    """transformers' own tensor parallelism, or None where it cannot."""
    from transformers import AutoModelForCausalLM

    try:
        from transformers.distributed import DistributedConfig

        with tempfile.TemporaryDirectory() as folder:
            shared: list[Any] = [folder]
            dist.broadcast_object_list(shared)
            if dist.get_rank() == 0:
                model.save_pretrained(shared[0])
            dist.barrier()
            settings = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
            loaded = AutoModelForCausalLM.from_pretrained(shared[0], distributed_config=settings, dtype=torch.float32)
            dist.barrier()
            return loaded
    except Exception as error:  # no accelerate, no plan for this model: the reason is in the table
        return f"{type(error).__name__}: {str(error).splitlines()[0][:70]}"


def worker(arguments: argparse.Namespace) -> None:
    import autopar

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    results = []
    for family in arguments.families:
        for name in arguments.sizes:
            size = SIZES[name]
            torch.manual_seed(1)
            ids = torch.randint(0, size["vocab"], (size["batch"], size["seq"]))
            plain = build(family, size)
            ours = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": world}})
            theirs = rival(plain)
            steps: dict[str, Callable[[], Any]] = {
                "plain": lambda model=plain, ids=ids: model(ids, labels=ids).loss.backward(),
                "autopar": lambda model=ours, ids=ids: model(ids, labels=ids).loss.backward(),
            }
            if not isinstance(theirs, str):
                steps["transformers"] = lambda model=theirs, ids=ids: model(ids, labels=ids).loss.backward()
            seconds: dict[str, list[float]] = {variant: [] for variant in steps}
            for turn in range(arguments.rounds + 3):
                for variant, step in steps.items():
                    dist.barrier()
                    start = time.perf_counter()
                    if variant != "plain" or dist.get_rank() == 0:
                        step()
                    dist.barrier()
                    if turn >= 3:
                        seconds[variant].append(time.perf_counter() - start)
            row = {variant: statistics.median(times) * 1000 for variant, times in seconds.items()}
            reason = theirs if isinstance(theirs, str) else ""
            results.append({"model": family, "size": name, "ms": row, "rival": reason})
            del plain, ours, theirs, steps
    if dist.get_rank() == 0:
        report(results, world, arguments.json)
    dist.barrier()
    dist.destroy_process_group()


def report(results: list[dict[str, Any]], world: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"forward + backward, tp {world}, gloo, one thread a rank; median ms")
    for column in ("model", "size", "plain", "autopar", "transformers", "plain / autopar", "transformers / autopar"):
        table.add_column(column)
    for row in results:
        ms = row["ms"]
        theirs = ms.get("transformers")
        table.add_row(
            row["model"],
            row["size"],
            f"{ms['plain']:.1f}",
            f"{ms['autopar']:.1f}",
            f"{theirs:.1f}" if theirs else row["rival"],
            f"{ms['plain'] / ms['autopar']:.2f}",
            f"{theirs / ms['autopar']:.2f}" if theirs else "-",
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    parser.add_argument("--families", nargs="+", choices=["llama", "gpt2"], default=["llama", "gpt2"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(arguments.processes), __file__, *sys.argv[1:]]
    tools = ROOT / ".cache" / "gguf-tools"  # holds accelerate, which transformers' own tensor parallelism needs
    path = os.pathsep.join([str(ROOT), *([str(tools)] if tools.is_dir() else [])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
